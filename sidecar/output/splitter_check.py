"""
A check at load: fixed outputs, cut everywhere, are split as they must be.

The tags and the opener of calls are those that a model's template and vocabulary led
to: two that overlap would show thinking as an answer, or lose a part of one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sidecar.core.requests import Tool
from sidecar.output.calls.call_sink import Block
from sidecar.output.calls.scanner import Wait
from sidecar.output.output_syntax import OutputSyntax, StartMode
from sidecar.output.pieces import CallArguments, CallStarted
from sidecar.output.reasoning_splitter import new_splitter

_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_NEXT = "<|end|><|start|>assistant"
_CHANNEL_CALL = "to=functions.f <|constrain|>json<|message|>{}<|call|>"
_TOOL = Tool("f", {}, {})
_CALL = "f({})"

_Parts = tuple[str, str, str]  # reasoning, content, calls


@dataclass(frozen=True, slots=True)
class Sample:
    """An output, how it starts, and its reasoning, content and calls."""

    what: str
    start: StartMode
    text: str
    parts: _Parts


def splitter_faults(syntax: OutputSyntax) -> tuple[str, ...]:
    """What this model's splitter does wrong, a sentence for each kind of output."""
    if syntax.has_channels:
        samples = _on_channels()
    else:
        calls = tuple(replace(each, formats=(_one_call,)) for each in syntax.calls)
        syntax = replace(syntax, calls=calls)
        samples = _with_tags(syntax)
    return tuple(fault for sample in samples if (fault := _fault(syntax, sample)))


def _one_call(block: Block) -> Wait[None]:
    """Read the inside of the samples' block, whatever opener is part of it."""
    if not (yield from block.scan.take("X")):
        yield from block.scan.until("X", lambda _: None)
    block.take_call(_TOOL.name, "{}")


def _fault(syntax: OutputSyntax, sample: Sample) -> str | None:
    for pieces in _cuts(sample.text):
        found = _split(syntax, sample.start, pieces)
        if found != sample.parts:
            return (
                f"{sample.what}: {pieces!r} gave (reasoning, content, calls) {found!r}"
                f" instead of {sample.parts!r}"
            )
    return None


def _cuts(text: str) -> Iterator[list[str]]:
    """Whole, in two at every place, letter by letter."""
    yield [text]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    yield list(text)


def _split(syntax: OutputSyntax, start: StartMode, pieces: Sequence[str]) -> _Parts:
    splitter = new_splitter(syntax, start, (_TOOL,))
    found = [piece for text in pieces for piece in splitter.feed(text)]
    last, _ = splitter.flush(is_cut=False)
    joined = {"reasoning": "", "content": "", "calls": ""}
    for piece in (*found, *last):
        if isinstance(piece, tuple):
            joined[piece[0]] += piece[1]
        elif isinstance(piece, CallStarted):
            joined["calls"] += f"{piece.name}("
        elif isinstance(piece, CallArguments):
            joined["calls"] += piece.text
        else:
            joined["calls"] += ")"
    return joined["reasoning"], joined["content"], joined["calls"]


def _with_tags(syntax: OutputSyntax) -> tuple[Sample, ...]:
    begin, end = syntax.markers.think_open, syntax.markers.think_close
    own = syntax.calls[0]
    call = f"{own.opener}X{own.closer}"
    line = "\n" if own.at_line_start else ""
    quoted = f"r {call} s"
    in_thinking = ("r", "", _CALL)
    if own.at_line_start:  # it has no mark by which it could be told there
        in_thinking = (f"r{call}", "", "")
    return (
        Sample("thinking", "on", f"{begin}r{end}\nans", ("r", "ans", "")),
        Sample("opened thinking", "on", f"r{end}\n\nans", ("r", "ans", "")),
        Sample("unclosed thinking", "on", f"{begin}r", ("r", "", "")),
        Sample("thinking again", "on", f"r{end}x {begin}s{end} y", ("rs", "x y", "")),
        Sample("a call", "on", f"r{end}\n{call}", ("r", "", _CALL)),
        Sample("a call in thinking", "on", f"r{call}", in_thinking),
        Sample("a quoted call", "on", f"{quoted}{end}ans", (quoted, "ans", "")),
        Sample("an answer", "off", "  hi  \n", ("", "  hi", "")),
        Sample("an answer and a call", "off", f"t {line}{call}", ("", "t", _CALL)),
        Sample("a plain answer", "undecided", "plain", ("", "plain", "")),
        Sample("unasked thinking", "undecided", f"\n{begin}r{end}a", ("r", "a", "")),
    )


def _on_channels() -> tuple[Sample, ...]:
    begin = f"{_ANALYSIS}r{_NEXT}"
    call = f"{begin}<|channel|>commentary {_CHANNEL_CALL}"
    return (
        Sample("thinking", "on", f"{begin}{_FINAL}ans", ("r", "ans", "")),
        Sample("unclosed thinking", "on", f"{_ANALYSIS}r", ("r", "", "")),
        Sample("an answer", "off", f"{_FINAL}  hi  \n", ("", "  hi", "")),
        Sample("a call", "on", call, ("r", "", _CALL)),
    )
