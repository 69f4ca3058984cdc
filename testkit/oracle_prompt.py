"""
What a prompt may say, made from what the model's own template prints.

The client's messages are rendered once as they are (T) and twice with a mark at each
place where something else may stand: a volatile stretch, white space at an edge, a
note behind a message; the second time also for each turn of the model's own. What
stands between the marks is the template's and the client's, and must stand there; for
each place there is a list of what may. T itself must fit first, and tells what of the
white space the template leaves.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import combinations, islice

from sidecar.core.requests import Message
from testkit.oracle_reading import as_messages
from testkit.oracle_talk import Echo, Part, Say, Slot, Spoken
from testkit.volatile import CLOSER, OPENER

_WORD = "zworacle"  # of letters, and a quote: it tells where a template escapes
_MARK = re.compile(rf'{_WORD}(\\*)"([0-9]+);')
_TURN = re.compile(rf"{_WORD}turn([0-9]+)z")
_NOTE = f"\n\n{OPENER}\n(?:.*?){CLOSER}"
_MAX_CHOICES = 64
Render = Callable[[Sequence[Message]], str]
Values = Callable[["Place"], set[str]]


@dataclass(frozen=True, slots=True)
class Place:
    """
    Where in a message something else may stand.

    Args:
        kind: of the volatile stretch; `edge_ws`, `tail_ws` or `note`.
        own: the client's value.
    """

    message: int
    kind: str
    own: str = ""


@dataclass(frozen=True, slots=True)
class Body:
    """
    A turn as the model wrote it.

    Args:
        opening: what stands before it behind the message before. raw: its own text.
        is_alike: the opening was printed under this prompt's template arguments.
    """

    opening: str
    raw: str
    is_alike: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """
    What a prompt says.

    Args:
        values: by place, in the order of the messages. opening: behind the last.
        is_whole: it could only be compared with T as a whole.
        fault: why it does not say what the client said; nothing else is told then.
    """

    values: tuple[tuple[Place, str], ...] = ()
    opening: str | None = None
    is_whole: bool = False
    fault: str = ""


@dataclass
class _Printed:
    """A rendered text cut at its marks."""

    literals: list[str]
    numbers: list[int]
    quoted: list[bool]

    @staticmethod
    def of(text: str) -> "_Printed":
        pieces = _MARK.split(text)
        return _Printed(
            pieces[0::3], [*map(int, pieces[2::3])], [*map(bool, pieces[1::3])]
        )


@dataclass
class Expected:
    """The template's print of a conversation, with all its places."""

    said: Sequence[Spoken]
    render: Render
    places: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Render it."""
        messages = as_messages(self.said)
        self.plain = self.render(messages)
        marked = [
            replace(message, parts=("".join(self._marked(index, item)),))
            if isinstance(item, Say)
            else message
            for index, (item, message) in enumerate(
                zip(self.said, messages, strict=True)
            )
        ]
        self._messages = marked
        self._printed = _Printed.of(self.render(marked))
        self.is_whole = sorted(self._printed.numbers) == list(range(len(self.places)))

    def read(
        self, text: str, values: Values, bodies: Mapping[int, Sequence[Body]]
    ) -> Found:
        """
        What a prompt says.

        Args:
            values: what may stand in a place beside the client's own.
            bodies: by message, turns of the model's own words that may stand there.
        """
        own = self._match(
            self.plain,
            lambda place: {place.own, ""} if _is_space(place) else {place.own},
        )
        if own is None:
            return self._read_whole(text, bodies)
        if text == self.plain:
            return Found(tuple(own), self._printed.literals[-1])
        left = {place: {value} for place, value in own if _is_space(place)}
        options = {p: left.get(p, {p.own}) | values(p) for p in self.places}
        found = self._match(text, options.__getitem__, self._turns(bodies))
        if found is None:
            return Found(fault=_first_difference(text, self.plain))
        return Found(tuple(found), self._printed.literals[-1])

    def _read_whole(self, text: str, bodies: Mapping[int, Sequence[Body]]) -> Found:
        """
        Compare a prompt with T, for a template that looks at how a message ends.

        No value but the client's may stand there then; turns in the model's words may.
        """
        known = [number for number, own in bodies.items() if own]
        sizes = [len(known), *range(len(known))]
        choices = (c for size in sizes for c in combinations(known, size))
        fits = any(
            re.fullmatch(self._whole({n: bodies[n] for n in chosen}), text)
            for chosen in islice(choices, _MAX_CHOICES)
        )
        if not fits:
            return Found(fault=_first_difference(text, self.plain))
        messages = as_messages(self.said)
        last = messages[-1].text.rstrip() + f'{_WORD}"0;'
        messages[-1] = replace(messages[-1], parts=(last,))
        return Found((), _Printed.of(self.render(messages)).literals[-1], is_whole=True)

    def _whole(self, bodies: Mapping[int, Sequence[Body]]) -> str:
        messages = [
            _turn_mark(m, n) if n in bodies else m
            for n, m in enumerate(as_messages(self.said))
        ]
        pieces = _TURN.split(self.render(messages))
        pattern = ""
        for before, number in zip(pieces[0::2], map(int, pieces[1::2]), strict=False):
            forms = [
                _overlapped(before, body.opening) + body.raw for body in bodies[number]
            ]
            pattern += f"(?:{'|'.join(map(re.escape, dict.fromkeys(forms)))})"
        return pattern + re.escape(pieces[-1])

    def _marked(self, index: int, message: Say) -> Iterator[str]:
        for piece in _pieces(message):
            if isinstance(piece, str):
                yield piece
            else:
                yield f'{_WORD}"{len(self.places)};'
                self.places.append(Place(index, piece.kind, piece.value))

    def _turns(self, bodies: Mapping[int, Sequence[Body]]) -> list[str]:
        """What may stand between each two marks, with the model's own words."""
        literals = self._printed.literals
        patterns = [re.escape(literal) for literal in literals]
        if not any(bodies.values()):
            return patterns
        messages = [
            _turn_mark(m, n) if bodies.get(n) else m
            for n, m in enumerate(self._messages)
        ]
        printed = _Printed.of(self.render(messages))
        if printed.numbers != self._printed.numbers:
            return patterns
        for at, literal in enumerate(printed.literals):
            turns = [*_TURN.finditer(literal)]
            if len(turns) == 1:
                behind = literal[turns[0].end() :]
                number = int(turns[0][1])
                forms = [
                    self._begun(number, body) + body.raw + behind
                    for body in bodies[number]
                ]
                options = [literals[at], *forms]
                patterns[at] = f"(?:{'|'.join(map(re.escape, dict.fromkeys(options)))})"
        return patterns

    def _begun(self, number: int, body: Body) -> str:
        """What stands before a turn: as it did, but for how the message before ends."""
        if body.is_alike:
            return body.opening
        upto = _Printed.of(self.render(self._messages[:number])).literals[-1]
        match = SequenceMatcher(None, upto, body.opening, False).find_longest_match()
        return upto[: match.a] + body.opening[match.b :]

    def _match(
        self, text: str, values: Values, between: Sequence[str] | None = None
    ) -> list[tuple[Place, str]] | None:
        """The values in a text that is this conversation's; None if it is not."""
        if not self.is_whole:
            return None
        printed = self._printed
        texts = (
            [re.escape(literal) for literal in printed.literals]
            if between is None
            else between
        )
        pattern = [texts[0]]
        for number, is_quoted, behind in zip(
            printed.numbers, printed.quoted, texts[1:], strict=True
        ):
            pattern += [self._place(self.places[number], values, is_quoted), behind]
        match = re.fullmatch("".join(pattern), text, re.DOTALL)
        if match is None:
            return None
        found = zip(printed.numbers, printed.quoted, match.groups(), strict=True)
        read = {
            n: json.loads(f'"{group}"', strict=False) if q else group
            for n, q, group in found
        }
        return [(place, read[n]) for n, place in enumerate(self.places)]

    @staticmethod
    def _place(place: Place, values: Values, is_quoted: bool) -> str:
        if place.kind == "note":
            note = _NOTE.replace("\n", "\\\\n") if is_quoted else _NOTE
            return f"((?:{note})?)"
        options = sorted(values(place), key=len, reverse=True)
        printed = [_quoted(option) if is_quoted else option for option in options]
        return f"({'|'.join(map(re.escape, printed))})"


