"""The restore bench, at a small size: what it measures, not how fast."""

from bench.restore import MOST_COPIES, Bench, Result, main
from tests.support.sequences import on_gpu


@on_gpu
def test_lending_gives_the_stored_arrays_and_allocates_nothing() -> None:
    result = Bench(layers=2, tokens=512).run(rounds=2)
    assert result.num_bytes == 2 * 2 * 8 * 512 * 128 * 4
    assert result.same_arrays
    assert result.lent_bytes < 4096
    assert min(result.bare_copy_s, result.copied_s, result.lent_s) > 0


@on_gpu
def test_the_report_names_both_bars() -> None:
    lines: list[str] = []
    code = main(["--layers", "1", "--tokens", "256", "--rounds", "1"], lines.append)
    assert code in (0, 1)
    assert f"(at most {MOST_COPIES})" in lines[2]
    assert "the same arrays" in lines[3]


def test_a_missed_bar_is_no_pass() -> None:
    good = Result(1, 1.0, 1.4, 0.1, 0, True)
    assert good.is_good
    assert not Result(1, 1.0, 1.6, 0.1, 0, True).is_good
    assert not Result(1, 1.0, 1.4, 0.1, 1 << 20, True).is_good
    assert not Result(1, 1.0, 1.4, 0.1, 0, False).is_good
