"""Chooses the form of a prompt that the KV store holds most of, and tells of it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sidecar.core.conversation import Conversation
from sidecar.core.prompt import (
    CacheReport,
    ChatTokenizer,
    Divergence,
    Hit,
    Lookup,
    ModelIds,
)
from sidecar.core.requests import IMAGE_MARK
from sidecar.memory.lineage import (
    LineageIndex,
    LineageRecord,
    Note,
    StoredSpan,
    pack,
)
from sidecar.memory.session_turn_store import Change
from sidecar.pipeline.reuse import pinned_values
from sidecar.pipeline.reuse.gone_spans import put_back
from sidecar.pipeline.reuse.pinned_values import Pins, Walk
from sidecar.pipeline.reuse.prompt_ids import (
    Assembled,
    Canonical,
    end_of_message,
    model_ids,
)
from sidecar.pipeline.reuse.update_note import max_for_notes, quotes_a_note, write_note
from sidecar.pipeline.template.elements import Element, Splice
from sidecar.pipeline.template.encoder import PromptEncoder
from sidecar.volatile.marked_message import MarkedMessage, Span, SpanKey
from sidecar.volatile.rules import RuleSet

_WINDOW_CHARS = 40
_WINDOW_IDS = 64
_BEGUN_MARK = re.compile(f"{IMAGE_MARK}[a-p]{{0,31}}$")


@dataclass(frozen=True, slots=True)
class ReuseQuery:
    """
    A request as far as reuse is concerned.

    Args:
        roles: of its messages.
        first_own: index of the first message that the model wrote for it, if known.
        answered_before: index of the last one: it has read the messages before that.
        is_proved: the substitution proof holds (template/elements).
        earlier_values: what identified who asks when the model's own turns in it were
            written.
        proofs: the same of each request for which an id was issued that stands in it.
    """

    elements: tuple[Element, ...]
    canonical: Canonical
    conversation: Conversation
    header_tokens: int
    roles: Sequence[str]
    first_own: int | None = None
    answered_before: int = 0
    is_proved: bool = True
    earlier_values: Mapping[SpanKey, str] = field(default_factory=dict)
    proofs: Sequence[Mapping[SpanKey, str]] = ()

    @property
    def threads(self) -> tuple[Conversation | None, ...]:
        """Its conversation, and the one that it resembles."""
        return (self.conversation, self.conversation.resembles)

    @property
    def sent_answered(self) -> list[SpanKey]:
        """Spans with values that the client sends in answered messages."""
        answered = self.answered_before
        return [s.key for s in self.spans if s.value and s.message < answered]

    @property
    def spans(self) -> list[Span]:
        """Its volatile stretches, in order."""
        return [e for e in self.elements if isinstance(e, Span)]


@dataclass(frozen=True, slots=True)
class PromptVariant:
    """
    One form of a prompt.

    Args:
        stands: all spans with the values that stand in M.
        pins: None: it says what was sent, no more and no less.
    """

    assembled: Assembled
    stands: tuple[StoredSpan, ...]
    notes: Mapping[int, Note]
    pins: Pins | None

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.assembled.ids)


@dataclass(frozen=True, slots=True)
class ReuseDecision:
    """
    The chosen form.

    Args:
        strict_len: what M without pins would reuse. hit: what this one does.
        closest: the record that shares most with the request, and how much.
        closest_stop: the kind of value at which that one could lend no more.
    """

    form: PromptVariant
    strict_len: int
    hit: Hit
    closest: tuple[LineageRecord, int] | None
    closest_stop: str | None = None

    @property
    def reused_len(self) -> int:
        """Tokens that this form reuses."""
        return self.hit.cached_len

    @property
    def ids(self) -> ModelIds:
        """What the model reads."""
        return self.form.assembled.ids

    @property
    def text(self) -> str:
        """The same as text."""
        return self.form.assembled.text


class ReuseChooser:
    """
    Pins values of earlier prompts where that makes the stored prefix longer.

    Args:
        min_gain: tokens pinning must gain over strict reuse. pinning: False never
            alters the prompt.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        lineage: LineageIndex,
        ruleset: RuleSet,
        min_gain: int,
        *,
        pinning: bool,
    ) -> None:
        self._encoder = encoder
        self._lineage = lineage
        self._ruleset = ruleset
        self._min_gain = min_gain
        self._pinning = pinning

    def choose(
        self, question: ReuseQuery, lookup: Lookup, max_tokens: int
    ) -> ReuseDecision:
        """
        The best form of the prompt; the plain one unless pins clearly gain.

        Args:
            max_tokens: longest prompt that can be answered; a longer form is taken
                for no gain.
        """
        plain = self._form(question, None)
        strict = lookup(plain.assembled.ids, question.conversation)
        strict_len = strict.cached_len
        canonical = pack(question.canonical.ids)
        found = self._lineage.candidates(canonical, question.conversation)
        closest = found[0] if found else None
        best = ReuseDecision(plain, strict_len, strict, closest)
        if not self._pinning or quotes_a_note(question.elements):
            return best
        max_tokens = min(max_tokens, plain.length + max_for_notes(plain.length))
        seen: set[object] = set()
        walk = self._walk(question, found)
        for record, shared_len in found:
            pins = self._pins(question, walk, record, shared_len)
            if record is found[0][0]:
                best = replace(best, closest_stop=pins.stopped_by)
            shape = (tuple(pins.values.items()), pins.restated)
            if pins.is_empty or shape in seen:
                continue
            seen.add(shape)
            form = self._form(question, (pins, record))
            if form.length > max_tokens:
                continue
            hit = lookup(form.assembled.ids, question.conversation)
            reused_len = hit.cached_len
            cost = form.length - plain.length
            gain = reused_len - strict_len
            if gain < self._min_gain or gain <= cost or reused_len <= best.reused_len:
                continue
            best = replace(best, form=form, hit=hit)
            self._lineage.touch(record)
            unshared = len(question.canonical.ids) - shared_len
            if form.length - reused_len <= unshared + cost + 2:
                break  # all that this or any other record shares is reused
        return best

    def plain(self, question: ReuseQuery, lookup: Lookup) -> ReuseDecision:
        """The prompt as it was sent, with strict reuse."""
        form = self._form(question, None)
        hit = lookup(form.assembled.ids, question.conversation)
        return ReuseDecision(form, hit.cached_len, hit, None)

    def _walk(
        self, question: ReuseQuery, found: Sequence[tuple[LineageRecord, int]]
    ) -> Walk:
        own = [item for item in found if item[0].conversation in question.threads]
        own.sort(key=lambda item: item[0].number)
        sent_answered = set[SpanKey]()
        last_sent: dict[SpanKey, str] = {}
        for record, shared_len in own:
            sent_answered |= record.sent_answered
            for span in record.spans:
                if span.was_sent and span.settled <= shared_len:
                    last_sent[span.key] = span.value
        return Walk(
            question.spans,
            question.canonical.settled,
            self._ruleset.policy,
            question.elements,
            question.answered_before,
            sent_answered,
            question.roles,
            last_sent,
            question.earlier_values,
        )

    def _pins(
        self, question: ReuseQuery, walk: Walk, record: LineageRecord, shared: int
    ) -> Pins:
        may_share = pinned_values.sharing_rule(
            record.conversation, question.conversation, walk.policy, question.proofs
        )
        return pinned_values.choose(walk, record, shared, may_share)

    def _form(
        self, question: ReuseQuery, chosen: tuple[Pins, LineageRecord] | None
    ) -> PromptVariant:
        elements: Sequence[Element] = question.elements
        values: dict[SpanKey, str] = {}
        notes: dict[int, Note] = {}
        settled = dict(question.canonical.settled)
        if chosen is not None:
            pins, record = chosen
            elements = put_back(elements, pins.gone)
            values, notes = dict(pins.values), dict(pins.notes)
            settled |= {s.key: s.settled for s in record.spans if s.key not in settled}
            if pins.restated:
                note = write_note(pins.restated, question.roles)
                _add_note(elements, note, values, notes)
        assembled = model_ids(elements, values, self._encoder, question.header_tokens)
        answered = question.answered_before
        stands = tuple(
            StoredSpan(
                e.key,
                values.get(e.key, e.value),
                settled[e.key],
                e.sentinel,
                was_sent_answered=bool(e.value) and e.message < answered,
                was_sent=bool(e.value),
            )
            for e in elements
            if isinstance(e, Span)
        )
        return PromptVariant(assembled, stands, notes, chosen[0] if chosen else None)


