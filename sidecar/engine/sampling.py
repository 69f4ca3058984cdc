"""
SamplingParams -> a sampler and logits processors for one row of a batch.

Order, as in mlx-lm: penalties and bias on logits, log-probabilities, top-p, min-p,
top-k, temperature, draw. Filters act on untempered probabilities.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    greedy_sampler,
    make_logits_processors,
)

from sidecar.config import GenerationConfig
from sidecar.core.requests import SamplingParams

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

# What a request gets when neither it, the user nor the model says otherwise.
_TEMPERATURE, _TOP_P, _TOP_K, _MIN_P, _REPETITION = 0.1, 0.9, 40, 0.05, 1.08
_COLDEST = 0.01  # below this the distribution is a point anyway


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling with every value settled; temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    context_size: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int

    @property
    def has_processors(self) -> bool:
        """Whether logits are changed, so that a history of tokens is needed."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


# The same object for every greedy row, so that a batch samples in one call.
greedy: Sampler = greedy_sampler


def settle(
    asked: SamplingParams, user: GenerationConfig, model: dict[str, Any] | None
) -> Sampling:
    """
    Settle each value: the request's, the user's default, the model's, ours.

    Args:
        model: the model's generation_config.json, None if it has none.
    """
    own = model or {}
    temperature = _first(
        asked.temperature,
        user.temperature,
        0.0 if own.get("do_sample") is False else own.get("temperature"),
        _TEMPERATURE,
    )
    penalty = 1.0 if model is not None else _REPETITION
    seed = asked.seed if asked.seed is not None else secrets.randbits(63)
    return Sampling(
        temperature=0.0 if temperature < _COLDEST else float(temperature),
        top_p=float(_first(asked.top_p, user.top_p, own.get("top_p"), _TOP_P)),
        top_k=int(_first(asked.top_k, user.top_k, own.get("top_k"), _TOP_K)),
        min_p=float(_first(asked.min_p, user.min_p, own.get("min_p"), _MIN_P)),
        repetition_penalty=float(
            _first(
                asked.repetition_penalty,
                user.repetition_penalty,
                own.get("repetition_penalty"),
                penalty,
            )
        ),
        context_size=asked.repetition_context_size or user.repetition_context_size,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=asked.logit_bias,
        seed=seed,
    )


def make_row_sampler(sampling: Sampling, vocab_size: int, choice: int) -> Sampler:
    """
    A sampler with a random key of its own.

    mlx-lm's samplers draw from the global state, which all rows share; a key split
    once a token makes equal seeds give equal tokens, alone or in a batch. Greedy rows
    all get the same function, which lets the batch sample them in one call.
    """
    if sampling.temperature == 0.0:
        return greedy
    key = mx.random.key((sampling.seed + choice) & 0xFFFF_FFFF_FFFF_FFFF)
    top_p, min_p, top_k = sampling.top_p, sampling.min_p, sampling.top_k

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal key
        key, draw = mx.random.split(key)
        with _no_kernel_per_value():
            if 0.0 < top_p < 1.0:
                logprobs = apply_top_p(logprobs, top_p)
            if min_p > 0.0:
                logprobs = apply_min_p(logprobs, min_p)
            if 0 < top_k < vocab_size:
                logprobs = apply_top_k(logprobs, top_k)
        return mx.random.categorical(logprobs * (1.0 / sampling.temperature), key=draw)

    return sample


@contextlib.contextmanager
def _no_kernel_per_value() -> Iterator[None]:
    """On the CPU mx.compile would call a C++ compiler for each new top-p."""
    if mx.default_device() != mx.cpu:
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def make_row_processors(sampling: Sampling) -> list[LogitsProcessor]:
    """Bias and penalties over the last `context_size` tokens of prompt and output."""
    size = sampling.context_size
    penalty = sampling.repetition_penalty
    processors: list[LogitsProcessor] = make_logits_processors(
        logit_bias=dict(sampling.logit_bias) or None,
        repetition_penalty=None if penalty == 1.0 else penalty,
        repetition_context_size=size,
        presence_penalty=sampling.presence_penalty or None,
        presence_context_size=size,
        frequency_penalty=sampling.frequency_penalty or None,
        frequency_context_size=size,
    )
    return processors


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
