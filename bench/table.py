"""Comparisons for people (a table) and for machines (a dict for JSON)."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from bench.report import Comparison, Verdict

_NAMES = {
    "total_tps": "total t/s",
    "decode_tps": "decode t/s",
    "ttft_s": "ttft ms",
    "ttft_p95_s": "ttft p95 ms",
}


def table(comparisons: Sequence[Comparison]) -> str:
    """Medians, values and verdicts, one line for each bar."""
    head = (
        f"{'comparison':<34}{'pairs':>5} {'metric':<11}{'ours':>8}{'theirs':>8}"
        f"{'value':>8}{'95% of median':>16}{'medians':>9}{'best':>8}  bar"
    )
    lines = [head, "-" * (len(head) + 18)]
    for comparison in comparisons:
        lines += [_row(comparison, verdict) for verdict in comparison.verdicts]
    return "\n".join(lines)


def as_json(comparisons: Sequence[Comparison], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        **facts,
        "passed": all(v.passed for c in comparisons for v in c.verdicts),
        "comparisons": [
            {
                "title": c.title,
                "num_streams": c.num_streams,
                "verdicts": [asdict(verdict) for verdict in c.verdicts],
                "pairs": [asdict(pair) for pair in c.pairs],
            }
            for c in comparisons
        ],
    }


def outcome(verdict: Verdict) -> str:
    """The bar and its verdict in words."""
    if verdict.bar.limit is None:
        return "-"
    word = "pass" if verdict.passed else "FAIL"
    noise = "" if verdict.is_clear else " (within the noise)"
    return f"{verdict.bar.kind} {verdict.bar.limit:g} {word}{noise}"


def _row(comparison: Comparison, verdict: Verdict) -> str:
    bar = verdict.bar
    is_time = bar.metric.startswith("ttft")
    scale, digits = (1000, 0) if is_time else (1, 1)
    show: Callable[[float], str] = (
        "{:+.1f}".format if bar.kind == "ms more <=" else "{:.3f}".format
    )
    return (
        f"{comparison.title:<34}{len(comparison.pairs):>5} {_NAMES[bar.metric]:<11}"
        f"{verdict.ours * scale:>8.{digits}f}{verdict.theirs * scale:>8.{digits}f}"
        f"{show(verdict.value):>8}{show(verdict.low) + '..' + show(verdict.high):>16}"
        f"{show(verdict.of_medians):>9}{show(verdict.of_best):>8}  {outcome(verdict)}"
    )
