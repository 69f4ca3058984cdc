"""
Invariant II, checked from outside: what the model read against what the client said.

Nothing may be dropped, doubled, changed or reordered, but for volatile values (whose
last statement must be the client's own), white space at edges, turns in the model's
own words, and the telemetry line.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.support.oracle_talk import (
    Echo,
    Part,
    Say,
    Slot,
    Spoken,
    kinds_in_order,
    thread,
)
from tests.support.volatile import CLOSER, OPENER

_TURN = re.compile(r"<\|im_start\|>(system|user|assistant)\n?(.*?)<\|im_end\|>\n", re.S)
_NOTE = re.compile(rf"{OPENER}\n(.*?){CLOSER}", re.S)
_NOTES = rf"((?:\n\n{OPENER}\n.*?{CLOSER})*)"
_LABELS = (
    "message_id", "subagent runtime", "current time", "inbound context", "git status",
    "folder tree",
)  # fmt: skip
_STATEMENT = re.compile(rf"^(({'|'.join(_LABELS)})(?: #\d+)?):[ \n]", re.M)
# Kinds whose new value is said when an older one stands in its place.
RESTATED = {
    "message_id", "subagent_runtime", "current_time", "inbound_context", "git_status",
    "folder_tree",
}  # fmt: skip
# Lent between threads. What is of a project only behind its folder: nobody names one.
_SHARED = {"current_time", "message_id"}
_OF_NOBODY = {*_SHARED, "git_status", "folder_tree"}

Render = Callable[[Sequence[Spoken]], str]


@dataclass
class Memory:
    """What earlier requests of a server may have left in later prompts."""

    values: dict[tuple[str, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    turns: dict[str, list[tuple[str, str, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def note_values(self, scope: str, messages: Sequence[Spoken]) -> None:
        """A request was sent."""
        scope = _scope(scope, messages)
        for _, _, slot in kinds_in_order(messages):
            place = "" if slot.kind in _SHARED else scope
            self.values[place, slot.kind].add(slot.value)

    def known(self, scope: str, kind: str) -> set[str]:
        """Values that a record may lend to this thread."""
        return self.values["" if kind in _SHARED else scope, kind]

    def note_raw(
        self, scope: str, messages: Sequence[Spoken], visible: str, body: str
    ) -> None:
        """The model answered; the client saw `visible`."""
        turn = (scope, _as_told(_without_telemetry(messages)), body)
        self.turns[visible.strip()].append(turn)

    def may_read(
        self, scope: str, before: Sequence[Spoken], turn: tuple[str, str]
    ) -> bool:
        """Whether a turn of that visible text may be read as that body."""
        visible, body = turn
        told = _as_told(before)
        return any(
            said == body and (whose == scope or context == told)
            for whose, context, said in self.turns[visible.strip()]
        )


def _as_told(messages: Sequence[Spoken]) -> str:
    """All but what tells nothing of who asks: clocks, ids, white space at edges."""
    texts = []
    for message in messages:
        parts = message.parts if isinstance(message, Say) else (message.text,)
        shown = [
            part if isinstance(part, str)
            else f"<{part.kind}>" if part.kind in _OF_NOBODY else part.value
            for part in parts
        ]  # fmt: skip
        texts.append((message.role, "".join(shown).strip()))
    return repr(texts)


def _scope(scope: str, messages: Sequence[Spoken]) -> str:
    return f"{scope} {thread(messages)}"


def violations(
    text: str,
    scope: str,
    messages: Sequence[Spoken],
    memory: Memory,
    render: Render,
) -> list[str]:
    """
    What in a prompt the client did not say, or what of it is missing.

    Args:
        text: what the model read. render: the template on the client's messages.
    """
    said = _without_telemetry(messages)
    turns = [(m[1], m[2]) for m in _TURN.finditer(text)]
    plain = [(m[1], m[2]) for m in _TURN.finditer(render(said))]
    tail = text[sum(len(m[0]) for m in _TURN.finditer(text)) :]
    plain_tail = render(said)[sum(len(m[0]) for m in _TURN.finditer(render(said))) :]
    if tail != plain_tail or [r for r, _ in turns] != [r for r, _ in plain]:
        return [f"turns {[r for r, _ in turns]} and tail {tail!r}"]
    found: list[str] = []
    slots: list[tuple[Slot, str]] = []
    notes = ""
    for (group, role), (_, body), (_, wanted) in zip(
        _groups(said), turns, plain, strict=True
    ):
        if role == "assistant":
            before = said[: _index_of(group[0], said)]
            known = functools.partial(memory.may_read, scope, before)
            if not _may_read(group[0], body, wanted, known):
                found.append(f"assistant reads {body!r}, said {group[0].text!r}")
            continue
        pattern = _pattern(group, _scope(scope, said), memory)
        match = re.fullmatch(pattern, body, re.S)
        if match is None:
            found.append(f"{role} reads {body!r}, said {[g.text for g in group]!r}")
            continue
        groups = list(match.groups())
        for message in group:
            for part in message.parts:
                if isinstance(part, Slot):
                    slots.append((part, groups.pop(0)))
            if role != "system":
                notes += groups.pop(0)
    return found + list(_unsaid(slots, notes))


def _without_telemetry(messages: Sequence[Spoken]) -> list[Spoken]:
    return [
        Say(m.role, tuple(p for p in m.parts if not _is_telemetry(p)), m.lead, m.trail,
            m.call_id)
        if isinstance(m, Say) else m
        for m in messages
    ]  # fmt: skip


def _is_telemetry(part: Part) -> bool:
    return isinstance(part, Slot) and part.kind == "billing_header"


def _groups(messages: Sequence[Spoken]) -> Iterator[tuple[list[Spoken], str]]:
    """Messages by turn: results in a row are one turn of the user's."""
    run: list[Spoken] = []
    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        if run:
            yield run, "tool"
        run = []
        yield [message], message.role
    if run:
        yield run, "tool"


