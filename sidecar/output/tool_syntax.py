"""How a model writes calls: by what its template and its vocabulary hold."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sidecar.output.calls.call_sink import Format, ToolSyntax
from sidecar.output.calls.element_calls import (
    deepseek_dsml,
    deepseek_dsml_spaced,
    minimax_m3_xml,
    minimax_xml,
    qwen3_coder_xml,
    seed_xml,
)
from sidecar.output.calls.gemma_calls import gemma
from sidecar.output.calls.glm_calls import glm4_native, glm4_xml, longcat
from sidecar.output.calls.json_calls import (
    bare_json,
    cohere_list,
    hermes_json,
    json_list,
    mistral_list,
)
from sidecar.output.calls.library_calls import from_library
from sidecar.output.calls.marked_calls import (
    channels,
    deepseek,
    deepseek_fenced,
    kimi,
    mistral,
)
from sidecar.output.calls.python_calls import python_calls, tool_code

_CHANNELS = ("<|channel|>", "<|message|>")
CHANNEL_SYNTAX = ToolSyntax("to=", "<|call|>", (channels,))
TOOL_CALL = ("<tool_call>", "</tool_call>")
_MINIMAX_M3 = "]<]minimax[>["


def _between(opener: str, closer: str, *formats: Format) -> tuple[ToolSyntax, ...]:
    return (ToolSyntax(opener, closer, formats),)


def _bare(*openers: str) -> tuple[ToolSyntax, ...]:
    return tuple(
        ToolSyntax(opener, "", (bare_json,), is_inside=True, at_line_start=True)
        for opener in openers
    )


# A function element whose `<tool_call>` the model left out, or Llama's own.
_FUNCTION = ToolSyntax("<function=", TOOL_CALL[1], (qwen3_coder_xml,), is_inside=True)
_BARE = _bare('{"name":', '{"name" :', '{"type":"function"', '{"type": "function"')
_LLAMA = (
    *_BARE,
    ToolSyntax("<|python_tag|>", "<|eom_id|>", (hermes_json, python_calls)),
    replace(_FUNCTION, closer=""),
)
_DSML = tuple(
    ToolSyntax(f"<{name}>", f"</{name}>", (deepseek_dsml, deepseek_dsml_spaced))
    for name in (
        "｜DSML｜function_calls", "｜DSML｜tool_calls", "｜DSML｜ calls",
        "｜DSML｜ tool_calls", "｜DSML｜calls",
    )
)  # fmt: skip
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_LIQUID = ("<|tool_call_start|>", "<|tool_call_end|>")
_M3 = (f"{_MINIMAX_M3}<tool_call>", f"{_MINIMAX_M3}</tool_call>")
# By what a template or a vocabulary holds; the first that is there counts.
_SYNTAXES: tuple[tuple[str, tuple[ToolSyntax, ...]], ...] = (
    (_MINIMAX_M3, _between(*_M3, minimax_m3_xml)),
    (
        "<minimax:tool_call>",
        _between("<minimax:tool_call>", "</minimax:tool_call>", minimax_xml),
    ),
    ("｜DSML｜", _DSML),
    (
        "<｜tool▁calls▁begin｜>",
        (
            ToolSyntax(
                *_DEEPSEEK, (deepseek, deepseek_fenced), call_end="<｜tool▁call▁end｜>"
            ),
        ),
    ),
    (
        "<|tool_calls_section",
        (ToolSyntax(*_KIMI_SECTION, (kimi,), call_end="<|tool_call_end|>"),),
    ),
    ("<|tool_call>", _between("<|tool_call>", "<tool_call|>", gemma)),
    (
        "<start_function_call>",
        _between("<start_function_call>", "<end_function_call>", gemma),
    ),
    (
        "<seed:tool_call>",
        _between("<seed:tool_call>", "</seed:tool_call>", seed_xml),
    ),
    ("[TOOL_CALLS]", _between("[TOOL_CALLS]", "", mistral_list, mistral)),
    ("<|START_ACTION|>", _between("<|START_ACTION|>", "<|END_ACTION|>", cohere_list)),
    ("<|tool_call_start|>", _between(*_LIQUID, python_calls, hermes_json)),
    (
        "<longcat_tool_call>",
        _between("<longcat_tool_call>", "</longcat_tool_call>", hermes_json, longcat),
    ),
    ("<TOOLCALL>", _between("<TOOLCALL>", "</TOOLCALL>", json_list)),
    ("<|tool_call|>", _between("<|tool_call|>", "<|/tool_call|>", json_list)),
    ("```tool_code", _between("```tool_code", "```", tool_code)),
    ("<|start_header_id|>ipython", _LLAMA),
    ("<|python_tag|>", _LLAMA),
)


def _tool_call(first: Format) -> tuple[ToolSyntax, ...]:
    others = (hermes_json, qwen3_coder_xml, glm4_xml, glm4_native)
    formats = (first, *(one for one in others if one is not first))
    return (ToolSyntax(*TOOL_CALL, formats), _FUNCTION)


_BY_MARK = dict(_SYNTAXES)


def _of_mark(mark: str, *formats: Format) -> tuple[ToolSyntax, ...]:
    found = _BY_MARK[mark]
    return tuple(replace(one, formats=formats or one.formats) for one in found)


# What a person may set for a model whose template says nothing, or the wrong thing.
TOOL_PARSERS: dict[str, tuple[ToolSyntax, ...]] = {
    "hermes_json": _tool_call(hermes_json),
    "qwen3_coder_xml": _tool_call(qwen3_coder_xml),
    "glm4_native": _tool_call(glm4_native),
    "glm4_xml": _tool_call(glm4_xml),
    "llama": _LLAMA,
    "liquid_python": _of_mark("<|tool_call_start|>"),
    "tool_code": _of_mark("```tool_code"),
    "mistral": _of_mark("[TOOL_CALLS]", mistral_list, mistral),
    "devstral": _of_mark("[TOOL_CALLS]", mistral, mistral_list),
    "gemma": _of_mark("<start_function_call>"),
    "gemma4": _of_mark("<|tool_call>"),
    "kimi_k2": _of_mark("<|tool_calls_section"),
    "deepseek_v3": _of_mark("<｜tool▁calls▁begin｜>", deepseek_fenced, deepseek),
    "deepseek_v31": _of_mark("<｜tool▁calls▁begin｜>", deepseek, deepseek_fenced),
    "deepseek_v32": _of_mark("｜DSML｜"),
    "minimax_m2": _of_mark("<minimax:tool_call>"),
    "minimax_m3": _of_mark(_MINIMAX_M3),
    "seed": _of_mark("<seed:tool_call>"),
    "cohere_action": _of_mark("<|START_ACTION|>"),
    "longcat": _of_mark("<longcat_tool_call>"),
    "nemotron": _of_mark("<TOOLCALL>"),
    "granite": _of_mark("<|tool_call|>"),
}
# What shows which of several formats is a model's own.
_SHOWN: dict[str, Format] = {
    "<function=": qwen3_coder_xml,
    "<arg_key>": glm4_native,
    "<name>": glm4_xml,
    "<longcat_arg_key>": longcat,
    "[ARGS]": mistral,
    "```json": deepseek_fenced,
    "｜DSML｜ invoke": deepseek_dsml_spaced,
}


def has_channels(vocab: Collection[str]) -> bool:
    """Whether this model writes messages on channels, as gpt-oss does."""
    return all(token in vocab for token in _CHANNELS)


def native_syntax(template: str, vocab: Collection[str]) -> tuple[ToolSyntax, ...]:
    """How this model writes calls, its own way first; none if it has no own one."""
    if has_channels(vocab):
        return (CHANNEL_SYNTAX,)
    for marker, syntaxes in _SYNTAXES:
        if marker in template or marker in vocab:
            return _shown_first(syntaxes, template, vocab)
    return ()


def opener_ids(
    syntaxes: Sequence[ToolSyntax], vocab: Mapping[str, int]
) -> tuple[int, ...]:
    """
    The tokens that begin a call.

    Returns:
        None of them where the model's own opener is more than one token.
    """
    if not syntaxes or syntaxes[0] is CHANNEL_SYNTAX or syntaxes[0].is_inside:
        return ()
    if syntaxes[0].opener not in vocab:
        return ()
    return tuple(vocab[one.opener] for one in syntaxes if one.opener in vocab)


def _shown_first(
    syntaxes: tuple[ToolSyntax, ...], template: str, vocab: Collection[str]
) -> tuple[ToolSyntax, ...]:
    """
    Those whose opener the template shows stand before those that it does not.

    So do the formats of each that it, or the vocabulary, shows.
    """
    ordered = (
        replace(one, formats=_own_first(one.formats, template, vocab))
        for one in syntaxes
    )
    return tuple(sorted(ordered, key=lambda one: one.opener not in template))


def _own_first(
    formats: tuple[Format, ...], template: str, vocab: Collection[str] = ()
) -> tuple[Format, ...]:
    shown = [read for mark, read in _SHOWN.items() if mark in template or mark in vocab]
    return tuple(sorted(formats, key=lambda read: read not in shown))


def tool_call_syntax(
    formats: tuple[Format, ...], template: str
) -> tuple[ToolSyntax, ...]:
    """
    How a model of `<tool_call>` blocks writes them.

    Args:
        formats: of its family; that which the template shows comes first.
    """
    return (ToolSyntax(*TOOL_CALL, _own_first(formats, template)), _FUNCTION)


def library_syntax(
    opener: str, closer: str, parse: Callable[..., Any]
) -> tuple[ToolSyntax, ...]:
    """The way of a model that only mlx-lm has a parser for."""
    return (ToolSyntax(opener, closer, (from_library(parse),)),)
