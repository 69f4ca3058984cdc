"""native-features.md s2: penalties, filters, guards, seeds."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.config.settings import GenerationConfig
from sidecar.core.requests import SamplingParams
from sidecar.engine.sampling import (
    Drawing,
    Sampling,
    _compiled_draw,
    greedy,
    make_row_processors,
    make_row_sampler,
    settle,
)

VOCAB = 8


def sampling(**changes: Any) -> Sampling:
    """Everything off, temperature 1, but for the changes."""
    plain: dict[str, Any] = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "context_size": 256, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "logit_bias": (), "seed": 1,
    }  # fmt: skip
    return Sampling(**{**plain, **changes})


def process(settings: Sampling, history: list[int], logits: list[float]) -> list[float]:
    row = mx.array([logits])
    for processor in make_row_processors(settings):
        row = processor(mx.array(history), row)
    return list(row.tolist()[0])


def drawn(settings: Sampling, probabilities: list[float], count: int = 400) -> set[int]:
    """The tokens that come up when this distribution is drawn from often."""
    sample = make_row_sampler(settings, len(probabilities), 0)
    logprobs = mx.log(mx.array([probabilities]))
    return {int(sample(logprobs).item()) for _ in range(count)}


def test_penalty_example() -> None:
    """N2: logits [2, -2, 1], history {0, 1}, r = 2 -> [1, -4, 1]."""
    settings = sampling(repetition_penalty=2.0)
    assert process(settings, [0, 1], [2, -2, 1]) == [1, -4, 1]


def test_repetition_counts_a_token_once() -> None:
    """Distinct tokens: saying one thrice penalises it once."""
    settings = sampling(repetition_penalty=2.0)
    assert process(settings, [0, 0, 0], [2, -2, 1]) == [1, -2, 1]


def test_the_window_is_the_last_tokens_only() -> None:
    """What stands before the last `context_size` tokens is forgotten."""
    settings = sampling(repetition_penalty=2.0, context_size=2)
    assert process(settings, [0, 1, 2], [2, 2, 2]) == [2, 1, 1]


def test_presence_and_frequency() -> None:
    """Presence subtracts once, frequency once per occurrence."""
    history, logits = [0, 0, 1], [5.0, 5.0, 5.0]
    assert process(sampling(presence_penalty=1.0), history, logits) == [4, 4, 5]
    assert process(sampling(frequency_penalty=1.0), history, logits) == [3, 4, 5]


def test_logit_bias_is_added() -> None:
    """Each named token's logit moves by its bias."""
    settings = sampling(logit_bias=((0, -5.0), (2, 1.5)))
    assert process(settings, [], [1.0, 1.0, 1.0]) == [-4, 1, 2.5]


def test_without_settings_there_are_no_processors() -> None:
    """r = 1, penalties 0, no bias: logits are not touched and no history is kept."""
    assert make_row_processors(sampling()) == []
    assert not sampling().has_processors
    for change in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": ((1, 1.0),)},
    ):
        assert sampling(**change).has_processors


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_p": 0.0}, {0, 1, 2, 3}),
        ({"min_p": 0.39}, {0, 1}),
        ({"min_p": 0.61}, {0}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 0.81, "top_k": 2}, {0, 1}),
    ],
)
def test_filters_keep_what_they_should(
    changes: dict[str, Any], expected: set[int]
) -> None:
    """Of 50, 30, 12 and 8 %: the smallest sets; limits of 0 and 1 mean off."""
    assert drawn(sampling(**changes), [0.5, 0.3, 0.12, 0.08]) == expected


def test_filters_act_before_the_temperature() -> None:
    """N1: a high temperature flattens what is left, and brings nothing back."""
    hot = sampling(temperature=50.0, top_p=0.51)
    assert drawn(hot, [0.5, 0.3, 0.12, 0.08]) == {0, 1}
    hot = sampling(temperature=50.0, min_p=0.39)
    assert drawn(hot, [0.5, 0.3, 0.12, 0.08]) == {0, 1}