def _pattern(group: Sequence[Spoken], scope: str, memory: Memory) -> str:
    texts = []
    for message in group:
        assert isinstance(message, Say)
        core = "".join(_part(part, scope, memory) for part in message.parts)
        if message.role == "tool":
            lead, trail = re.escape(message.lead), re.escape(message.trail)
            inside = f"{lead}{core}{trail}{_NOTES}"
            texts.append(f"\\n?<tool_response>\\n{inside}\\n</tool_response>")
        else:
            notes = "" if message.role == "system" else _NOTES
            texts.append(f"\\s*{_trimmed(core)}\\s*{notes}")
    return "".join(texts)


def _trimmed(core: str) -> str:
    """White space at an edge may be the stored one's, even where a literal has it."""
    return re.sub(r"(\\\n|\\ )+$", "", core)


def _part(part: Part, scope: str, memory: Memory) -> str:
    if isinstance(part, str):
        return re.escape(part)
    options = {part.value, *memory.known(scope, part.kind)}
    longest_first = sorted(options, key=len, reverse=True)
    return f"({'|'.join(map(re.escape, longest_first))})"


def _index_of(message: Spoken, messages: Sequence[Spoken]) -> int:
    return next(i for i, other in enumerate(messages) if other is message)


def _may_read(
    message: Spoken, body: str, wanted: str, is_own: Callable[[tuple[str, str]], bool]
) -> bool:
    """An assistant's message is as the template prints it, or in its own words."""
    assert isinstance(message, Echo)
    is_plain = message.call is None
    return body == wanted or (is_plain and is_own((message.text, body)))


def _unsaid(slots: Sequence[tuple[Slot, str]], notes: str) -> Iterator[str]:
    """Values of the client's that the prompt, read to its end, does not give."""
    last = dict(_statements(notes))
    counts: dict[str, int] = defaultdict(int)
    labels = set()
    for slot, stands in slots:
        label = _label(slot.kind, counts[slot.kind])
        counts[slot.kind] += 1
        labels.add(label)
        if slot.kind not in RESTATED:
            if slot.value and stands != slot.value:
                yield f"{slot.kind} reads {stands!r}, said {slot.value!r}"
            continue
        # White space behind the last value of a part belongs to it, and to no slot.
        told = last.get(label, stands).strip()
        if told != (slot.value.strip() or "(none now)") and told != slot.value.strip():
            yield f"{label} is {told!r} at the end, said {slot.value!r}"
    for label in last.keys() - labels:
        if last[label] != "(none now)":
            yield f"{label} is {last[label]!r} at the end, and was not said"


def _label(kind: str, ordinal: int) -> str:
    name = kind if kind == "message_id" else kind.replace("_", " ")
    return f"{name} #{ordinal + 1}" if ordinal else name


def _statements(notes: str) -> Iterator[tuple[str, str]]:
    for note in _NOTE.finditer(notes):
        starts = [*_STATEMENT.finditer(note[1])]
        ends = [*(m.start() for m in starts[1:]), len(note[1])]
        for match, end in zip(starts, ends, strict=True):
            yield match[1], note[1][match.end() : end].strip("\n")
