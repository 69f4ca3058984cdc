"""The bench's arithmetic and verdicts; nothing here is timed."""

import json

import pytest

from bench import overhead, report, table
from bench.clients import Answer
from bench.prompts import lengths_of
from bench.report import Bar, Comparison, InvalidRun, Pair, Run


def an_answer(
    started: float = 0.0,
    first: float = 1.0,
    last: float = 3.0,
    *,
    prompt: int = 10,
    cached: int = 0,
    generated: int = 5,
    text: str = "x",
) -> Answer:
    return Answer(started, first, last, text, prompt, cached, generated)


def pairs_of(*values: tuple[float, float]) -> list[Pair]:
    """Pairs with these tokens a second, and as many seconds to the first token."""
    runs = [(Run(a, a, a, a), Run(b, b, b, b)) for a, b in values]
    return [Pair(ours, theirs, 1) for ours, theirs in runs]


def test_one_answer_counts_from_its_send_to_its_first_text() -> None:
    """Decode speed leaves the first token out."""
    answer = an_answer(1.0, 1.5, 3.5, generated=5)
    assert answer.ttft_s == 0.5
    assert answer.decode_tps == 2.0


def test_an_answer_in_one_piece_has_no_decode_speed() -> None:
    """No time passed between its first and last text."""
    assert an_answer(0.0, 1.0, 1.0).decode_tps == 0.0


def test_a_run_counts_from_the_first_send_to_the_last_text() -> None:
    """The sum of all streams over the time all of them took."""
    run = report.run_of([an_answer(0.0, 1.0, 3.0), an_answer(0.5, 3.5, 5.0)])
    assert run.total_tps == 10 / 5.0
    assert run.ttft_s == 2.0
    assert run.ttft_p95_s == pytest.approx(2.9)


@pytest.mark.parametrize(
    "theirs",
    [an_answer(prompt=11), an_answer(cached=1), an_answer(generated=4)],
    ids=["other prompt", "cached", "shorter"],
)
def test_runs_that_did_not_do_the_same_work_are_refused(theirs: Answer) -> None:
    """Their times could not be compared."""
    with pytest.raises(InvalidRun):
        report.pair_of([an_answer()], [theirs], 5)


def test_equal_texts_are_counted() -> None:
    """How many streams got the same text on both sides; a first space is no matter."""
    ours = [an_answer(text=" a"), an_answer(text="b")]
    theirs = [an_answer(text="a"), an_answer(text="c")]
    assert report.pair_of(ours, theirs, 5).num_equal_texts == 1


def test_the_value_is_the_median_of_the_pairs_not_a_ratio_of_medians() -> None:
    """A slow phase of the machine falls on both halves of a pair."""
    pairs = pairs_of((10, 10), (5, 5), (20, 20), (9, 10), (8, 10))
    verdict = report.judge(Bar("total_tps", "ratio >=", 0.97), pairs)
    assert verdict.value == 1.0
    assert verdict.of_medians == 0.9
    assert verdict.passed


def test_the_best_runs_are_the_fastest_of_each_side() -> None:
    """The most tokens a second, but the least time."""
    pairs = pairs_of((1, 2), (3, 4))
    assert report.judge(Bar("total_tps", "ratio >=", 1), pairs).of_best == 3 / 4
    assert report.judge(Bar("ttft_s", "ratio <=", 1), pairs).of_best == 1 / 2


@pytest.mark.parametrize(
    ("bar", "ours", "passed"),
    [
        (Bar("total_tps", "ratio >=", 0.97), 97.0, True),
        (Bar("total_tps", "ratio >=", 0.97), 96.9, False),
        (Bar("ttft_s", "ratio <=", 1.03), 103.0, True),
        (Bar("ttft_s", "ratio <=", 1.03), 103.1, False),
        (Bar("ttft_s", "ms more <=", 8.0), 100.0078, True),
        (Bar("ttft_s", "ms more <=", 8.0), 100.0082, False),
        (Bar("ttft_p95_s", "ratio <=", None), 900.0, True),
    ],
)
def test_a_bar_is_kept_up_to_its_limit(bar: Bar, ours: float, passed: bool) -> None:
    """Ratios are ours over theirs; a difference is in milliseconds."""
    verdict = report.judge(bar, pairs_of((ours, 100.0)))
    assert verdict.passed is passed
    assert verdict.is_clear


def test_a_verdict_inside_the_noise_says_so() -> None:
    """The median passes, but its interval reaches over the limit."""
    bar = Bar("total_tps", "ratio >=", 0.97)
    verdict = report.judge(bar, pairs_of((96, 100), (99, 100), (102, 100)))
    assert verdict.passed
    assert not verdict.is_clear
    assert table.outcome(verdict) == "ratio >= 0.97 pass (within the noise)"


@pytest.mark.parametrize(
    ("count", "low", "high"), [(1, 0, 0), (5, 0, 4), (7, 0, 6), (9, 1, 7), (60, 21, 38)]
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(
    count: int, low: int, high: int
) -> None:
    """Ranks from a table of the binomial distribution, counted from 0."""
    assert report.median_interval(list(range(count))) == (low, high)


def test_percentiles_lie_between_ranks() -> None:
    """As numpy's default does."""
    assert report.percentile([3, 1, 2], 0.5) == 2
    assert report.percentile([0, 10], 0.95) == 9.5


def test_one_failed_bar_fails_the_whole() -> None:
    """And the file for machines holds every pair."""
    bars = [Bar("total_tps", "ratio >=", 0.97), Bar("ttft_s", "ratio <=", 1.03)]
    comparison = Comparison("them, 1 stream", 1, pairs_of((2, 1), (2, 1)), bars)
    result = json.loads(json.dumps(table.as_json([comparison], {"machine": "m"})))
    assert [v["passed"] for v in result["comparisons"][0]["verdicts"]] == [True, False]
    assert not result["passed"]
    assert len(result["comparisons"][0]["pairs"]) == 2
    assert "FAIL" in table.table([comparison])


def test_prompt_lengths_are_spread_and_start_with_the_longest() -> None:
    """The shortest of several is half of the longest."""
    assert lengths_of(1, 512) == [512]
    assert lengths_of(4, 512) == [512, 427, 342, 256]


def test_an_opponent_that_is_unknown_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing was compared then, and "all bars passed" would be no figure."""
    with pytest.raises(SystemExit) as ended:
        overhead.main(["--against", "stream_generate"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--against: must be plain or server, got 'stream_generate'" in said
