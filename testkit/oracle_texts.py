"""
Invariant II, checked from outside: what the model read against what the client said.

Nothing may be dropped, doubled, changed or reordered, but for volatile values (whose
last statement must be the client's own), white space at edges, turns in the model's
own words, and the telemetry line.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from testkit.oracle_prompt import Body, Expected, Found, Place, Render, misplaced
from testkit.oracle_reading import as_said
from testkit.oracle_talk import Echo, Say, Slot, Spoken, thread
from testkit.volatile import CLOSER, HEAD

# Kinds whose new value is said when an older one stands in its place.
RESTATED = {
    "message_id", "subagent_runtime", "current_time", "inbound_context", "git_status",
    "folder_tree", "activation",
}  # fmt: skip
_SILENT = ("edge_ws", "tail_ws", "note")
_LABELS = [k if k == "message_id" else k.replace("_", " ") for k in sorted(RESTATED)]
_STATEMENT = re.compile(
    rf"^(({'|'.join(_LABELS)})(?: #\d+)? \([a-z]+ message(?: \d+)?\)):[ \n]", re.M
)
_NONE_NOW = "(none now)"
# Lent between threads.
_SHARED = {"current_time", "message_id"}
_HAS_WORDS = re.compile(r"[A-Za-z]{5}|[A-Za-z][_-][A-Za-z]|_")
_IN_LINE = {*_SHARED, "subagent_runtime"}  # something stands for it in any case


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answer: who was given it, behind which words, under which arguments."""

    scope: str
    thinking: bool
    canonical: str
    told: str
    body: Body


