"""
Which older values stand in this prompt, and what must be said again.

Spans of the request are paired with those of a stored record, in order, as far as
both prompts are canonically equal; each pair is pinned, restated, or ends the walk
(docs/reuse.md s4). Spans behind the end keep the request's own values.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from sidecar.core.conversation import Conversation
from sidecar.memory.healing_store import is_proved
from sidecar.memory.lineage import LineageRecord, Note, Restated, stated_by
from sidecar.pipeline.reuse.newer_values import NewerValues
from sidecar.pipeline.template.elements import Element
from sidecar.volatile.marked_message import WHITE_SPACE, Span, SpanKey
from sidecar.volatile.rules import Action, Policy
from sidecar.volatile.value_patterns import is_opaque_id


@dataclass(frozen=True, slots=True)
class Pins:
    """
    The outcome of a walk.

    Args:
        values: what stands in M, where that is not the request's own.
        gone: spans of the record the request has not, to be put back in place.
        restated: what the new tail note says; it takes the place of the one that the
            last message had when it was asked before. stopped_by: the kind that ended
            the walk.
    """

    values: Mapping[SpanKey, str]
    gone: tuple[SpanKey, ...]
    restated: tuple[Restated, ...]
    notes: Mapping[int, Note]
    stopped_by: str | None

    @property
    def is_empty(self) -> bool:
        """Whether M is just the request."""
        return not self.values and not self.restated

    @property
    def is_silent(self) -> bool:
        """Whether all that differs from the request is white space."""
        kinds = {key[2] for key in (*self.values, *self.gone)}
        return kinds.issubset(WHITE_SPACE) and not (self.restated or self.notes)

    def kinds(self) -> list[str]:
        """Kinds that were pinned, each once."""
        return list(dict.fromkeys(key[2] for key in self.values))


@dataclass(frozen=True, slots=True)
class Loan:
    """
    A value that a record may share with a request.

    Args:
        key: of the span. stored: the record's value.
    """

    key: SpanKey
    stored: str = ""


@dataclass(frozen=True, slots=True)
class Walk:
    """
    What a walk needs to know of a request, whatever the record.

    Args:
        spans: the request's, in order; settled: their depths in C.
        elements: all of the request, in order.
        answered_before: messages before this index have an answer of the model's.
        sent_answered: spans that the client itself has sent in answered messages.
        roles: of the request's messages.
        last_sent: what stood in a span when the client last sent a value there.
        earlier_values: what stood there when the model's own turns in it were written.
    """

    spans: Sequence[Span]
    settled: Mapping[SpanKey, int]
    policy: Callable[[str], Policy]
    elements: Sequence[Element] = ()
    answered_before: int = 1 << 30
    sent_answered: Collection[SpanKey] = ()
    roles: Sequence[str] = ()
    last_sent: Mapping[SpanKey, str] = field(default_factory=dict)
    earlier_values: Mapping[SpanKey, str] = field(default_factory=dict)

    @property
    def last_note(self) -> int:
        """The last message that a note may stand in; -1: there is none."""
        return max((s.message for s in self.spans if s.kind == "note"), default=-1)


@dataclass(frozen=True, slots=True)
class _Pair:
    """
    A span as the request has it and as the record has it.

    Args:
        ordinal: which of its kind among all that stand in either. is_typed: one side
            has a span where the other has the very text that stands for spans.
    """

    key: SpanKey
    own: str
    stored: str
    span: Span | None
    ordinal: int
    is_typed: bool


def choose(
    walk: Walk,
    record: LineageRecord,
    shared_len: int,
    may_share: Callable[[Loan], bool],
) -> Pins:
    """
    Walk the pairs of a request and a record.

    Args:
        shared_len: the number of canonical ids common to both.
        may_share: whether the record may share a value with this request.
    """
    pairs = _pairs(walk.spans, walk.settled, record, shared_len)
    taken, stopped_by = _take(pairs, record, walk, may_share)
    pins = _settle(taken, record, walk, stopped_by)
    if not pins.restated:
        return pins
    newer_values = NewerValues(walk.elements, walk.roles, walk.policy)
    while (key := _superseded(pins, walk, newer_values)) is not None:
        taken = taken[: [pair.key for pair in taken].index(key)]
        pins = _settle(taken, record, walk, key[2])
    return pins


def _superseded(pins: Pins, walk: Walk, newer_values: NewerValues) -> SpanKey | None:
    """
    The first span whose value a note would say behind a newer one of its kind.

    A value is true of its place; of several in a prompt the last one is now.
    """
    said = {item.key for item in pins.restated}
    last_of_others: dict[str, SpanKey] = {}
    for span in walk.spans:
        if span.value and span.key not in said:
            last = last_of_others.get(span.kind, span.key)
            last_of_others[span.kind] = max(last, span.key)
    return next(
        (
            key
            for key in sorted(said)
            if key < last_of_others.get(key[2], key)
            or newer_values.are_spoken_of_behind(key)
        ),
        None,
    )


def _settle(
    taken: Sequence[_Pair], record: LineageRecord, walk: Walk, stopped_by: str | None
) -> Pins:
    """The pins of the pairs taken, and what must be said again because of them."""
    policy, last_note = walk.policy, walk.last_note
    notes = {pair.key[0]: record.notes[pair.key[0]] for pair in taken if _is_note(pair)}
    restated = _to_restate(taken, notes, policy)
    if last_note in notes:  # it was asked before, and is asked again
        kept = notes.pop(last_note)
        restated = _to_restate(taken, notes, policy)
        if stated_by(restated) == kept.stated:
            notes[last_note], restated = kept, ()
        else:
            taken = [p for p in taken if (p.key[0], p.key[2]) != (last_note, "note")]
    return Pins(
        values={p.key: p.stored for p in taken if p.own != p.stored},
        gone=tuple(p.key for p in taken if p.span is None and p.stored),
        restated=restated,
        notes=notes,
        stopped_by=stopped_by,
    )


def _take(
    pairs: Sequence[_Pair],
    record: LineageRecord,
    walk: Walk,
    may_share: Callable[[Loan], bool],
) -> tuple[list[_Pair], str | None]:
    """The pairs up to the first that must not be pinned, and the kind of that one."""
    taken: list[_Pair] = []
    known: set[SpanKey] = set()
    for pair in pairs:
        action = _action(pair, walk.policy)
        if action == "pin" and not pair.own and not _may_stay(pair, walk):
            action = "stop"
        is_sayable = action != "restate" or pair.key[0] <= walk.last_note
        is_shared = action is None or _shares(pair, record, may_share)
        # A note whose values are not all walked would state what nobody takes back.
        stated = record.notes[pair.key[0]].stated if _is_note(pair) else ()
        is_whole = known.issuperset(stated)
        if (
            action == "stop"
            or pair.is_typed
            or not (is_sayable and is_shared and is_whole)
        ):
            return taken, pair.key[2]
        taken.append(pair)
        known.add(pair.key)
    return taken, None


def _may_stay(pair: _Pair, walk: Walk) -> bool:
    """
    Whether a value that is gone now was left out by the client, not by its user.

    Where a message was said again with another value, it is that one which is gone. Of
    two threads with equal first words the model's own turns tell which one goes on.
    """
    if walk.earlier_values.get(pair.key, pair.stored) != pair.stored:
        return False
    if walk.last_sent.get(pair.key, pair.stored) != pair.stored:
        return False
    past = walk.policy(pair.key[2]).past
    if not past:
        return True
    was_kept = past == "newest" and pair.key in walk.sent_answered
    return pair.key[0] < walk.answered_before and not was_kept


def _pairs(
    spans: Sequence[Span],
    settled: Mapping[SpanKey, int],
    record: LineageRecord,
    shared_len: int,
) -> list[_Pair]:
    own = {s.key: s for s in spans if settled[s.key] <= shared_len}
    stored = {s.key: s for s in record.spans if s.settled <= shared_len}
    order = {key: i for i, key in enumerate([*own, *stored])}
    keys = sorted(order, key=lambda key: (key[0], key[1], order[key]))
    ordinals: Counter[str] = Counter()
    pairs = []
    for key in keys:
        mine, theirs = own.get(key), stored.get(key)
        sentinel = mine.sentinel if mine else theirs.sentinel if theirs else ""
        is_typed = bool(sentinel) and (mine is None or theirs is None)
        values = (mine.value if mine else "", theirs.value if theirs else "")
        pairs.append(_Pair(key, *values, mine, ordinals[key[2]], is_typed))
        ordinals[key[2]] += 1
    return pairs


def _action(pair: _Pair, policy: Callable[[str], Policy]) -> Action | None:
    if pair.own == pair.stored:
        return None
    chosen = policy(pair.key[2])
    if not pair.own:
        return chosen.gone
    return chosen.differ if pair.stored else chosen.new


def _to_restate(
    taken: Sequence[_Pair],
    notes: Mapping[int, Note],
    policy: Callable[[str], Policy],
) -> tuple[Restated, ...]:
    """What M would state last that is not so any more."""
    stated: dict[SpanKey, str] = {}
    for message in sorted(notes):
        stated |= notes[message].stated
    return tuple(
        Restated(pair.key, pair.ordinal, pair.own)
        for pair in taken
        if stated.get(pair.key, pair.stored) != pair.own
        # What a note has said once must be taken back as well.
        and (pair.key in stated or _action(pair, policy) == "restate")
    )


def _is_note(pair: _Pair) -> bool:
    return pair.key[2] == "note" and bool(pair.stored)


def _shares(
    pair: _Pair, record: LineageRecord, may_share: Callable[[Loan], bool]
) -> bool:
    """Whether the record may share a pair's value; a note: all that it states."""
    note = record.notes.get(pair.key[0]) if pair.key[2] == "note" else None
    if note is not None and may_share(Loan(pair.key)):
        return all(may_share(Loan(key, value)) for key, value in note.stated.items())
    return may_share(Loan(pair.key, pair.stored))