def _add_note(
    elements: Sequence[Element],
    note: Note,
    values: dict[SpanKey, str],
    notes: dict[int, Note],
) -> None:
    """Put a note at the end of the last user or tool message."""
    slots = [e for e in elements if isinstance(e, Span) and e.kind == "note"]
    if not slots:
        return
    slot = slots[-1]
    notes[slot.message] = note
    values[slot.key] = note.text


COUNTED = (
    "pin_tokens_gained",
    "splice_turns",
    "splice_unavailable",
    "healing_hit",
    "alignment_unavailable",
    "exact_key_rejected_by_model_lcp",
    "invariant_violation",
    "resumed_prefill_tokens",
    "watchdog_abort",
)


def make_report(
    question: ReuseQuery,
    answer: ReuseDecision,
    change: Change,
    tokenizer: ChatTokenizer,
    marked: Sequence[MarkedMessage],
    own_last: tuple[LineageRecord, int] | None,
) -> CacheReport:
    """
    The report of one request.

    Args:
        own_last: where no record is close, the last one of its conversation, and how
            much that one shares.
    """
    pins = answer.form.pins
    divergence, closest = None, answer.closest or own_last
    if closest is not None:
        divergence = first_divergence(
            closest[0], question.canonical, closest[1], tokenizer, marked
        )
        is_own = closest[0].conversation in question.threads
        divergence = divergence and replace(divergence, is_own=is_own)
    shared_len = answer.closest[1] if answer.closest else 0
    return CacheReport(
        match="pinned" if pins else "strict" if answer.strict_len else "none",
        strict_len=answer.strict_len,
        reused_len=answer.reused_len,
        is_proved=question.is_proved,
        stable_messages=change.stable_messages,
        changes=change.descriptors,
        pinned=tuple(pins.kinds()) if pins else (),
        restated=tuple(r.key[2] for r in pins.restated) if pins else (),
        num_spliced=sum(isinstance(e, Splice) for e in question.elements),
        stopped_by=pins.stopped_by if pins else None,
        divergence=divergence,
        is_new=change.is_new,
        key_delta_chars=key_delta_chars(question.canonical, shared_len, tokenizer),
        closest_stop=answer.closest_stop,
        stable_len=end_of_message(
            answer.form.assembled.boundaries,
            change.earlier.num_stable - 1 if change.earlier else None,
        ),
        earlier=change.earlier,
        shared_len=shared_len,
    )


