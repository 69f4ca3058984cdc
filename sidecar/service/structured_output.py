"""What a chat asks of the form of its answer, as a constraint for the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from llguidance import LLMatcher

from sidecar.config.settings import GenerationConfig
from sidecar.core.errors import UnsupportedSchema
from sidecar.core.requests import ChatRequest, OutputFormat, Tool
from sidecar.engine.constrained_row import Constraint
from sidecar.engine.grammar_compiler import UnsupportedGrammar
from sidecar.engine.text_engine import TextEngine
from sidecar.output.answer_check import require_schema, schema_fault
from sidecar.output.calls.tool_schema import ToolSchema
from sidecar.output.grammars.answer_grammar import (
    answer_grammar,
    channel_answer_grammar,
)
from sidecar.output.grammars.call_grammar import (
    block_grammar,
    call_grammar,
    calls_of,
    can_hold_blocks,
    can_hold_calls,
    free_calls,
)
from sidecar.output.grammars.lark import Tokens, any_of, call_json, joined
from sidecar.output.output_syntax import StartMode
from sidecar.pipeline.template.chat_template import offered_tools

_CHECKABLE = ("json_schema", "json_object")


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """
    How an answer is held to its form.

    Args:
        constraint: None: it is free.
        unheld: fields that ask for a form which it is not held to, or not in all.
        tools: those that its grammar has calls of, with what it knows of them.
        checked: the schema that its text is checked against when it is there, as the
            grammar does not hold it to all of that; None: nothing is.
    """

    constraint: Constraint | None = None
    unheld: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    checked: OutputFormat | None = None


def structured_output(
    request: ChatRequest,
    engine: TextEngine,
    start: StartMode,
    defaults: GenerationConfig,
) -> StructuredOutput:
    """
    The constraint of a chat that asks for a form or for calls.

    Args:
        start: whether its prompt begins with thinking.
    Raises:
        UnsupportedSchema: naming the field, in the library's words.
    """
    must_call = request.tool_choice.mode in ("required", "named")
    if must_call and request.tools:
        held = _of_calls(request, engine, start)
    elif (form := request.output_format) is not None:
        is_known = defaults.so_mode == "constrained" and engine.grammars.knows_tokenizer
        is_held = is_known or form.kind not in _CHECKABLE
        held = _of_text(request, form, engine, start) if is_held else _checked(form)
    else:
        held = StructuredOutput()
    if must_call and not request.tools:
        held = replace(held, unheld=(*held.unheld, "tool_choice"))
    if request.tool_choice.is_single and held.constraint is None:
        held = _with_one_call(held, request, engine, start)
    are_all = defaults.tool_grammar == "calls"
    are_strict = bool(request.strict_params) or are_all
    is_free = held.constraint is None or held.constraint.matcher is None
    if are_strict and is_free and request.tool_choice.mode == "auto":
        held = _with_strict_calls(held, request, engine, start, are_all=are_all)
    budget = request.thinking.budget
    if budget is not None and start != "off":
        held = _with_budget(held, budget, engine, start)
    return _without_calls(held, engine) if request.calls_nothing else held


def _with_one_call(
    held: StructuredOutput, request: ChatRequest, engine: TextEngine, start: StartMode
) -> StructuredOutput:
    """Nothing behind the token that ends a call; what has none is cut off later."""
    syntax = engine.model.syntax.calls[0]
    end = engine.grammars.vocabulary.get(syntax.call_end or syntax.closer)
    if end is None or not offered_tools(request):
        return held
    constraint = _behind_thinking(
        Constraint(engine.grammars, call_end=end), engine, start
    )
    return replace(held, constraint=constraint)


def _with_strict_calls(
    held: StructuredOutput,
    request: ChatRequest,
    engine: TextEngine,
    start: StartMode,
    *,
    are_all: bool,
) -> StructuredOutput:
    """Calls held to the schemas of strict tools, or of all, if the model makes any."""
    named = request.strict_params
    offered = [
        tool if tool.strict_param or are_all else _of_any_arguments(tool)
        for tool in offered_tools(request)
    ]
    syntax, tokens = engine.model.syntax.calls[0], engine.grammars.vocabulary
    unheld = replace(held, unheld=(*held.unheld, *named))
    if not offered or not can_hold_blocks(syntax, tokens):
        return unheld
    try:
        matcher = _compiled(engine, lambda t: block_grammar(offered, syntax, t))
    except (UnsupportedGrammar, ValueError):
        return unheld
    constraint = held.constraint or _behind_thinking(
        Constraint(engine.grammars), engine, start
    )
    armed_by = (tokens[syntax.opener],)
    constraint = replace(constraint, matcher=matcher, armed_by=armed_by)
    found = held if _knows_all(offered, matcher, engine) else unheld
    return replace(found, constraint=constraint, tools=tuple(offered))


def _without_calls(held: StructuredOutput, engine: TextEngine) -> StructuredOutput:
    """No token that begins a call; where there is none, no tool is in the prompt."""
    banned = engine.model.syntax.opener_ids
    if not banned:
        return held
    constraint = held.constraint or Constraint(engine.grammars)
    return replace(held, constraint=replace(constraint, banned=banned))


def _with_budget(
    held: StructuredOutput, budget: int, engine: TextEngine, start: StartMode
) -> StructuredOutput:
    """Thinking that is closed by its tag when it has taken so many tokens."""
    model = engine.model
    close_ids = model.tokenizer.encode(
        model.syntax.markers.think_close, add_special_tokens=False
    )
    constraint = held.constraint or _behind_thinking(
        Constraint(engine.grammars), engine, start
    )
    if model.syntax.has_channels or not constraint.behind or not close_ids:
        return replace(held, unheld=(*held.unheld, "thinking.budget_tokens"))
    constraint = replace(constraint, budget=budget, close_ids=tuple(close_ids))
    return replace(held, constraint=constraint)


def _of_calls(
    request: ChatRequest, engine: TextEngine, start: StartMode
) -> StructuredOutput:
    """Calls and nothing else; of any arguments where a schema cannot be told."""
    names = (request.output_format.param,) if request.output_format else ()
    tools, syntax = offered_tools(request), engine.model.syntax.calls[0]
    unheld = StructuredOutput(unheld=("tool_choice", *names))
    if not tools or not can_hold_calls(syntax):
        return unheld

    def grammar(offered: Sequence[Tool], tokens: Tokens) -> str:
        calls = calls_of(request.tool_choice, offered, syntax, tokens)
        return call_grammar(calls, syntax, tokens)

    try:
        compiled = _compiled_with(tools, grammar, engine)
    except (UnsupportedGrammar, ValueError):
        return unheld
    matcher = compiled.matcher
    constraint = _behind_thinking(Constraint(engine.grammars, matcher), engine, start)
    is_whole = _knows_all(compiled.tools, matcher, engine)
    strict = () if is_whole else request.strict_params
    fields = (*names, *compiled.unheld, *strict)
    return StructuredOutput(constraint, fields, compiled.tools)


def _knows_all(tools: Sequence[Tool], matcher: LLMatcher, engine: TextEngine) -> bool:
    """Whether a grammar of calls holds all that strict tools say, as far as it may."""
    return not matcher.get_grammar_warnings() and _knows_parts(tools, engine)


def _knows_parts(tools: Sequence[Tool], engine: TextEngine) -> bool:
    """
    Whether the library knows all keywords of strict tools.

    In formats without quotes its own compiler does not see what may be a text.
    """
    strict = [tool.parameters for tool in tools if tool.strict_param]
    if not strict:
        return True
    rules = [f"tool{at}: {call_json(one)}" for at, one in enumerate(strict)]
    start = f"start: {any_of([f'tool{at}' for at in range(len(strict))])}"
    try:
        return not engine.grammars.compile(joined(start, rules)).get_grammar_warnings()
    except UnsupportedGrammar:
        return False


@dataclass(frozen=True, slots=True)
class _Compiled:
    """
    A grammar in which tools are called.

    Args:
        tools: with what it knows of them. unheld: fields that it does not hold.
    """

    matcher: LLMatcher
    tools: tuple[Tool, ...]
    unheld: tuple[str, ...] = ()


def _compiled_with(
    tools: Sequence[Tool],
    grammar: Callable[[Sequence[Tool], Tokens], str],
    engine: TextEngine,
) -> _Compiled:
    """
    Compile a grammar of calls, of any arguments where a tool's schema is the fault.

    Args:
        grammar: its text, for tools and a vocabulary.
    Raises:
        UnsupportedGrammar, ValueError: the fault is elsewhere.
    """
    try:
        return _Compiled(_compiled(engine, partial(grammar, tools)), tuple(tools))
    except (UnsupportedGrammar, ValueError):
        loose = tuple(_of_any_arguments(tool) for tool in tools)
        matcher = _compiled(engine, partial(grammar, loose))
        return _Compiled(matcher, loose, ("tools",))


def _compiled(engine: TextEngine, grammar: Callable[[Tokens], str]) -> LLMatcher:
    """
    Compile a grammar that names tokens.

    Args:
        grammar: its text in a vocabulary.
    Raises:
        UnsupportedGrammar: in the library's words, or as a schema has no end.
    """
    grammars = engine.grammars
    try:
        trial = grammar(grammars.trial_vocabulary)
        return grammars.compile(grammar(grammars.vocabulary), trial)
    except RecursionError:
        raise UnsupportedGrammar("a schema refers to itself without end") from None


def _of_any_arguments(tool: Tool) -> Tool:
    """The same tool, of whose arguments nothing but the names and types is told."""
    return replace(tool, parameters=ToolSchema(tool.parameters).names_and_types)


def _of_text(
    request: ChatRequest, asked: OutputFormat, engine: TextEngine, start: StartMode
) -> StructuredOutput:
    """
    A form, or calls in its place where tools are offered.

    Raises:
        UnsupportedSchema: the form cannot be kept to.
    """
    tools = offered_tools(request)
    grammar = _form_grammar(request, asked, engine, start)
    try:
        compiled = _compiled_with(tools, grammar, engine)
    except (UnsupportedGrammar, ValueError) as error:
        if asked.kind in _CHECKABLE and not asked.is_strict:
            return _checked(asked)
        raise UnsupportedSchema(
            f"{asked.param} cannot be kept to: {error}", param=asked.param
        ) from None
    matcher = compiled.matcher
    constraint = _behind_thinking(Constraint(engine.grammars, matcher), engine, start)
    passed_over = len(matcher.get_grammar_warnings())
    of_form = _num_passed_over(asked, engine) if passed_over else 0
    is_partly = bool(of_form) and not asked.is_strict
    form = (asked.param,) if is_partly else ()
    are_held = passed_over == of_form and can_hold_calls(engine.model.syntax.calls[0])
    is_whole = are_held and _knows_parts(compiled.tools, engine)
    strict = () if is_whole else request.strict_params
    fields = (*form, *compiled.unheld, *strict)
    can_check = is_partly and asked.kind in _CHECKABLE and not schema_fault(asked)
    checked = asked if can_check else None
    return StructuredOutput(constraint, fields, compiled.tools, checked)


def _checked(asked: OutputFormat) -> StructuredOutput:
    """
    A form that the answer is only checked against.

    Raises:
        UnsupportedSchema: it is no schema.
    """
    if asked.is_strict:
        require_schema(asked)
        return StructuredOutput(checked=asked)
    checked = None if schema_fault(asked) else asked
    return StructuredOutput(unheld=(asked.param,), checked=checked)


def _num_passed_over(asked: OutputFormat, engine: TextEngine) -> int:
    """In how many places of the form the library passes over something."""
    return len(engine.grammars.compile(answer_grammar(asked)).get_grammar_warnings())


def _form_grammar(
    request: ChatRequest, asked: OutputFormat, engine: TextEngine, start: StartMode
) -> Callable[[Sequence[Tool], Tokens], str]:
    syntax = engine.model.syntax
    own = syntax.calls[0]

    def grammar(tools: Sequence[Tool], tokens: Tokens) -> str:
        calls = None
        if tools and can_hold_calls(own):
            calls = calls_of(request.tool_choice, tools, own, tokens)
        elif tools:
            calls = free_calls(own, tokens)
        if syntax.has_channels:
            return channel_answer_grammar(asked, calls, tokens)
        return answer_grammar(asked, calls, is_behind_thinking=start != "off")

    return grammar


def _behind_thinking(
    constraint: Constraint, engine: TextEngine, start: StartMode
) -> Constraint:
    """A constraint that begins where the thinking ends."""
    model = engine.model
    if model.syntax.has_channels or start == "off":
        return constraint
    markers = model.syntax.markers
    opener = engine.grammars.vocabulary.get(markers.think_open)
    if start != "on" and opener is None:
        return constraint  # it does not think in this vocabulary's tokens: it answers
    close = markers.think_close
    beyond = engine.grammars.tokens_beyond(close) if constraint.matcher else {}
    begins = opener if start != "on" else None
    return replace(constraint, behind=close, opener=begins, beyond=beyond)
