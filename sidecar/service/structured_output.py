"""What a chat asks of the form of its answer, as a constraint for the engine."""

from dataclasses import dataclass, replace

from sidecar.core.errors import UnsupportedSchema
from sidecar.core.requests import ChatRequest, OutputFormat
from sidecar.engine.constrained_row import Constraint
from sidecar.engine.grammar_compiler import UnsupportedGrammar
from sidecar.engine.text_engine import TextEngine
from sidecar.output.answer_grammar import answer_grammar, call_grammar
from sidecar.output.output_syntax import StartMode
from sidecar.pipeline.template.chat_template import offered_tools

_FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """
    How an answer is held to its form.

    Args:
        constraint: None: it is free.
        unheld: fields that ask for a form which it is not held to, or not in all.
    """

    constraint: Constraint | None = None
    unheld: tuple[str, ...] = ()


def structured_output(
    request: ChatRequest, engine: TextEngine, start: StartMode
) -> StructuredOutput:
    """
    The constraint of a chat that asks for a form or for calls.

    Args:
        start: whether its prompt begins with thinking.
    Raises:
        UnsupportedSchema: naming the field, in the library's words.
    """
    if request.tool_choice.mode in ("required", "named"):
        held = _of_calls(request, engine, start)
    elif request.output_format is not None:
        held = _of_text(request, request.output_format, engine, start)
    else:
        held = StructuredOutput()
    if request.tool_choice.is_single and held.constraint is None:
        held = _with_one_call(held, request, engine, start)
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
    tools, calls = offered_tools(request), engine.model.syntax.calls
    vocab = engine.grammars.vocabulary
    try:
        grammar = call_grammar(request.tool_choice, tools, calls[0], vocab)
        if grammar is None:
            return StructuredOutput(unheld=("tool_choice",))
        matcher = engine.grammars.compile(grammar)
    except (UnsupportedGrammar, ValueError):
        return StructuredOutput(unheld=("tool_choice",))
    constraint = _behind_thinking(Constraint(engine.grammars, matcher), engine, start)
    names = (request.output_format.param,) if request.output_format else ()
    return StructuredOutput(constraint, names)


def _of_text(
    request: ChatRequest, asked: OutputFormat, engine: TextEngine, start: StartMode
) -> StructuredOutput:
    model = engine.model
    syntax = model.syntax.calls[0] if offered_tools(request) else None
    vocab = engine.grammars.vocabulary
    try:
        behind = start != "off" and not model.syntax.has_channels
        grammar = answer_grammar(asked, syntax, vocab, is_behind_thinking=behind)
        matcher = engine.grammars.compile(grammar)
    except (UnsupportedGrammar, ValueError) as error:
        raise UnsupportedSchema(
            f"{asked.param} cannot be kept to: {error}", param=asked.param
        ) from None
    constraint = _behind_thinking(Constraint(engine.grammars, matcher), engine, start)
    is_whole = asked.is_strict or not matcher.get_grammar_warnings()
    return StructuredOutput(constraint, () if is_whole else (asked.param,))


def _behind_thinking(
    constraint: Constraint, engine: TextEngine, start: StartMode
) -> Constraint:
    """A constraint that begins where the thinking ends."""
    model = engine.model
    if model.syntax.has_channels:
        return replace(constraint, behind=_FINAL)
    if start == "off":
        return constraint
    markers = model.syntax.markers
    if start == "on":
        return replace(constraint, behind=markers.think_close)
    opener = engine.grammars.vocabulary.get(markers.think_open)
    if opener is None:  # it does not think in this vocabulary's tokens: it answers
        return constraint
    return replace(constraint, behind=markers.think_close, opener=opener)
