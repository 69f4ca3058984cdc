"""What came of the hostile traffic, as tables and as the bars that failed."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.good_agents import Heard
from bench.server_pair import Figures, Outage

MAX_RATIO = 3.0
# Of anyio and LiteLLM's logging, and an executor's, by its documented default: they
# come when many ask at once, and stay.
_EXECUTOR_THREADS = min(32, (os.cpu_count() or 1) + 4)
POOL_THREADS = {"litellm": 4 + _EXECUTOR_THREADS, "sidecar": 0}
# A server that was started anew is not the same to a page; nor is a heap.
_RSS_FACTOR, _RSS_BYTES = 1.1, 32 << 20
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Result:
    """
    All that was seen.

    Args:
        crowded: what the good clients heard beside as many ordinary ones.
        base: of each server, before. after: some measures, when all was quiet again.
        most: of each server, beside the hostile clients.
        attacks: by kind, how often what came of it. slowest: seconds to the end of an
            answer, by kind. findings: answers that no input
            may bring about.
    """

    alone: list[Heard]
    crowded: list[Heard]
    beside: list[Heard]
    wrong: list[str]
    outages: list[Outage]
    base: dict[str, Figures]
    after: list[dict[str, Figures]]
    maximum: dict[str, Figures]
    attacks: dict[str, dict[str, int]]
    slowest: dict[str, float]
    findings: list[dict[str, Any]]


def judge(result: Result, *, with_times: bool) -> list[str]:
    """
    The bars that failed, in words.

    Args:
        with_times: hold the waits against their bar; a loaded machine says nothing.
    """
    failed = [f"wrong answer: {wrong}" for wrong in result.wrong]
    failed += [f"good client failed: {h.problem}" for h in _failures(result)]
    failed += [
        f"{f['kind']} got {f['outcome']} on port {f['port']}: {f['sent']} -> "
        f"{f['answer']}"
        for f in faults(result)
    ]
    failed += _left_over(result)
    ratio = _p(0.99, _alive(result)) / _p(0.99, result.alone)
    if with_times and ratio > MAX_RATIO:
        failed.append(f"p99 of the waits: {ratio:.1f} times, at most {MAX_RATIO:g}")
    return failed


def faults(result: Result) -> list[dict[str, Any]]:
    """Findings for which the sidecar's death is no reason."""
    return [
        finding
        for finding in result.findings
        if not _is_in_outage(result, finding["started"], finding["ended"])
    ]


def table(result: Result) -> str:
    """Waits, resources and attacks."""
    parts = (_waits(result), _resources(result), _attacks(result))
    return "\n".join(itertools.chain.from_iterable((*part, "") for part in parts))


def _waits(result: Result) -> Iterator[str]:
    yield "| good clients | answers | p50 wait | p99 wait | p50 whole | p99 whole |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    alive, dead = _alive(result), _dead(result)
    for name, heard in (
        ("alone", result.alone), ("beside ordinary ones", result.crowded),
        ("beside", alive), ("in an outage", dead),
    ):  # fmt: skip
        answered = [h for h in heard if h.text is not None]
        cells = [
            f"{_quantile(q, [getattr(h, what) for h in answered]) * 1000:,.0f} ms"
            for what in ("wait_s", "whole_s")
            for q in (0.5, 0.99)
        ]
        yield f"| {name} | {len(answered)} | {' | '.join(cells)} |"
    for name, others in (("beside ordinary ones", result.crowded), ("beside", alive)):
        ratios = [_p(q, others) / _p(q, result.alone) for q in (0.5, 0.99)]
        yield f"| {name} / alone | | {ratios[0]:.2f} | **{ratios[1]:.2f}** | | |"
    yield ""
    told = [h.problem for h in dead if h.text is None]
    for outage in result.outages:
        served = _served_again(result, outage)
        yield (
            f"sidecar killed: healthy after {outage.back_at - outage.killed_at:.1f} s, "
            f"a request served after {served - outage.killed_at:.1f} s"
        )
    yield f"failed in an outage: {len(told)}; else: {len(_failures(result))}"
    yield from sorted({f"  {problem[:160]}" for problem in told})
    yield f"wrong answers: {len(result.wrong)}"


def _resources(result: Result) -> Iterator[str]:
    yield "| server | | fds | threads | RSS, MiB |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for name, base in result.base.items():
        rows = [("before", base), ("most", result.maximum.get(name, base))]
        rows += [("after", measure[name]) for measure in result.after]
        for when, seen in rows:
            rss = f"{seen.rss_bytes / _MIB:,.0f}"
            yield f"| {name} | {when} | {seen.num_fds} | {seen.num_threads} | {rss} |"


def _attacks(result: Result) -> Iterator[str]:
    yield "| attack | times | slowest | what came of it |"
    yield "| --- | ---: | ---: | --- |"
    for kind, outcomes in sorted(result.attacks.items()):
        ordered = sorted(outcomes.items(), key=lambda item: -item[1])
        told = ", ".join(f"{outcome}: {times}" for outcome, times in ordered)
        name, times = kind.replace("_", " "), sum(outcomes.values())
        slowest = result.slowest.get(kind)
        seconds = f"{slowest:.1f} s" if slowest is not None else ""
        yield f"| {name} | {times} | {seconds} | {told} |"
    yield ""
    num_hidden = len(result.findings) - len(faults(result))
    yield f"faults: {len(faults(result))}; beside a kill: {num_hidden}"


def _left_over(result: Result) -> Iterator[str]:
    for name, base in result.base.items():
        minimum = _min([measure[name] for measure in result.after])
        limit = base.rss_bytes * _RSS_FACTOR + _RSS_BYTES
        is_back = (
            minimum.num_fds <= base.num_fds
            and minimum.num_threads <= base.num_threads + POOL_THREADS[name]
            and minimum.rss_bytes <= limit
        )
        if not is_back:
            yield f"{name} is not back at its base: {minimum}, before {base}"


def _min(measures: Sequence[Figures]) -> Figures:
    return Figures(
        min(m.num_fds for m in measures),
        min(m.num_threads for m in measures),
        min(m.rss_bytes for m in measures),
    )


def _failures(result: Result) -> list[Heard]:
    """Good requests without an answer though the sidecar lived."""
    heard = (*result.alone, *result.crowded, *_alive(result))
    return [h for h in heard if h.text is None]


def _alive(result: Result) -> list[Heard]:
    return [h for h in result.beside if not _is_dead(result, h)]


def _dead(result: Result) -> list[Heard]:
    return [h for h in result.beside if _is_dead(result, h)]


def _is_dead(result: Result, heard: Heard) -> bool:
    return _is_in_outage(result, heard.started, heard.ended)


def _is_in_outage(result: Result, started: float, ended: float) -> bool:
    return any(
        started <= _served_again(result, outage) and ended >= outage.killed_at
        for outage in result.outages
    )


def _served_again(result: Result, outage: Outage) -> float:
    """The end of the first good answer that was begun after the kill."""
    ends = [
        h.ended
        for h in result.beside
        if h.text is not None and h.started > outage.killed_at
    ]
    return min(ends, default=outage.back_at)


def _p(quantile: float, heard: Sequence[Heard]) -> float:
    return _quantile(quantile, [h.wait_s for h in heard if h.text is not None])


def _quantile(quantile: float, values: Sequence[float]) -> float:
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, int(quantile * len(values)))]
