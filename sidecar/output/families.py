"""The table of model families: each one's thinking markers, tool format and stops."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from sidecar.output.channel_splitter import ChannelSplitter
from sidecar.output.native_formats import (
    has_channels,
    native_syntax,
    native_think_tags,
)
from sidecar.output.reasoning_splitter import (
    Markers,
    Splitter,
    StartMode,
    StreamSplitter,
)
from sidecar.output.tool_formats import (
    FORMATS,
    FormatParser,
    ToolSyntax,
    from_library,
)

_XML, _LEGACY, _JSON = (
    FORMATS["qwen3_coder_xml"],
    FORMATS["glm4_native"],
    FORMATS["hermes_json"],
)


@dataclass(frozen=True, slots=True)
class Family:
    """
    One row of the family table.

    Args:
        always_reasons: its templates open the think block and close it without ever
            printing the opening tag.
        stop_tokens: end-of-turn tokens beside the tokenizer's own.
    """

    name: str
    always_reasons: bool
    stop_tokens: tuple[str, ...]
    formats: tuple[FormatParser, ...]


_FAMILIES = {
    "qwen3": Family("qwen3", False, ("<|im_end|>",), (_JSON, _XML, _LEGACY)),
    "glm4": Family(
        "glm4",
        True,
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
        (_LEGACY, _XML, _JSON),
    ),
    "generic": Family(
        "generic",
        False,
        (
            "<|im_end|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|end_of_turn|>",
            "<end_of_turn>",
            "<turn|>",
            "<|tool_response>",
            "<|call|>",
            "<|return|>",
        ),
        (_JSON, _XML, _LEGACY),
    ),
}
FAMILY_ALIASES = {
    "qwen": "qwen3",
    "qen3": "qwen3",
    "glm": "glm4",
    "glm-4": "glm4",
    **{name: name for name in _FAMILIES},
}


def find_family(setting: str | None, model_name: str, model_type: str) -> Family:
    """The configured family, else the one that the name or type speaks of."""
    if setting:
        return _FAMILIES[FAMILY_ALIASES[setting.lower()]]
    known = f"{model_name} {model_type}".lower()
    if "qwen" in known:
        return _FAMILIES["qwen3"]
    return _FAMILIES["glm4" if "glm" in known else "generic"]


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """
    The output side of one loaded model; computed once.

    Args:
        has_channels: it writes messages on channels, and no tags.
    """

    family: Family
    markers: Markers
    tools: ToolSyntax
    has_channels: bool = False

    def new_splitter(
        self,
        start: StartMode,
        is_complete_call: Callable[[str], bool],
        *,
        has_tools: bool,
        is_held: bool = False,
    ) -> Splitter:
        """
        A splitter of one generation.

        Args:
            is_held: its content is held to a form, and may hold a tag as a text.
        """
        if self.has_channels:
            return ChannelSplitter(has_tools=has_tools)
        openers = (self.tools.opener,) if has_tools else ()
        markers = replace(
            self.markers, tool_openers=openers, are_in_content=not is_held
        )
        return StreamSplitter(markers, start, is_complete_call)


def _own_first(
    formats: tuple[FormatParser, ...], template: str
) -> tuple[FormatParser, ...]:
    """The formats of one opener, that which the template shows the model first."""
    shown = {_XML: "<function=", _LEGACY: "<arg_key>"}
    return tuple(sorted(formats, key=lambda one: shown.get(one, "\0") not in template))


def output_syntax(
    family: Family,
    think_tags: tuple[str, str] | None,
    library: tuple[str, str, Callable[..., Any]] | None,
    template: str = "",
    vocab: Collection[str] = (),
) -> OutputSyntax:
    """
    Choose markers and parsers.

    Args:
        think_tags: opening and closing tag the library inferred, if any.
        library: the library's tool markers and parser, if it inferred one. Of its
            parsers for `<tool_call>` ours read all they do, and one (glm47) makes a
            call of any prose: they are not used.
        template: the chat template's text. vocab: the vocabulary.
    """
    tags = think_tags or native_think_tags(vocab) or ("<think>", "</think>")
    native = native_syntax(template, vocab)
    if native is not None:
        markers = Markers(tags[0], tags[1])
        return OutputSyntax(family, markers, native, has_channels(vocab))
    opener, closer, parse = library or ("<tool_call>", "</tool_call>", None)
    formats = _own_first(family.formats, template)
    if opener != "<tool_call>" and parse is not None:
        formats = (from_library(parse),)
    syntax = ToolSyntax(opener, closer, formats)
    return OutputSyntax(family, Markers(tags[0], tags[1]), syntax)
