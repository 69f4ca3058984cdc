"""The table of model families: each one's thinking markers, tool format and stops."""

from collections.abc import Callable, Collection
from typing import Any

from sidecar.output.calls.element_calls import qwen3_coder_xml
from sidecar.output.calls.glm_calls import glm4_native, glm4_xml
from sidecar.output.calls.json_calls import hermes_json
from sidecar.output.output_syntax import (
    Family,
    Markers,
    OutputSyntax,
)
from sidecar.output.syntax_settings import SyntaxSettings
from sidecar.output.tool_syntax import (
    TOOL_CALL,
    TOOL_PARSERS,
    has_channels,
    library_syntax,
    native_syntax,
    tool_call_syntax,
)

_XML = (qwen3_coder_xml, glm4_xml)
_THINK = ("<think>", "</think>")
REASONING_PARSERS = {
    "think": _THINK,
    "thinking": ("<thinking>", "</thinking>"),
    "reasoning": ("<reasoning>", "</reasoning>"),
    "reflection": ("<reflection>", "</reflection>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
# Those that a template or a vocabulary shows without the library's knowing them.
_SHOWN_TAGS = ("mistral", "seed", "minimax_m3", "cohere")


_FAMILIES = {
    "qwen3": Family("qwen3", False, ("<|im_end|>",), (hermes_json, *_XML, glm4_native)),
    "glm4": Family(
        "glm4",
        True,
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
        (glm4_native, *_XML, hermes_json),
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
        (hermes_json, *_XML, glm4_native),
    ),
}
AS_FOUND = SyntaxSettings()
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


def _think_tags(template: str, vocab: Collection[str]) -> tuple[str, str] | None:
    """The tags of its thinking, if the vocabulary or the template has them."""
    return next(
        (
            tags
            for tags in map(REASONING_PARSERS.__getitem__, _SHOWN_TAGS)
            if all(tag in vocab or tag in template for tag in tags)
        ),
        None,
    )


def output_syntax(
    family: Family,
    think_tags: tuple[str, str] | None,
    library: tuple[str, str, Callable[..., Any]] | None,
    template: str = "",
    vocab: Collection[str] = (),
    settings: SyntaxSettings = AS_FOUND,
) -> OutputSyntax:
    """
    Choose markers and parsers; what is set beats what is found.

    Args:
        think_tags: opening and closing tag the library inferred, if any.
        library: the library's tool markers and parser, if it inferred one. Of its
            parsers for `<tool_call>` ours read all they do, and one (glm47) makes a
            call of any prose: they are not used.
        template: the chat template's text. vocab: the vocabulary.
    """
    begin, end = think_tags or _think_tags(template, vocab) or _THINK
    if settings.reasoning_parser:
        begin, end = REASONING_PARSERS[settings.reasoning_parser]
    calls = native_syntax(template, vocab)
    if settings.tool_parser:
        calls = TOOL_PARSERS[settings.tool_parser]
    if not calls and library is not None and library[0] != TOOL_CALL[0]:
        calls = library_syntax(*library)
    calls = calls or tool_call_syntax(family.formats, template)
    is_set = settings.tool_parser or settings.reasoning_parser
    are_channels = has_channels(vocab) and not is_set
    return OutputSyntax(family, Markers(begin, end), calls, are_channels)