def _pieces(message: Say) -> Iterator[Part]:
    """A message's text and slots, those at its edges and for a note among them."""
    parts = [p for p in (message.lead, *message.parts, message.trail) if p != ""]
    joined: list[Part] = []
    for part in parts:
        if joined and isinstance(part, str) and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    lead, trail = "", ""
    if message.role != "tool" and joined and isinstance(joined[0], str):
        kept = joined[0].lstrip()
        lead, joined[0] = joined[0][: len(joined[0]) - len(kept)], kept
    if joined and isinstance(joined[-1], str):
        kept = joined[-1].rstrip()
        trail, joined[-1] = joined[-1][len(kept) :], kept
    if message.role != "tool":
        yield Slot("edge_ws", lead)
    yield from joined
    yield Slot("tail_ws" if message.role == "tool" else "edge_ws", trail)
    if message.role != "system":
        yield Slot("note", "")


def _turn_mark(message: Message, number: int) -> Message:
    return replace(message, parts=(f"{_WORD}turn{number}z",), reasoning=None)


def _overlapped(before: str, opening: str) -> str:
    """What stands before a turn, ending as it did when the turn was written."""
    head = opening.strip().partition("\n")[0]
    for size in range(len(opening), 0, -1):
        at = before.rfind(opening[:size])
        # Of an earlier turn more may be alike: `Assistant\n<` of a call in tags.
        if at >= 0 and head not in before[at + size :]:
            return before[:at] + opening
    return before + opening


