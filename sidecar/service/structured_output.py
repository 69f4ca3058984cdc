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
        return _of_calls(request, engine, start)
    if request.output_format is None:
        return StructuredOutput()
    return _of_text(request, request.output_format, engine, start)


def _of_calls(
    request: ChatRequest, engine: TextEngine, start: StartMode
) -> StructuredOutput:
    tools, calls = offered_tools(request), engine.model.syntax.calls
    vocab = engine.grammars.vocabulary
    try:
        grammar = call_grammar(request.tool_choice, tools, calls[0], vocab)
        if grammar is None:
            return StructuredOutput(unheld=("tool_choice",))
        constraint = _compiled(grammar, engine, start)
    except (UnsupportedGrammar, ValueError):
        return StructuredOutput(unheld=("tool_choice",))
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
        constraint = _compiled(grammar, engine, start)
    except (UnsupportedGrammar, ValueError) as error:
        raise UnsupportedSchema(
            f"{asked.param} cannot be kept to: {error}", param=asked.param
        ) from None
    is_whole = asked.is_strict or not constraint.matcher.get_grammar_warnings()
    return StructuredOutput(constraint, () if is_whole else (asked.param,))


def _compiled(grammar: str, engine: TextEngine, start: StartMode) -> Constraint:
    model = engine.model
    constraint = Constraint(engine.grammars, engine.grammars.compile(grammar))
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
