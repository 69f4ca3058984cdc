"""How many tokens are drafted, by what a call costs and how many are taken."""

import pytest

from sidecar.engine.speculation.draft_length import LENGTHS, DraftLength, DraftPrices


def priced(step_s: float, **calls_s: float) -> DraftPrices:
    """Prices as measured, several times each."""
    prices = DraftPrices()
    for _ in range(3):
        prices.stepped(step_s)
        for length, seconds in calls_s.items():
            prices.called(int(length[1:]), seconds)
    return prices


def test_the_length_with_the_best_ratio_is_chosen() -> None:
    flat = priced(0.010, n2=0.017, n4=0.017, n8=0.017, n16=0.017)
    assert DraftLength(flat).choose() == 16
    steep = priced(0.010, n2=0.014, n4=0.030, n8=0.060, n16=0.120)
    assert DraftLength(steep).choose() == 2
    dear = priced(0.010, n2=0.050, n4=0.060, n8=0.080, n16=0.120)
    assert DraftLength(dear).choose() == 0


def test_what_is_never_taken_is_not_drafted_for_a_while() -> None:
    length = DraftLength(priced(0.010, n2=0.017, n4=0.017, n8=0.017, n16=0.017))
    length.note(16, 0)
    length.note(16, 0)
    assert [length.choose() for _ in range(64)] == [0] * 64
    assert length.choose() > 0


@pytest.mark.parametrize("is_still_dear", [False, True])
def test_what_was_dear_is_measured_anew_after_a_while(*, is_still_dear: bool) -> None:
    """As where another client's calls, or a busy moment, cost ten times as much."""
    prices = priced(0.010, n2=0.150, n4=0.155, n8=0.160, n16=0.170)
    length = DraftLength(prices)
    for _ in range(512):
        assert length.choose() == 0
        prices.stepped(0.010)
    assert length.choose() == LENGTHS[0]
    prices.called(2, 0.150 if is_still_dear else 0.015)
    if is_still_dear:
        assert length.choose() == 0
        assert prices.of(16) > 10
    else:
        assert prices.of(2) == pytest.approx(1.5)
        assert prices.of(16) == pytest.approx(1.7)
        assert length.choose() >= 8


def test_one_outlier_does_not_decide() -> None:
    prices = priced(0.010, n16=0.017)
    prices.called(16, 5.0)
    assert prices.of(16) < 3
