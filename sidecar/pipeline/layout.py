"""
A rendered prompt as elements: literal text, volatile spans, turns to splice.

It is rendered once as it is (T) and once with a unique mark for every span and spliced
turn. Putting the values back in their places must give T exactly (substitution proof):
a template that re-escapes or reorders loses reuse, never content.
"""

import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sidecar.core.requests import Message
from sidecar.pipeline.canonical import MarkedMessage, Span
from sidecar.pipeline.elements import Element, Splice
from sidecar.pipeline.healing import Healed
from sidecar.pipeline.proof import match_run
from sidecar.pipeline.splicing import Frame

logger = logging.getLogger(__name__)

Render = Callable[[Sequence[Message]], str]
MARK = "zqmark"


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt's elements in order; without the proof there are no spans."""

    elements: tuple[Element, ...]
    is_proved: bool

    @property
    def spans(self) -> list[Span]:
        """The spans in order, with the values of this very request."""
        return [e for e in self.elements if isinstance(e, Span)]


@dataclass(frozen=True, slots=True)
class _Edge:
    """The end of a message before a spliced turn, where no span stands there."""

    message: int


_Slot = Span | Splice | _Edge


class _Marks:
    """
    Texts that stand for slots, and occur nowhere in the conversation.

    They are of letters that no template escapes, and a quote, which tells whether it
    was put into a JSON string.
    """

    def __init__(self) -> None:
        head = MARK + secrets.token_hex(8)
        self._head = head
        self._pattern = re.compile(rf'{head}(\\*)"([0-9]+);')

    def mark(self, number: int) -> str:
        return f'{self._head}"{number};'

    def split(self, text: str) -> tuple[list[str], list[int], list[bool]]:
        """Literals, the numbers between them, and which of these were quoted."""
        pieces = self._pattern.split(text)
        numbers = [int(number) for number in pieces[2::3]]
        return pieces[0::3], numbers, [bool(escape) for escape in pieces[1::3]]


@dataclass(frozen=True, slots=True)
class _Cut:
    """What the template prints of a spliced turn beside its mark: its ids hold it."""

    before: str
    behind: str


def lay_out(
    marked: Sequence[MarkedMessage],
    healed: Mapping[int, Healed],
    frame: Frame | None,
    render: Render,
) -> Layout:
    """
    Render a conversation into elements.

    Args:
        healed: message index -> the turn's own ids, for turns that may be spliced.
        frame: what the template puts around a turn; None: no splicing.
    Raises:
        BadRequest: the template refuses the conversation.
    """
    marks = _Marks()
    splices = _splicable(marked, healed, frame)
    slots: list[_Slot] = []
    messages = [*_with_marks(marked, splices, frame, (slots, marks))]
    literals, numbers, quoted = marks.split(render(messages))
    cuts: dict[int, _Cut] = {}
    is_whole = numbers == list(range(len(slots)))
    if is_whole:
        literals, cuts = _find_cuts(literals, slots, marked, frame)
    else:
        times = Counter(numbers)
        shown = [s for n, s in enumerate(slots) if times[n] == 1]
        cuts = {s.message: _Cut("", "") for s in shown if isinstance(s, Splice)}
    if len(cuts) < len(splices):  # hidden, repeated, not in its frame: left alone
        fewer = {index: splices[index] for index in cuts}
        return lay_out(marked, fewer, frame, render)
    if is_whole:
        elements = _elements(literals, slots, quoted)
        plain = render(
            [
                _placeholder(item.message, marks.mark(index), frame)
                if index in splices and frame
                else item.message
                for index, item in enumerate(marked)
            ]
        )
        segments = _segments(marks.split(plain), list(splices), cuts)
        if segments is not None:
            return _prove(elements, segments)
    logger.info("no substitution proof: strict reuse only")
    return Layout((render([m.message for m in marked]),), is_proved=False)


def _splicable(
    marked: Sequence[MarkedMessage], healed: Mapping[int, Healed], frame: Frame | None
) -> dict[int, Healed]:
    """Turns behind a message whose end is known, written behind the same header."""
    if frame is None:
        return {}
    splices = {}
    for index in sorted(healed):
        before = marked[index - 1].message.role if index else ""
        start = frame.starts.get(before)
        takes = frame.takes(len(marked[index].message.tool_calls))
        if start and start.header == healed[index].header and takes:
            splices[index] = healed[index]
    return splices


