"""
A check at load: fixed outputs, cut everywhere, are split as they must be.

The tags and the opener of calls are those that a model's template and vocabulary led
to: two that overlap would show thinking as an answer, or lose a part of one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sidecar.output.families import OutputSyntax
from sidecar.output.reasoning_splitter import StartMode

_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_NEXT = "<|end|><|start|>assistant"
_CHANNEL_CALL = "to=functions.f <|constrain|>json<|message|>{}<|call|>"

_Parts = tuple[str, str, str]  # reasoning, content, tool buffer


@dataclass(frozen=True, slots=True)
class Sample:
    """An output, how it starts, and its reasoning, content and tool buffer."""

    what: str
    start: StartMode
    text: str
    parts: _Parts


def splitter_faults(syntax: OutputSyntax) -> tuple[str, ...]:
    """What this model's splitter does wrong, a sentence for each kind of output."""
    call = "" if syntax.has_channels else f"{syntax.tools.opener}X{syntax.tools.closer}"
    samples = _on_channels() if syntax.has_channels else _with_tags(syntax, call)
    return tuple(fault for sample in samples if (fault := _fault(syntax, sample, call)))


def _fault(syntax: OutputSyntax, sample: Sample, call: str) -> str | None:
    for pieces in _cuts(sample.text):
        found = _split(syntax, sample.start, pieces, call)
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


def _split(
    syntax: OutputSyntax, start: StartMode, pieces: Sequence[str], call: str
) -> _Parts:
    def is_call(text: str) -> bool:
        return text.strip() == call

    splitter = syntax.new_splitter(start, is_call, has_tools=True)
    spans = [span for piece in pieces for span in splitter.feed(piece)]
    last, tools = splitter.flush()
    joined = {"reasoning": "", "content": ""}
    for kind, text in (*spans, *last):
        joined[kind] += text
    return joined["reasoning"], joined["content"], tools


def _with_tags(syntax: OutputSyntax, call: str) -> tuple[Sample, ...]:
    begin, end = syntax.markers.think_open, syntax.markers.think_close
    quoted = f"r {call} s"
    return (
        Sample("thinking", "on", f"{begin}r{end}\nans", ("r", "ans", "")),
        Sample("opened thinking", "on", f"r{end}\n\nans", ("r", "ans", "")),
        Sample("unclosed thinking", "on", f"{begin}r", ("r", "", "")),
        Sample("thinking again", "on", f"r{end}x {begin}s{end} y", ("rs", "x y", "")),
        Sample("a call", "on", f"r{end}\n{call}", ("r", "", call)),
        Sample("a call in thinking", "on", f"r{call}", ("r", "", call)),
        Sample("a quoted call", "on", f"{quoted}{end}ans", (quoted, "ans", "")),
        Sample("an answer", "off", "  hi  \n", ("", "  hi", "")),
        Sample("an answer and a call", "off", f"t {call}", ("", "t", call)),
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
        Sample("a call", "on", call, ("r", "", _CHANNEL_CALL)),
    )
