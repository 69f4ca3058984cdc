"""The grammar of the calls that an answer must be, as Lark text for llguidance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sidecar.core.requests import Tool, ToolChoice
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
from sidecar.output.calls.marked_calls import (
    channels,
    deepseek,
    deepseek_fenced,
    kimi,
    mistral,
)
from sidecar.output.calls.python_calls import python_calls, tool_code
from sidecar.output.grammars.call_rules import (
    CallRules,
    deepseek_call,
    deepseek_fenced_call,
    kimi_call,
    mistral_call,
    named_call,
    object_call,
)
from sidecar.output.grammars.channel_rules import channel_call, channel_thoughts
from sidecar.output.grammars.element_rules import (
    dsml_rules,
    glm_rules,
    minimax_m3_rules,
    minimax_rules,
    qwen_rules,
    seed_rules,
)
from sidecar.output.grammars.lark import (
    LEADING,
    Tokens,
    any_of,
    check_patterns,
    joined,
    mark,
    text,
)
from sidecar.output.grammars.literal_rules import gemma_call, python_call

_LINES = CallRules(object_call("name", "arguments"), "\n", "\n", "\n")
_BLOCK_LINES = replace(_LINES, is_block=True)
_LIST = CallRules(object_call("name", "arguments"), "[", ", ", "]", is_block=True)
_MISTRAL_ID = f"""{text(', "id": "')} /[a-zA-Z0-9]{{9}}/ {text('"}')}"""
_COHERE_ID = f"""{text('{"tool_call_id": "')} /[0-9]{{1,2}}/ {text('", ')}"""
_RULES: dict[Format, CallRules] = {
    hermes_json: _LINES,
    json_list: _LIST,
    mistral_list: replace(
        _LIST, call=object_call("name", "arguments", last=_MISTRAL_ID)
    ),
    cohere_list: CallRules(
        object_call("tool_name", "parameters", first=_COHERE_ID),
        "[\n    ",
        ",\n    ",
        "\n]",
        is_block=True,
    ),
    bare_json: CallRules(
        object_call("name", "parameters"), has_marks=False, is_alone=True
    ),
    qwen3_coder_xml: replace(_LINES, call=qwen_rules),
    seed_xml: replace(_LINES, call=seed_rules),
    minimax_xml: replace(_BLOCK_LINES, call=minimax_rules),
    minimax_m3_xml: replace(_BLOCK_LINES, call=minimax_m3_rules),
    deepseek_dsml: replace(_BLOCK_LINES, call=dsml_rules("")),
    deepseek_dsml_spaced: replace(_BLOCK_LINES, call=dsml_rules(" ")),
    glm4_native: CallRules(glm_rules()),
    longcat: CallRules(glm_rules("longcat_")),
    glm4_xml: replace(_LINES, call=named_call),
    mistral: CallRules(mistral_call),
    kimi: CallRules(kimi_call, is_block=True),
    deepseek: CallRules(deepseek_call, is_block=True),
    deepseek_fenced: CallRules(deepseek_fenced_call, between="\n", is_block=True),
    channels: CallRules(channel_call, has_marks=False, is_alone=True),
    gemma: CallRules(gemma_call),
    python_calls: replace(_LIST, call=python_call),
    tool_code: CallRules(python_call, "\n[", ", ", "]\n", is_block=True),
}


def can_hold_calls(syntax: ToolSyntax) -> bool:
    """Whether there is a grammar of the calls of such a model."""
    return bool(syntax.formats) and syntax.formats[0] in _RULES


@dataclass(frozen=True, slots=True)
class Calls:
    """
    Calls as a grammar has them.

    Args:
        expression: of one or more. rules: that it needs.
    """

    expression: str
    rules: Sequence[str]


def calls_of(
    choice: ToolChoice, tools: Sequence[Tool], syntax: ToolSyntax, tokens: Tokens
) -> Calls:
    """
    One or more calls of these tools, of the one that is chosen by name if one is.

    Args:
        syntax: one that can hold calls.
    Raises:
        ValueError: a schema that cannot be told to the library.
    """
    offered = [t for t in tools if choice.name in (None, t.name)]
    rules = _RULES[syntax.formats[0]]
    one, needed = _any_call(rules, offered, tokens)
    is_alone = rules.is_alone or choice.mode == "named" or choice.is_single
    expression = _blocks(rules, syntax, one, tokens, is_alone=is_alone)
    return Calls(expression, needed)


def free_calls(syntax: ToolSyntax, tokens: Tokens) -> Calls:
    """Anything behind the mark that begins a call, of a model without rules."""
    return Calls(f"{mark(syntax.opener, tokens)} <[*]>*", ())


def call_grammar(calls: Calls, syntax: ToolSyntax, tokens: Tokens) -> str:
    """The grammar of an answer that is calls, and maybe thinking on channels."""
    before = channel_thoughts(tokens) if is_of_channels(syntax) else "leading"
    return joined(f"start: {before} {calls.expression}", [LEADING, *calls.rules])


def is_of_channels(syntax: ToolSyntax) -> bool:
    """Whether the model writes messages on channels."""
    return channels in syntax.formats


def can_hold_blocks(syntax: ToolSyntax, tokens: Tokens) -> bool:
    """Whether such a model's blocks begin with a token, and there is a grammar."""
    return syntax.opener in tokens and can_hold_calls(syntax)


