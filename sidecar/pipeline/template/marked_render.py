"""
A rendered prompt as elements: literal text, volatile spans, turns to splice.

It is rendered once as it is (T) and once with a unique mark for every span and spliced
turn. Putting the values back in their places must give T exactly (substitution proof):
a template that re-escapes or reorders loses reuse, never content.
"""

import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Message
from sidecar.memory.known_turns import Healed
from sidecar.pipeline.template.elements import (
    Element,
    Rendered,
    Splice,
    match_run,
)
from sidecar.pipeline.template.placeholders import (
    Placeholder,
    plan_placeholders,
    without,
)
from sidecar.pipeline.template.turn_delimiters import TurnDelimiters
from sidecar.volatile.marked_message import MarkedMessage, Span

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
    delimiters: TurnDelimiters | None,
    render: Render,
) -> Layout:
    """
    Render a conversation into elements.

    Args:
        healed: message index -> the turn's own ids, for turns that may be spliced.
        delimiters: what the template puts around a turn; None: no splicing.
    Raises:
        BadRequest: the template refuses the conversation.
    """
    found = _lay_out(marked, healed, delimiters, render)
    if found.is_proved or all(item.message.text.strip() for item in marked):
        return found
    # Where messages are joined a blank one is left out, and one with a mark is not.
    unmarked = [_without_spans_if_blank(item) for item in marked]
    again = _lay_out(unmarked, healed, delimiters, render)
    return again if again.is_proved else found


def _without_spans_if_blank(item: MarkedMessage) -> MarkedMessage:
    text = item.message.text
    if text.strip():
        return item
    return replace(item, pieces=(text,) if text else ())


def _lay_out(
    marked: Sequence[MarkedMessage],
    healed: Mapping[int, Healed],
    delimiters: TurnDelimiters | None,
    render: Render,
) -> Layout:
    planned = plan_placeholders(marked, healed, delimiters)
    while planned:
        try:
            found = _try_lay_out(marked, planned, render)
        except BadRequest:  # of the placeholders, or of the conversation itself
            break
        if isinstance(found, Layout):
            return found
        planned = without(planned, found)
    found = _try_lay_out(marked, {}, render)
    assert isinstance(found, Layout)
    return found


def _try_lay_out(
    marked: Sequence[MarkedMessage], planned: Mapping[int, Placeholder], render: Render
) -> Layout | set[int]:
    """The layout, or the turns that do not stand as their delimiters say."""
    marks = _Marks()
    slots: list[_Slot] = []
    messages = [*_with_marks(marked, planned, slots, marks)]
    literals, numbers, quoted = marks.split(render(messages))
    if numbers == list(range(len(slots))):
        literals, cuts = _find_cuts(literals, slots, planned)
        if len(cuts) < len(planned):
            return set(planned) - set(cuts)
        plain = render([*_plain(marked, planned, marks)])
        texts, kept, _ = marks.split(plain)
        is_whole = kept == list(planned)
        segments = _segments(texts, list(planned), cuts) if is_whole else None
        if segments is not None:
            return _prove(_elements(literals, slots, quoted), segments)
    if planned:
        times = Counter(numbers)
        wrong = [s for n, s in enumerate(slots) if times[n] != 1]
        return {s.message for s in wrong if isinstance(s, Splice)} or set(planned)
    logger.info("no substitution proof: strict reuse only")
    return Layout((render([m.message for m in marked]),), is_proved=False)


def _with_marks(
    marked: Sequence[MarkedMessage],
    planned: Mapping[int, Placeholder],
    slots: list[_Slot],
    marks: _Marks,
) -> Iterator[Message]:
    def slot(value: _Slot) -> str:
        slots.append(value)
        return marks.mark(len(slots) - 1)

    for index, item in enumerate(marked):
        if index in planned:
            mark = slot(Splice(index, planned[index].healed))
            yield planned[index].message(item.message, mark)
            continue
        pieces: Sequence[str | _Slot] = item.pieces
        has_edge = bool(pieces) and isinstance(pieces[-1], Span)
        if index + 1 in planned and not has_edge and item.message.text.strip():
            pieces = _with_edge(index, item.message.text)
        text = "".join(p if isinstance(p, str) else slot(p) for p in pieces)
        yield replace(item.message, parts=(text,) if text else ())


def _with_edge(index: int, text: str) -> Sequence[str | _Slot]:
    """A template may trim white space at the end: it is a slot of its own."""
    kept = text.rstrip()
    tail = text[len(kept) :]
    space = [Span("tail_ws", index, len(kept), tail, tail)] if tail else []
    return [kept, *space, _Edge(index)]


def _plain(
    marked: Sequence[MarkedMessage], planned: Mapping[int, Placeholder], marks: _Marks
) -> Iterator[Message]:
    """T's messages; a spliced turn keeps a mark, for its text is not T's business."""
    for index, item in enumerate(marked):
        if index in planned:
            yield planned[index].message(item.message, marks.mark(index))
        else:
            yield item.message


def _find_cuts(
    literals: Sequence[str],
    slots: Sequence[_Slot],
    planned: Mapping[int, Placeholder],
) -> tuple[list[str], dict[int, _Cut]]:
    """
    Cut away what the template printed of spliced turns beside their marks.

    A literal's number is that of the slot behind it. Turns that do not stand as the
    delimiters say are not among the cuts.
    """
    cut, cuts = [*literals], {}
    for number, slot in enumerate(slots):
        if not isinstance(slot, Splice) or not number:
            continue
        stand_in = planned[slot.message]
        is_edge = slots[number - 1].message == slot.message - 1
        before, behind = cut[number], cut[number + 1]
        if is_edge and stand_in.stands_in(before, behind):
            begin, end = len(stand_in.opening), len(stand_in.closing)
            cuts[slot.message] = _Cut(before[begin:], behind[:end])
            cut[number], cut[number + 1] = before[:begin], behind[end:]
    return cut, cuts


def _elements(
    literals: Sequence[str], slots: Sequence[_Slot], quoted: Sequence[bool]
) -> list[Rendered]:
    elements: list[Rendered] = [literals[0]]
    for slot, is_quoted, literal in zip(slots, quoted, literals[1:], strict=True):
        if isinstance(slot, Span):
            elements.append(replace(slot, is_quoted=is_quoted))
        elif isinstance(slot, Splice):
            elements.append(slot)
        elements.append(literal)
    return elements


def _segments(
    segments: list[str],
    spliced: Sequence[int],
    cuts: Mapping[int, _Cut],
) -> list[str] | None:
    """T's texts between its spliced turns, what these hold cut away."""
    for at, index in enumerate(spliced):
        cut = cuts[index]
        before, behind = segments[at], segments[at + 1]
        if not before.endswith(cut.before) or not behind.startswith(cut.behind):
            return None
        segments[at] = before[: len(before) - len(cut.before)]
        segments[at + 1] = behind[len(cut.behind) :]
    return segments


def _prove(elements: Sequence[Rendered], segments: Sequence[str]) -> Layout:
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