def test_order_of_filters() -> None:
    """N1: top-p comes first: it sees the whole mass, not what others left."""
    probabilities = [0.3, 0.25, 0.2, 0.16, 0.09]
    # top-k first would leave 55 %, of which token 0 alone is more than half.
    assert drawn(sampling(top_p=0.5, top_k=2), probabilities) == {0, 1}
    # min-p first would leave 91 %, of which tokens 0 to 2 are more than 0.8.
    assert drawn(sampling(top_p=0.8, min_p=0.5), probabilities) == {0, 1, 2, 3}


def test_temperature_shapes_the_draw() -> None:
    """At 2 the odds of 9 to 1 become 3 to 1; within sampling error."""
    sample = make_row_sampler(sampling(temperature=2.0), 2, 0)
    logprobs = mx.log(mx.array([[0.9, 0.1]]))
    draws = [int(sample(logprobs).item()) for _ in range(3000)]
    assert np.mean(draws) == pytest.approx(0.25, abs=0.03)


def test_greedy_is_one_shared_function() -> None:
    """Temperature 0 is argmax with all filters off, the same object for all rows."""
    cold = sampling(temperature=0.0, top_k=1, top_p=0.1)
    assert make_row_sampler(cold, VOCAB, 0) is make_row_sampler(cold, VOCAB, 3)
    assert make_row_sampler(cold, VOCAB, 0) is greedy
    assert greedy(mx.array([[0.1, 0.7, 0.2]])).item() == 1


def sequence(seed: int, choice: int = 0, count: int = 30) -> list[int]:
    sample = make_row_sampler(sampling(seed=seed), VOCAB, choice)
    flat = mx.zeros((1, VOCAB))
    return [int(sample(flat).item()) for _ in range(count)]


def test_a_seed_gives_the_same_draws_whatever_happens_beside_it() -> None:
    """The key is the row's own: other draws and the global state do not matter."""
    expected = sequence(7)
    mx.random.seed(99)
    mx.random.uniform(shape=(5,))
    assert sequence(7) == expected
    sample = make_row_sampler(sampling(seed=7), VOCAB, 0)
    other = make_row_sampler(sampling(seed=8), VOCAB, 0)
    flat = mx.zeros((1, VOCAB))
    mixed = []
    for _ in range(30):
        mixed.append(int(sample(flat).item()))
        other(flat)
    assert mixed == expected


def test_other_seeds_and_other_choices_differ() -> None:
    """n answers to one request are not one answer n times."""
    assert len({tuple(sequence(seed)) for seed in range(5)}) == 5
    assert len({tuple(sequence(7, choice)) for choice in range(4)}) == 4


@given(seed=st.integers(-(1 << 63), (1 << 64) - 1), choice=st.integers(0, 127))
def test_any_seed_of_the_protocol_works(seed: int, choice: int) -> None:
    """The whole range that a request may send makes a sampler."""
    assert 0 <= sequence(seed, choice, 1)[0] < VOCAB


USER = GenerationConfig()


def test_defaults_when_nobody_says() -> None:
    """Without a generation_config: the table's values."""
    settled = settle(SamplingParams(), USER, None)
    assert (settled.temperature, settled.top_p, settled.top_k) == (0.1, 0.9, 40)
    assert (settled.min_p, settled.repetition_penalty) == (0.05, 1.08)
    assert settled.context_size == 256


def test_the_request_beats_the_user_beats_the_model() -> None:
    """Each source wins over the next, for every value."""
    model = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.3,
             "repetition_penalty": 1.2}  # fmt: skip
    user = GenerationConfig(
        temperature=0.6, top_p=0.7, top_k=10, min_p=0.2, repetition_penalty=1.3
    )
    asked = SamplingParams(
        temperature=0.5, top_p=0.6, top_k=5, min_p=0.1, repetition_penalty=1.4
    )

    def values(s: Sampling) -> tuple[float, ...]:
        return (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty)

    plain = SamplingParams()
    assert values(settle(plain, USER, model)) == (0.7, 0.8, 20, 0.3, 1.2)
    assert values(settle(plain, user, model)) == (0.6, 0.7, 10, 0.2, 1.3)
    assert values(settle(asked, user, model)) == (0.5, 0.6, 5, 0.1, 1.4)