def counted(
    report: CacheReport, answer: ReuseDecision, num_healed: int
) -> dict[str, int]:
    """The counters that a request moves (docs/metrics.md), and by how much."""
    moved = Counter(f"pin_{kind}" for kind in report.pinned)
    moved.update(f"restate_{kind}" for kind in report.restated)
    if report.stopped_by:
        moved[f"pin_stop_{report.stopped_by}"] += 1
    moved["pin_tokens_gained"] += answer.reused_len - answer.strict_len
    moved["splice_turns"] += report.num_spliced
    moved["splice_unavailable"] += num_healed - report.num_spliced
    moved["healing_hit"] += num_healed
    moved["alignment_unavailable"] += int(not report.is_proved)
    closest = answer.closest
    is_equal = closest is not None and closest[1] == len(closest[0].canonical)
    if is_equal and not report.divergence and answer.reused_len == 0:
        moved["exact_key_rejected_by_model_lcp"] += 1
    return {name: amount for name, amount in moved.items() if amount}


def first_divergence(
    record: LineageRecord,
    canonical: Canonical,
    shared_len: int,
    tokenizer: ChatTokenizer,
    marked: Sequence[MarkedMessage],
) -> Divergence | None:
    """The first differing canonical id; None if one prompt extends the other."""
    if shared_len >= min(len(record.canonical), len(canonical.ids)):
        return None
    settled = [key for key, depth in canonical.settled.items() if depth > shared_len]
    message = min((key[0] for key in settled), default=len(marked) - 1)
    if message and canonical.begins.get(message, 0) > shared_len:
        message -= 1  # a turn of the model: it has no spans
    now = canonical.ids[shared_len : shared_len + _WINDOW_IDS]
    before = record.canonical[shared_len : shared_len + _WINDOW_IDS]
    shared = canonical.ids[max(0, shared_len - _WINDOW_IDS) : shared_len]
    texts = [tokenizer.decode(list(ids)) for ids in (shared, before, now)]
    begun = texts[0].rpartition("\n")[2]
    return Divergence(
        shared_len,
        message,
        marked[message].message.role,
        texts[1][:_WINDOW_CHARS],
        texts[2][:_WINDOW_CHARS],
        is_image=_is_image(*texts),
        line_before=begun + texts[1].partition("\n")[0],
        line_now=begun + texts[2].partition("\n")[0],
    )


def _is_image(shared: str, before: str, now: str) -> bool:
    """Whether two prompts part within what stands for an image, or before one."""
    if IMAGE_MARK in (before[: len(IMAGE_MARK)], now[: len(IMAGE_MARK)]):
        return True
    return _BEGUN_MARK.search(shared) is not None


def key_delta_chars(
    canonical: Canonical, shared_len: int, tokenizer: ChatTokenizer
) -> int:
    """
    How much of the cache key is new: characters of the canonical text (volatile values
    as marks, turns that are put back as digests) behind its first `shared_len` ids.
    """
    return len(tokenizer.decode(list(canonical.ids[shared_len:])))