def _is_space(place: Place) -> bool:
    return place.kind in ("edge_ws", "tail_ws")


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)[1:-1]


def _first_difference(text: str, plain: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b),
              min(len(text), len(plain)))  # fmt: skip
    start = max(0, at - 60)
    return f"reads {text[start : at + 200]!r}, T is {plain[start : at + 200]!r}"


def misplaced(said: Sequence[Spoken], render: Render) -> Iterator[str]:
    """
    Messages that a template, as it is called, does not print once and in order.

    Each is said in one word. A template may hide the words beside a call, print them
    behind its result, and move the system's; thinking may be hidden.
    """
    words = [f"{_WORD}said{n}z" for n in range(len(said))]
    messages = []
    for word, item, message in zip(words, said, as_messages(said), strict=True):
        if isinstance(item, Echo) and item.call:
            call = replace(
                message.tool_calls[0], arguments=json.dumps({"path": f"{word}call"})
            )
            message = replace(message, tool_calls=(call,))
        parts = (word + " ",) if message.text or isinstance(item, Say) else ()
        messages.append(replace(message, parts=parts, reasoning=None))
    text = render(messages)
    at = 0
    for word, item in zip(words, said, strict=True):
        has_call = isinstance(item, Echo) and item.call is not None
        found = word + ("call" if has_call else " ")
        if isinstance(item, Echo) and not (has_call or item.text):
            continue
        if text.count(found.strip()) != 1:
            times = text.count(found.strip())
            yield f"{item.role} {item.text!r} is printed {times} times"
        elif item.role != "system":
            if text.index(found.strip()) < at:
                yield f"{item.role} {item.text!r} is printed too early"
            at = text.index(found.strip())
