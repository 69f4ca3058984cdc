"""Chooses the form of a prompt that the KV store holds most of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sidecar.core.prompt import PrefixMatcher
from sidecar.memory.session_turn_store import Scope
from sidecar.pipeline.reuse import pinned_values
from sidecar.pipeline.reuse.insertion import put_back
from sidecar.pipeline.reuse.lineage import (
    LineageIndex,
    LineageRecord,
    StoredSpan,
    pack,
)
from sidecar.pipeline.reuse.pinned_values import Pins
from sidecar.pipeline.reuse.prompt_ids import Assembled, Canonical, model_ids
from sidecar.pipeline.reuse.update_note import (
    Note,
    most_for_notes,
    quotes_a_note,
    write_note,
)
from sidecar.pipeline.template.elements import Element
from sidecar.pipeline.template.encoder import PromptEncoder
from sidecar.volatile.rules import RuleSet
from sidecar.volatile.spans import Span, SpanKey


@dataclass(frozen=True, slots=True)
class Question:
    """
    A request as far as reuse is concerned.

    Args:
        first_own: index of the first message that the model wrote for it, if known.
        is_proved: its thread is its own by more than equal words.
    """

    elements: tuple[Element, ...]
    canonical: Canonical
    scope: Scope
    header_tokens: int
    first_own: int | None = None
    is_proved: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """
    The chosen form.

    Args:
        stands: all spans with the values that stand in M. strict_len: what M without
            pins would reuse; reused_len: what this one does.
    """

    assembled: Assembled
    stands: tuple[StoredSpan, ...]
    notes: Mapping[int, Note]
    pins: Pins | None
    strict_len: int
    reused_len: int
    closest: tuple[LineageRecord, int] | None

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.assembled.ids)


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
        self, question: Question, matcher: PrefixMatcher, most_tokens: int
    ) -> Answer:
        """
        The best form of the prompt; the plain one unless pins clearly gain.

        Args:
            most_tokens: longest prompt that can be answered; a longer form is taken
                for no gain.
        """
        plain = self._assemble(question, None)
        strict_len = matcher.match_len(plain.assembled.ids)
        canonical = pack(question.canonical.ids)
        found = self._lineage.candidates(canonical, question.scope)
        best = _with_lengths(plain, strict_len, strict_len, found)
        if not self._pinning or quotes_a_note(question.elements):
            return best
        most_tokens = min(most_tokens, plain.length + most_for_notes(plain.length))
        seen: set[object] = set()
        for record, shared_len in found:
            pins = self._walk(question, record, shared_len)
            shape = (tuple(pins.values.items()), pins.restated)
            if pins.is_empty or shape in seen:
                continue
            seen.add(shape)
            answer = self._assemble(question, (pins, record))
            if answer.length > most_tokens:
                continue
            reused_len = matcher.match_len(answer.assembled.ids)
            cost = answer.length - plain.length
            gain = reused_len - strict_len
            if gain < self._min_gain or gain <= cost or reused_len <= best.reused_len:
                continue
            best = _with_lengths(answer, strict_len, reused_len, found)
            self._lineage.touch(record)
            unshared = len(question.canonical.ids) - shared_len
            if answer.length - reused_len <= unshared + cost + 2:
                break  # all that this or any other record shares is reused
        return best

    def plain(self, question: Question, matcher: PrefixMatcher) -> Answer:
        """The prompt as it was sent, with strict reuse."""
        answer = self._assemble(question, None)
        strict_len = matcher.match_len(answer.assembled.ids)
        return _with_lengths(answer, strict_len, strict_len, [])

    def _walk(self, question: Question, record: LineageRecord, shared: int) -> Pins:
        spans = [e for e in question.elements if isinstance(e, Span)]
        policy = self._ruleset.policy
        lends = pinned_values.lender(
            record.scope, question.scope, policy, is_proved=question.is_proved
        )
        return pinned_values.choose(
            spans, question.canonical.settled, (record, shared), policy, lends
        )

    def _assemble(
        self, question: Question, chosen: tuple[Pins, LineageRecord] | None
    ) -> Answer:
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
                _add_note(elements, pins, values, notes)
        assembled = model_ids(elements, values, self._encoder, question.header_tokens)
        stands = tuple(
            StoredSpan(e.key, values.get(e.key, e.value), settled[e.key], e.sentinel)
            for e in elements
            if isinstance(e, Span)
        )
        pins_used = chosen[0] if chosen else None
        return Answer(assembled, stands, notes, pins_used, 0, 0, None)


def _with_lengths(
    answer: Answer,
    strict_len: int,
    reused_len: int,
    found: Sequence[tuple[LineageRecord, int]],
) -> Answer:
    closest = found[0] if found else None
    return replace(
        answer, strict_len=strict_len, reused_len=reused_len, closest=closest
    )


def _add_note(
    elements: Sequence[Element],
    pins: Pins,
    values: dict[SpanKey, str],
    notes: dict[int, Note],
) -> None:
    """Say the restated values at the end of the last user or tool message."""
    slots = [e for e in elements if isinstance(e, Span) and e.kind == "note"]
    if not slots:
        return
    slot = slots[-1]
    note = write_note(pins.restated)
    notes[slot.message] = note
    values[slot.key] = note.text