@pytest.mark.parametrize(
    ("asked", "expected"), [(0.0, 0.0), (0.009, 0.0), (0.01, 0.01), (1.5, 1.5)]
)
def test_a_temperature_below_a_hundredth_is_greedy(
    asked: float, expected: float
) -> None:
    """Below 0.01 counts as 0."""
    assert settle(SamplingParams(temperature=asked), USER, None).temperature == expected


def test_a_model_that_does_not_sample_is_greedy() -> None:
    """do_sample false beats the temperature beside it; the request still wins."""
    model = {"do_sample": False, "temperature": 0.7}
    assert settle(SamplingParams(), USER, model).temperature == 0.0
    assert settle(SamplingParams(temperature=0.4), USER, model).temperature == 0.4


def test_models_with_a_config_get_no_hidden_penalty() -> None:
    """1.08 is only for models that ship no generation_config at all."""
    assert settle(SamplingParams(), USER, {}).repetition_penalty == 1.0
    assert settle(SamplingParams(), USER, None).repetition_penalty == 1.08


def test_requests_without_a_seed_get_different_ones() -> None:
    """Nobody asked for equal answers."""
    seeds = {settle(SamplingParams(), USER, None).seed for _ in range(5)}
    assert len(seeds) == 5
    assert settle(SamplingParams(seed=0), USER, None).seed == 0


def test_rows_of_a_batch_draw_what_they_draw_alone() -> None:
    """Other filters, seeds and greedy rows beside it change nothing."""
    kinds = [
        sampling(seed=3, top_p=0.9), sampling(temperature=0.0), sampling(seed=4),
        sampling(seed=5, top_k=2, temperature=2.0), sampling(seed=6, min_p=0.3),
    ]  # fmt: skip
    chances = mx.random.uniform(shape=(20, len(kinds), VOCAB), key=mx.random.key(1))
    steps = [mx.log(row / row.sum(-1, keepdims=True)) for row in chances]
    together = Drawing([make_row_sampler(kind, VOCAB, 0) for kind in kinds])
    drawn_together = [together(step).tolist() for step in steps]
    for row, kind in enumerate(kinds):
        sample = make_row_sampler(kind, VOCAB, 0)
        alone = [sample(step[row : row + 1]).item() for step in steps]
        assert alone == [tokens[row] for tokens in drawn_together]
    assert len({tuple(tokens) for tokens in drawn_together}) > 5


def test_compiled_as_on_a_gpu_it_draws_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One compiled function serves every value and every number of rows."""
    kinds = [sampling(seed=3, top_p=0.9), sampling(seed=4, top_k=3, min_p=0.1),
             sampling(temperature=0.0), sampling(seed=5, temperature=3.0)]  # fmt: skip
    chances = mx.random.uniform(shape=(9, len(kinds), VOCAB), key=mx.random.key(2))

    def all_drawn() -> list[list[Any]]:
        rows = [make_row_sampler(kind, VOCAB, 0) for kind in kinds]
        together, alone = Drawing(rows[:3]), Drawing(rows[3:])
        return [
            [*together(step[:3]).tolist(), *alone(step[3:]).tolist()]
            for step in mx.log(chances)
        ]

    plain = all_drawn()
    monkeypatch.setattr("sidecar.engine.sampling._draw", _compiled_draw)
    assert all_drawn() == plain


def test_no_value_of_a_filter_is_compiled_into_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA a new top-p would cost every stream seconds."""

    def compiling(*_arguments: Any, **_named: Any) -> None:
        raise AssertionError("a kernel is made for these values")

    monkeypatch.setattr(mx, "compile", compiling)
    for name in ("apply_top_p", "apply_top_k", "apply_min_p"):
        monkeypatch.setattr(f"mlx_lm.sample_utils.{name}", compiling)
    kind = sampling(top_p=0.77, top_k=3, min_p=0.01)
    sample = make_row_sampler(kind, VOCAB, 0)
    assert 0 <= sample(mx.log(mx.full((1, VOCAB), 1 / VOCAB))).item() < VOCAB
