"""What the pipeline did for reuse: the report of a request, and the counters."""

from collections import Counter
from collections.abc import Sequence

from sidecar.core.prompt import CacheReport, ChatTokenizer
from sidecar.memory.session_turn_store import Change
from sidecar.pipeline.reuse.best_form import Answer, Question
from sidecar.pipeline.reuse.first_difference import first_divergence, key_delta_chars
from sidecar.pipeline.template.elements import Splice
from sidecar.volatile.spans import MarkedMessage

COUNTED = (
    "pin_tokens_gained", "splice_turns", "splice_unavailable", "healing_hit",
    "alignment_unavailable", "exact_key_rejected_by_model_lcp", "turn_write_refused",
    "invariant_violation", "resumed_prefill_tokens", "watchdog_abort",
)  # fmt: skip


def make_report(
    question: Question,
    answer: Answer,
    change: Change,
    tokenizer: ChatTokenizer,
    marked: Sequence[MarkedMessage],
) -> CacheReport:
    """The report of one request."""
    pins = answer.pins
    divergence, shared_len = None, 0
    if answer.closest is not None:
        record, shared_len = answer.closest
        divergence = first_divergence(
            record, question.canonical, shared_len, tokenizer, marked
        )
    return CacheReport(
        match="pinned" if pins else "strict" if answer.strict_len else "none",
        strict_len=answer.strict_len,
        reused_len=answer.reused_len,
        stable_messages=change.stable_messages,
        changes=change.descriptors,
        pinned=tuple(pins.kinds()) if pins else (),
        restated=tuple(r.key[2] for r in pins.restated) if pins else (),
        num_spliced=sum(isinstance(e, Splice) for e in question.elements),
        stopped_by=pins.stopped_by if pins else None,
        divergence=divergence,
        is_new=change.is_new,
        key_delta_chars=key_delta_chars(question.canonical, shared_len, tokenizer),
    )


def counted(report: CacheReport, answer: Answer, num_healed: int) -> dict[str, int]:
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
