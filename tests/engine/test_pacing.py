"""How long a chunk may be beside running streams, and what they get between two."""

import pytest

from sidecar.engine.pacing import PrefillPacer, PrefillRate


def pacer() -> PrefillPacer:
    made = PrefillPacer(2048, 0.5)
    made.prefilled(1024, 1.024)  # a millisecond a token
    return made


def test_alone_a_chunk_is_at_max_a_whole_step() -> None:
    fast = PrefillPacer(2048, 0.5)
    fast.prefilled(1024, 0.1)
    assert fast.chunk_len(beside_streams=False) == 2048


def test_alone_a_slow_models_chunk_is_cut_to_twice_the_target() -> None:
    """Who was cancelled in its prefill, or comes next, waits for the chunk's end."""
    assert pacer().chunk_len(beside_streams=False) == 960


def test_beside_streams_it_is_what_the_target_allows() -> None:
    assert pacer().chunk_len(beside_streams=True) == 448


def test_never_less_than_64_tokens() -> None:
    """However slow the model: else it would never get through."""
    slow = pacer()
    slow.prefilled(64, 64.0)
    assert slow.chunk_len(beside_streams=True) == 64


def test_before_the_first_measure_it_is_careful() -> None:
    assert PrefillPacer(2048, 0.5).chunk_len(beside_streams=True) == 64


def test_a_slower_rate_is_believed_at_once_a_faster_one_by_and_by() -> None:
    paced = pacer()
    paced.prefilled(500, 1.0)
    assert paced.chunk_len(beside_streams=True) == 192  # at 2 ms a token
    paced.prefilled(500, 0.5)
    assert paced.chunk_len(beside_streams=True) == 320  # at 1.5 ms


def test_a_short_rest_says_nothing_about_the_rate() -> None:
    """Two tokens take as long as twenty."""
    paced = pacer()
    paced.prefilled(2, 0.1)
    assert paced.chunk_len(beside_streams=True) == 448
    assert paced.rate.seconds == 0.001


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_stalled_chunk_does_not_move_a_forecast() -> None:
    rate = PrefillRate(Clock())
    assert rate.seconds == 0.0
    for seconds in (0.001, 0.002, 0.001, 0.06):
        rate.measured(seconds)
    assert rate.seconds == 0.002
    rate.measured(0.05)
    assert rate.seconds == 0.05


def test_refused_prompts_measure_nothing_so_a_slow_spell_is_forgotten() -> None:
    """Else large prompts were refused, by what the last few took, for good."""
    clock = Clock()
    rate = PrefillRate(clock)
    for seconds in (*[0.001] * 9, *[0.06] * 4):
        rate.measured(seconds)
    assert rate.seconds == 0.06
    clock.now = 29.0
    assert rate.seconds == 0.06
    clock.now = 31.0
    assert rate.seconds == 0.001
    rate.measured(0.06)  # it is still slow: the next is refused again
    assert rate.seconds == 0.06


def test_a_faster_spell_is_believed_however_old() -> None:
    clock = Clock()
    rate = PrefillRate(clock)
    for seconds in (0.06, 0.06, 0.06, 0.001, 0.001, 0.001):
        rate.measured(seconds)
    clock.now = 99.0
    assert rate.seconds == 0.001


def test_a_step_counts_in_full_while_no_prefill_slows_it() -> None:
    paced = PrefillPacer(2048, 0.5)
    assert paced.decoded(0.01, is_free=True) == 0.01
    assert paced.decode_step_s == 0.01


def test_steps_slower_than_without_a_prefill_are_as_many() -> None:
    """Else who is slowed down by the newcomer would also get fewer of them."""
    paced = PrefillPacer(2048, 0.5)
    for seconds in (0.01, 0.01, 0.02, *[0.01] * 200):
        paced.decoded(seconds, is_free=True)
    counted = paced.decoded(0.013, is_free=False)
    assert counted == pytest.approx(0.01, rel=0.02)


def test_a_step_that_got_much_slower_does_not_starve_the_newcomer() -> None:
    """More streams, not the prefill, made it so."""
    paced = PrefillPacer(2048, 0.5)
    paced.decoded(0.01, is_free=True)
    assert paced.decoded(0.1, is_free=False) == 0.1 / 1.6