def sharing_rule(
    record: Conversation,
    request: Conversation,
    policy: Callable[[str], Policy],
    proofs: Sequence[Mapping[SpanKey, str]] = (),
) -> Callable[[Loan], bool]:
    """
    Which values a record may share with a request.

    All within a thread, up to where the request is known to be of it; between threads
    of one key only those of the shared kinds that tell nothing of who asks
    (rules.toml); between keys none. A thread that the request resembles, or behind that
    place its own, shares those and what was said of them. Where no session is named,
    others may have begun with the same ids: then a value that tells who asks must have
    stood in a request for which one of them was issued.

    Args:
        proofs: the values of those requests.
    """
    if record.tenant != request.tenant:
        return lambda loan: False
    proved_until = request.proved_until if record == request else -1
    is_alike = record in (request, request.resembles)

    def is_shared(loan: Loan) -> bool:
        message, _, kind, _ = loan.key
        of_kind = policy(kind)
        if message <= proved_until and (
            request.is_named
            or not of_kind.tells
            or is_proved(proofs, loan.key, loan.stored)
        ):
            return True
        if of_kind.shared:
            return _is_of_nobody(loan, of_kind)
        return is_alike and not of_kind.tells

    return is_shared


def _is_of_nobody(loan: Loan, policy: Policy) -> bool:
    """Whether a value of a shared kind tells nothing that the request does not know."""
    if policy.shared == "opaque_id":
        return not loan.stored or is_opaque_id(loan.stored)
    return True
