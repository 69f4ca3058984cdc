"""What the runs mean: one run's numbers, medians over pairs, bars and verdicts."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.clients import Answer

_TAIL = 0.025
_Kind = Literal["ratio >=", "ratio <=", "ms more <="]


class InvalidRun(Exception):
    """The two sides did not do the same work, so their times say nothing."""


@dataclass(frozen=True, slots=True)
class Run:
    """
    One side's run: all its streams started at once.

    Args:
        total_tps: generated tokens of all streams by the time from the first send to
            the last text.
        decode_tps: of one stream after its first token; the median of the streams.
        ttft_s, ttft_p95_s: median and 95th percentile over the streams.
    """

    total_tps: float
    decode_tps: float
    ttft_s: float
    ttft_p95_s: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Ours and theirs on the same prompts, one right after the other."""

    ours: Run
    theirs: Run
    num_equal_texts: int


@dataclass(frozen=True, slots=True)
class Bar:
    """
    A metric (a field of Run), compared pair by pair.

    Args:
        limit: None for a metric that is only shown.
    """

    metric: str
    kind: _Kind
    limit: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    A bar and how it went.

    Args:
        value: median over the pairs; this is what is held against the limit.
        low, high: the interval of that median at 95 % or more.
        of_medians: the same from the two sides' medians, to compare.
        of_best: from the two sides' best runs: the cost where nothing else ran.
        passed: whether the value keeps the limit.
        is_clear: whether the whole interval is on the value's side of the limit.
    """

    bar: Bar
    ours: float
    theirs: float
    value: float
    low: float
    high: float
    of_medians: float
    of_best: float
    passed: bool
    is_clear: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """All pairs of one comparison and the bars they are held against."""

    title: str
    num_streams: int
    pairs: Sequence[Pair]
    bars: Sequence[Bar]

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each bar."""
        return [judge(bar, self.pairs) for bar in self.bars]


def run_of(answers: Sequence[Answer]) -> Run:
    """The numbers of one run."""
    seconds = max(a.last for a in answers) - min(a.started for a in answers)
    ttfts = [a.ttft_s for a in answers]
    return Run(
        total_tps=sum(a.num_generated for a in answers) / seconds,
        decode_tps=statistics.median(a.decode_tps for a in answers),
        ttft_s=statistics.median(ttfts),
        ttft_p95_s=percentile(ttfts, 0.95),
    )


def pair_of(ours: Sequence[Answer], theirs: Sequence[Answer], max_tokens: int) -> Pair:
    """
    Pair two runs on the same prompts.

    Raises:
        InvalidRun: prompts or answers differ in length, or something was cached.
    """
    for mine, other in zip(ours, theirs, strict=True):
        if mine.num_prompt != other.num_prompt:
            raise InvalidRun(f"prompt of {mine.num_prompt} != {other.num_prompt}")
        for name, answer in (("ours", mine), ("theirs", other)):
            if answer.num_cached:
                raise InvalidRun(f"{name} had {answer.num_cached} tokens cached")
            if answer.num_generated != max_tokens:
                raise InvalidRun(f"{name}: {answer.num_generated} of {max_tokens}")
    # mlx-lm drops the space before the first word, though a raw text goes on there.
    equal = sum(
        a.text.lstrip(" ") == b.text.lstrip(" ")
        for a, b in zip(ours, theirs, strict=True)
    )
    return Pair(run_of(ours), run_of(theirs), equal)


def judge(bar: Bar, pairs: Sequence[Pair]) -> Verdict:
    """Hold a bar against the median of the pairs."""
    compare = _difference_ms if bar.kind == "ms more <=" else _ratio
    ours = [getattr(pair.ours, bar.metric) for pair in pairs]
    theirs = [getattr(pair.theirs, bar.metric) for pair in pairs]
    values = [compare(a, b) for a, b in zip(ours, theirs, strict=True)]
    value = statistics.median(values)
    low, high = median_interval(values)
    our_median, their_median = statistics.median(ours), statistics.median(theirs)
    best = max if bar.kind == "ratio >=" else min
    passed = keeps(bar, value)
    return Verdict(
        bar,
        our_median,
        their_median,
        value,
        low,
        high,
        compare(our_median, their_median),
        compare(best(ours), best(theirs)),
        passed,
        is_clear=keeps(bar, low) == keeps(bar, high) == passed,
    )


def keeps(bar: Bar, value: float) -> bool:
    """Whether a value is on the good side of a bar."""
    if bar.limit is None:
        return True
    return value >= bar.limit if bar.kind == "ratio >=" else value <= bar.limit


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """
    An interval that holds the true median in at least 95 % of experiments.

    Between two ranks; with fewer than six values it is all there is, and holds less.
    Source: the sign test. No more than k values lie below the median with the chance
    of a binomial distribution of n and 1/2.
    """
    ordered = sorted(values)
    rank, below = 0, 0.0
    while rank < len(ordered) // 2:
        below += math.comb(len(ordered), rank) / 2 ** len(ordered)
        if below > _TAIL:
            break
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[-rank]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs


def _difference_ms(ours: float, theirs: float) -> float:
    return (ours - theirs) * 1000
