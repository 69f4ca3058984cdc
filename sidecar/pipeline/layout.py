"""
A rendered prompt as elements: literal text, volatile spans, turns to splice.

It is rendered once as it is (T) and once with a unique mark for every span and spliced
turn. Putting the values back in their places must give T exactly (substitution proof):
a template that re-escapes or reorders loses reuse, never content.
"""

import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sidecar.core.requests import Message
from sidecar.pipeline.canonical import MarkedMessage, Span
from sidecar.pipeline.healing import Healed
from sidecar.pipeline.splicing import Frame

logger = logging.getLogger(__name__)

_TRIMMED = ("edge_ws", "tail_ws")
Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class Splice:
    """A past turn of the model's own: its ids stand in for what the template prints."""

    message: int
    healed: Healed


Element = str | Span | Splice


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
class _Marks:
    """Private-use texts that occur nowhere in the conversation."""

    nonce: str

    def mark(self, number: int) -> str:
        return f"\ue000{self.nonce}{number}\ue001"

    def pattern(self) -> re.Pattern[str]:
        return re.compile(f"\ue000{self.nonce}([0-9]+)\ue001")


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
    marks = _Marks(secrets.token_hex(8))
    splices = dict(healed) if frame is not None else {}
    slots: list[Span | Splice] = []
    shown = _without_calls(marked, splices, frame)
    messages = [
        _with_marks(index, item, splices.get(index), slots, marks)
        for index, item in enumerate(shown)
    ]
    elements = _split(render(messages), slots, marks)
    if frame is not None and splices:
        elements = _frame_splices(elements, frame)
    if elements is None and splices:  # a turn is hidden or repeated: leave turns alone
        return lay_out(marked, {}, None, render)
    if elements is not None:
        plain = render(_plain(shown, splices, marks))
        proved = _prove(elements, plain, marks, splices)
        if proved is not None:
            return Layout(tuple(proved), is_proved=True)
    logger.info("no substitution proof: strict reuse only")
    return Layout((render([m.message for m in marked]),), is_proved=False)


def _without_calls(
    marked: Sequence[MarkedMessage],
    splices: Mapping[int, Healed],
    frame: Frame | None,
) -> Sequence[MarkedMessage]:
    if frame is None or frame.keeps_calls:
        return marked
    return [
        replace(item, message=replace(item.message, tool_calls=()))
        if index in splices
        else item
        for index, item in enumerate(marked)
    ]


def _with_marks(
    index: int,
    item: MarkedMessage,
    healed: Healed | None,
    slots: list[Span | Splice],
    marks: _Marks,
) -> Message:
    def slot(value: Span | Splice) -> str:
        slots.append(value)
        return marks.mark(len(slots) - 1)

    if healed is not None:
        return _placeholder(item.message, slot(Splice(index, healed)))
    text = "".join(p if isinstance(p, str) else slot(p) for p in item.pieces)
    return replace(item.message, parts=(text,) if text else ())


def _placeholder(message: Message, text: str) -> Message:
    """Role and calls stay: some templates demand a call before a tool result."""
    calls = tuple(replace(call, arguments="{}") for call in message.tool_calls)
    return replace(message, parts=(text,), reasoning=None, tool_calls=calls)


def _plain(
    marked: Sequence[MarkedMessage], splices: Mapping[int, Healed], marks: _Marks
) -> list[Message]:
    """T's messages; spliced turns keep a mark, for their text is not T's business."""
    return [
        _placeholder(item.message, marks.mark(index)) if index in splices
        else item.message
        for index, item in enumerate(marked)
    ]  # fmt: skip


def _split(
    text: str, slots: Sequence[Span | Splice], marks: _Marks
) -> list[Element] | None:
    """Literals and slots; None if a mark is missing, repeated or out of order."""
    pieces = marks.pattern().split(text)
    if [int(number) for number in pieces[1::2]] != list(range(len(slots))):
        return None
    elements: list[Element] = [pieces[0]]
    for number, literal in zip(pieces[1::2], pieces[2::2], strict=True):
        elements += [slots[int(number)], literal]
    return elements


def _frame_splices(
    elements: list[Element] | None, frame: Frame
) -> list[Element] | None:
    """Cut away what the template printed between a turn's header and its end."""
    if elements is None:
        return None
    framed = list(elements)
    for at, element in enumerate(framed):
        if not isinstance(element, Splice):
            continue
        before, after = framed[at - 1], framed[at + 1]
        assert isinstance(before, str)
        assert isinstance(after, str)
        header = before.rfind(frame.header)
        end = after.find(frame.footer) if frame.footer else 0
        if header < 0 or end < 0:
            return None
        framed[at - 1] = before[: header + len(frame.header)]
        framed[at + 1] = after[end:]
    return framed


def _prove(
    elements: list[Element],
    plain: str,
    marks: _Marks,
    splices: Mapping[int, Healed],
) -> list[Element] | None:
    """
    Walk T along the elements; None if they do not give T.

    White space at an edge may be gone in T (templates that trim): its value is what
    T really holds.
    """
    proved: list[Element] = []
    parts = marks.pattern().split(plain)
    texts = iter([parts[0], *parts[2::2]])
    rest = next(texts)
    for at, element in enumerate(elements):
        if isinstance(element, Splice):
            rest = next(texts)
            proved.append(element)
            continue
        if isinstance(element, Span):
            value = _value_in(element, rest, elements[at + 1 :])
            if value is None:
                return None
            proved.append(replace(element, value=value))
            rest = rest[len(value) :]
            continue
        found = _literal_at(element, rest, at, elements)
        if found is None:
            return None
        rest = rest[found:]
        proved.append(element)
    return proved


def _value_in(span: Span, rest: str, following: Sequence[Element]) -> str | None:
    options = [span.value, ""] if span.kind in _TRIMMED else [span.value]
    ahead = ""
    for element in following:
        if not isinstance(element, str):
            if isinstance(element, Span) and element.value == "":
                continue
            break
        ahead = element
        break
    for value in options:
        if rest.startswith(value) and rest.startswith(ahead, len(value)):
            return value
    return None


def _literal_at(
    literal: str, rest: str, at: int, elements: Sequence[Element]
) -> int | None:
    """How far T moves on over a literal; beside a splice its far side was cut away."""
    after_splice = at > 0 and isinstance(elements[at - 1], Splice)
    before_splice = at + 1 < len(elements) and isinstance(elements[at + 1], Splice)
    if after_splice:
        start = rest.find(literal)
        return None if start < 0 else start + len(literal)
    if not rest.startswith(literal):
        return None
    return len(rest) if before_splice else len(literal)