@dataclass
class Memory:
    """What earlier requests of a server may have left in later prompts."""

    values: dict[tuple[str, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    turns: dict[str, list[_Turn]] = field(default_factory=lambda: defaultdict(list))
    shapes: dict[tuple[bool, str], tuple[str, ...]] = field(default_factory=dict)

    def note_values(self, scope: str, messages: Sequence[Spoken]) -> None:
        """A request was sent."""
        said = as_said(messages)
        scope = _scope(scope, said)
        for place in Expected(said, lambda _: "").places:
            forget_filter = "" if _is_lent(place) else scope
            self.values[forget_filter, place.kind].add(place.own)

    def known(self, scope: str, kind: str) -> set[str]:
        """Values that a record may lend to this thread."""
        return self.values["", kind] | self.values[scope, kind]

    def note_turn(
        self, asked: "Asked", messages: Sequence[Spoken], visible: str, body: Body
    ) -> None:
        """The model answered; the client saw `visible`."""
        said = as_said(messages)
        turn = _Turn(asked.scope, asked.thinking, _canonical(said), _told(said), body)
        self.turns[visible.strip()].append(turn)

    def bodies(self, asked: "Asked", said: Sequence[Spoken], index: int) -> list[Body]:
        """The model's own words for an answer, behind these very words."""
        turn, before = said[index], said[:index]
        assert isinstance(turn, Echo)
        if turn.call or not turn.text.strip() or not before:
            return []
        if not isinstance(before[-1], Say):
            return []  # nothing is asked behind an answer
        canonical, told = _canonical(before), _told(before)
        return [
            Body(known.body.opening, known.body.raw, known.thinking == asked.thinking)
            for known in self.turns[turn.text.strip()]
            if known.canonical == canonical
            and (known.scope == asked.scope or known.told == told)
        ]


@dataclass(frozen=True, slots=True)
class Asked:
    """
    How a conversation was asked.

    Args:
        scope: whose it is. render: the template under this request's arguments.
    """

    scope: str
    thinking: bool
    render: Render


@dataclass(frozen=True, slots=True)
class Reading:
    """
    What a prompt says.

    Args:
        violations: what the client did not say, or what of it is missing.
        opening: behind the last message; None if there is a fault.
        is_plain: it could only be compared with the template's print as a whole.
    """

    violations: tuple[str, ...]
    opening: str | None
    is_plain: bool = False


def read(
    text: str, asked: Asked, messages: Sequence[Spoken], memory: Memory
) -> Reading:
    """Compare what the model read with what the client said."""
    said = as_said(messages)
    scope = _scope(asked.scope, said)
    expected = Expected(said, asked.render)

    def values(place: Place) -> set[str]:
        return set() if place.kind == "tail_ws" else memory.known(scope, place.kind)

    bodies = {
        index: memory.bodies(asked, said, index)
        for index, item in enumerate(said)
        if isinstance(item, Echo)
    }
    found = expected.read(text, values, bodies)
    roles = [message.role for message in said]
    told = [found.fault] if found.fault else list(_unsaid(found, values, roles))
    told += _misplaced(asked, said, memory)
    return Reading(tuple(told), found.opening, found.is_whole)


def _misplaced(asked: Asked, said: Sequence[Spoken], memory: Memory) -> tuple[str, ...]:
    """Of what shape the conversation is tells all: it is looked at once."""
    shape = repr(
        [(m.role, not m.text, isinstance(m, Echo) and not m.call) for m in said]
    )
    if (asked.thinking, shape) not in memory.shapes:
        told = tuple(misplaced(said, asked.render))
        memory.shapes[asked.thinking, shape] = told
    return memory.shapes[asked.thinking, shape]


def _scope(scope: str, said: Sequence[Spoken]) -> str:
    return f"{scope} {thread(said)}"


def _canonical(said: Sequence[Spoken]) -> str:
    """All but what is volatile; a block may be there or not."""
    return repr([
        (m.role, _text(m, lambda s: f"<{s.kind}>" if s.kind in _IN_LINE else ""))
        for m in said
    ])  # fmt: skip


def _told(said: Sequence[Spoken]) -> str:
    """All but white space at edges."""
    return repr([(m.role, _text(m, lambda s: s.value)) for m in said])


def _text(message: Spoken, shown: Callable[[Slot], str]) -> object:
    if isinstance(message, Echo):
        return message.text.strip(), message.call and message.call[1:]
    parts = (message.lead, *message.parts, message.trail)
    text = "".join(p if isinstance(p, str) else shown(p) for p in parts)
    return text if message.role == "tool" else text.strip()


def _is_lent(place: Place) -> bool:
    """Whether another conversation may be given a value: no words, nobody's."""
    is_id = place.kind == "message_id"
    return place.kind in _SHARED and not (is_id and _HAS_WORDS.search(place.own))


def _unsaid(
    found: Found, values: Callable[[Place], set[str]], roles: Sequence[str]
) -> Iterator[str]:
    """
    Values of the client's that the prompt, read to its end, does not give.

    And what its notes say that nobody said, or that was said last anyway, or that is
    older than what stands before it.
    """
    last: dict[str, str] = {}
    own: dict[str, str] = {}
    # The last label of a kind that has a value: none is said again behind it.
    newest: dict[str, str] = {}
    lent: dict[str, set[str]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)
    for place, value in found.values:
        if place.kind == "note":
            said = value
            for role in {*roles}:
                if roles[: place.message + 1].count(role) == 1 < roles.count(role):
                    # It was the only one when the note was written.
                    said = said.replace(f"({role} message):", f"({role} message 1):")
            yield from _misstated(said, last, lent, newest)
        elif place.kind in RESTATED:
            label = _label(place, counts[place.kind], roles)
            counts[place.kind] += 1
            last[label], own[label] = _norm(value), _norm(place.own)
            if place.own:
                newest[place.kind] = label
            lent[label] = {_norm(v) for v in (*values(place), place.own)}
        elif place.kind not in _SILENT and place.own and value != place.own:
            yield f"{place.kind} reads {value!r}, said {place.own!r}"
    for label, value in own.items():
        if last[label] != value:
            yield f"{label} is {last[label]!r} at the end, said {value!r}"


def _misstated(
    note: str,
    last: dict[str, str],
    lent: dict[str, set[str]],
    newest: dict[str, str],
) -> Iterator[str]:
    """Take in what a note states; what is wrong about it."""
    if not note:
        return
    inside = note.strip().removeprefix(HEAD).removesuffix(CLOSER)
    starts = [*_STATEMENT.finditer(inside)]
    if not note.strip().startswith(HEAD) or not starts or starts[0].start():
        yield f"a note says {note!r}"
    if not starts:
        return
    labels = {match[1] for match in starts}
    for match in starts:
        kind = match[2].replace(" ", "_")
        if newest.get(kind, match[1]) not in labels:
            yield f"a note says {match[1]} behind {newest[kind]}, which is newer"
    ends = [*(match.start() for match in starts[1:]), len(inside)]
    for match, end in zip(starts, ends, strict=True):
        label, value = match[1], _norm(inside[match.end() : end])
        if value not in lent[label]:
            yield f"a note says that {label} is {value!r}"
        if last.get(label) == value:
            yield f"a note says again that {label} is {value!r}"
        last[label] = value


def _norm(value: str) -> str:
    # White space behind the last value of a part belongs to it, and to no slot.
    value = value.strip()
    return "" if value == _NONE_NOW else value


def _label(place: Place, ordinal: int, roles: Sequence[str]) -> str:
    kind, role = place.kind, roles[place.message]
    name = kind if kind == "message_id" else kind.replace("_", " ")
    name += f" #{ordinal + 1}" if ordinal else ""
    is_only = roles.count(role) == 1
    number = "" if is_only else f" {roles[: place.message + 1].count(role)}"
    return f"{name} ({role} message{number})"