def block_grammar(tools: Sequence[Tool], syntax: ToolSyntax, tokens: Tokens) -> str:
    """
    The grammar of what follows the token that begins a block, up to the block's end.

    Args:
        syntax: one that can hold blocks.
    Raises:
        ValueError: a schema that cannot be told to the library.
    """
    rules = _RULES[syntax.formats[0]]
    one, needed = _any_call(rules, tools, tokens)
    inside = _inside(rules, syntax, one, tokens, is_alone=False)
    return joined(f"start: {inside}", needed)


def _any_call(
    rules: CallRules, tools: Sequence[Tool], tokens: Tokens
) -> tuple[str, list[str]]:
    """An expression of a call of any of the tools, and the rules that it needs."""
    for tool in tools:
        check_patterns(tool.parameters)
    calls = [rules.call(number, tool, tokens) for number, tool in enumerate(tools)]
    one = any_of([f"call{number}" for number in range(len(tools))])
    return one, [rule for call in calls for rule in call]


def _blocks(
    rules: CallRules, syntax: ToolSyntax, one: str, tokens: Tokens, *, is_alone: bool
) -> str:
    """One block or several, of one call or several, `one` of which is any."""
    opener = mark(syntax.opener, tokens) if rules.has_marks else ""
    block = f"({opener} {_inside(rules, syntax, one, tokens, is_alone=is_alone)})"
    if rules.is_block or is_alone:
        return block
    # Some models write a line break there, some do not, whatever the format.
    return f"{block} ({text(chr(10))}? {block})*"


def _inside(
    rules: CallRules, syntax: ToolSyntax, one: str, tokens: Tokens, *, is_alone: bool
) -> str:
    """A block behind its opener."""
    several = rules.is_block and not is_alone
    calls = f"{one} ({_maybe(rules.between)} {one})*" if several else one
    closer = _closer(syntax, tokens) if rules.has_marks else ""
    return f"{_maybe(rules.head)} {calls} {_maybe(rules.tail)} {closer}"


def _maybe(value: str) -> str:
    return text(value) if value else ""


def _closer(syntax: ToolSyntax, tokens: Tokens) -> str:
    """
    What ends a block.

    A model with a token for the opener and none for the closer does not write that.
    """
    is_written = syntax.closer in tokens or syntax.opener not in tokens
    return mark(syntax.closer, tokens) if syntax.closer and is_written else ""