def _with_marks(
    marked: Sequence[MarkedMessage],
    splices: Mapping[int, Healed],
    frame: Frame | None,
    numbered: tuple[list[_Slot], _Marks],
) -> Iterator[Message]:
    slots, marks = numbered

    def slot(value: _Slot) -> str:
        slots.append(value)
        return marks.mark(len(slots) - 1)

    for index, item in enumerate(marked):
        if index in splices and frame is not None:
            mark = slot(Splice(index, splices[index]))
            yield _placeholder(item.message, mark, frame)
            continue
        pieces: Sequence[str | _Slot] = item.pieces
        has_edge = bool(pieces) and isinstance(pieces[-1], Span)
        if index + 1 in splices and not has_edge:
            pieces = _with_edge(index, item.message.text)
        text = "".join(p if isinstance(p, str) else slot(p) for p in pieces)
        yield replace(item.message, parts=(text,) if text else ())


def _with_edge(index: int, text: str) -> Sequence[str | _Slot]:
    """A template may trim white space at the end: it is a slot of its own."""
    kept = text.rstrip()
    tail = text[len(kept) :]
    space = [Span("tail_ws", index, len(kept), 0, tail, tail)] if tail else []
    return [kept, *space, _Edge(index)]


def _placeholder(message: Message, mark: str, frame: Frame) -> Message:
    """Role and calls stay: some templates demand a call before a tool result."""
    bare = replace(message, parts=(), reasoning=None, tool_calls=())
    if not frame.shows(len(message.tool_calls)):
        return replace(bare, parts=(mark,))
    *others, last = [replace(call, arguments="{}") for call in message.tool_calls]
    last = replace(last, arguments=json.dumps({"zq": mark}))
    return replace(bare, tool_calls=(*others, last))


def _find_cuts(
    literals: list[str],
    slots: Sequence[_Slot],
    marked: Sequence[MarkedMessage],
    frame: Frame | None,
) -> tuple[list[str], dict[int, _Cut]]:
    """
    Cut away what the template printed of spliced turns beside their marks.

    A literal's number is that of the slot behind it. Turns that do not stand as the
    frame says are not among the cuts.
    """
    cut, cuts = [*literals], {}
    for number, slot in enumerate(slots):
        if not isinstance(slot, Splice) or frame is None or not number:
            continue
        start = frame.starts[marked[slot.message - 1].message.role]
        opening = start.ended + start.header
        num_calls = len(marked[slot.message].message.tool_calls)
        closing = (frame.closing or "") if frame.shows(num_calls) else ""
        is_edge = slots[number - 1].message == slot.message - 1
        before, behind = cut[number], cut[number + 1]
        if is_edge and before.startswith(opening) and behind.startswith(closing):
            cuts[slot.message] = _Cut(before[len(opening) :], closing)
            cut[number], cut[number + 1] = opening, behind[len(closing) :]
    return cut, cuts


def _elements(
    literals: Sequence[str], slots: Sequence[_Slot], quoted: Sequence[bool]
) -> list[Element]:
    elements: list[Element] = [literals[0]]
    for slot, is_quoted, literal in zip(slots, quoted, literals[1:], strict=True):
        if isinstance(slot, Span):
            elements.append(replace(slot, is_quoted=is_quoted))
        elif isinstance(slot, Splice):
            elements.append(slot)
        elements.append(literal)
    return elements


def _segments(
    split: tuple[list[str], list[int], list[bool]],
    spliced: Sequence[int],
    cuts: Mapping[int, _Cut],
) -> list[str] | None:
    """T's texts between its spliced turns, what these hold cut away."""
    segments, numbers, _ = split
    if numbers != list(spliced):
        return None
    for at, index in enumerate(spliced):
        cut = cuts[index]
        before, behind = segments[at], segments[at + 1]
        if not before.endswith(cut.before) or not behind.startswith(cut.behind):
            return None
        segments[at] = before[: len(before) - len(cut.before)]
        segments[at + 1] = behind[len(cut.behind) :]
    return segments


def _prove(elements: Sequence[Element], segments: Sequence[str]) -> Layout:
    """Each run between spliced turns must give T's text; else there are no spans."""
    runs: list[list[str | Span]] = [[]]
    splices = [e for e in elements if isinstance(e, Splice)]
    for element in elements:
        if isinstance(element, Splice):
            runs.append([])
        else:
            runs[-1].append(element)
    matched = [match_run(run, text) for run, text in zip(runs, segments, strict=True)]
    is_proved = all(run is not None for run in matched)
    if not is_proved:
        logger.info("no substitution proof: no spans")
        matched = [[text] for text in segments]
    joined: list[Element] = [*(matched[0] or ())]
    for splice, run in zip(splices, matched[1:], strict=True):
        joined += [splice, *(run or ())]
    return Layout(tuple(joined), is_proved)
