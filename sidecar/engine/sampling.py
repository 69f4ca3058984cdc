"""
SamplingParams -> a sampler and logits processors for one row of a batch.

Order, as in mlx-lm: penalties and bias on logits, log-probabilities, top-p, min-p,
top-k, temperature, draw. Filters act on untempered probabilities.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors

from sidecar.core.requests import SamplingParams

if TYPE_CHECKING:
    from sidecar.config.settings import GenerationConfig

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

# What a request gets when neither it, the user nor the model says otherwise.
_TEMPERATURE, _TOP_P, _TOP_K, _MIN_P, _REPETITION = 0.1, 0.9, 40, 0.05, 1.08
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
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
    asked: SamplingParams, user: "GenerationConfig", model: dict[str, Any] | None
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
    A sampler with randomness of its own; greedy rows all get the same function.

    mlx-lm's samplers draw from the global state, which all rows share; a key made
    from the seed and the number of the token makes equal seeds give equal tokens,
    alone or in a batch.
    """
    if sampling.temperature == 0.0:
        return greedy
    return RowSampler(sampling, vocab_size, choice)


class RowSampler:
    """How one row's tokens are drawn; a Drawing draws for all rows of a batch."""

    def __init__(self, sampling: Sampling, vocab_size: int, choice: int) -> None:
        self.scale = 1.0 / sampling.temperature
        self.top_p = sampling.top_p if 0.0 < sampling.top_p < 1.0 else math.inf
        top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else vocab_size
        self.num_cut = vocab_size - top_k
        self.log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        self._seed = sampling.seed + choice
        self.num_drawn = 0

    @property
    def needs_order(self) -> bool:
        """Whether its filters ask which tokens are the likeliest."""
        return self.num_cut > 0 or self.top_p < math.inf

    def next_key(self) -> tuple[int, int]:
        """The key of its next draw."""
        self.num_drawn += 1
        mixed = _mixed(self._seed + self.num_drawn * _GOLDEN)
        return mixed >> 32, mixed & 0xFFFF_FFFF

    def give_back(self, num_keys: int) -> None:
        """Draw with the last keys once more: what they drew is not said."""
        self.num_drawn -= num_keys

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw for a batch of this row alone."""
        return Drawing([self])(logprobs)


class Drawing:
    """
    Draws the next token of each row of a batch in one pass over all of them.

    The settings are arrays, not constants: a compiled kernel would be made anew for
    each new top-p, which takes seconds on CUDA and holds up all streams.
    """

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self._samplers = list(samplers)
        rows = [s for s in samplers if isinstance(s, RowSampler)]
        self._is_drawn = None
        if len(rows) < len(self._samplers):
            drawn = [isinstance(s, RowSampler) for s in self._samplers]
            self._is_drawn = mx.array(drawn)
        self._asks = (
            any(row.needs_order for row in rows),
            any(row.log_min_p > -math.inf for row in rows),
        )
        self._columns = {
            "scale": self._column("scale", 1.0),
            "top_p": self._column("top_p", math.inf),
            "num_cut": self._column("num_cut", 0, mx.int32),
            "log_min_p": self._column("log_min_p", -math.inf),
        }

    def serves(self, samplers: Sequence[Sampler]) -> bool:
        """Whether it was made for these."""
        return self._samplers == samplers

    def __call__(self, logprobs: mx.array) -> mx.array:
        """One token id a row."""
        rows = [s for s in self._samplers if isinstance(s, RowSampler)]
        if not rows:
            return greedy(logprobs)
        keys = [
            s.next_key() if isinstance(s, RowSampler) else (0, 0)
            for s in self._samplers
        ]
        draw = _draw if mx.default_device() == mx.cpu else _compiled_draw
        drawn = draw(logprobs, mx.array(keys, mx.uint32), self._columns, *self._asks)
        if self._is_drawn is None:
            return drawn
        return mx.where(self._is_drawn, drawn, greedy(logprobs))

    def _column(
        self, name: str, otherwise: float, dtype: mx.Dtype = mx.float32
    ) -> mx.array:
        values = [[getattr(s, name, otherwise)] for s in self._samplers]
        return mx.array(values, dtype)


def _draw(
    logprobs: mx.array,
    keys: mx.array,
    columns: dict[str, mx.array],
    needs_order: bool,
    cuts_tail: bool,
) -> mx.array:
    """
    One token id a row by the Gumbel-max trick: the likeliest after noise is a draw.

    Top-p, min-p, then top-k: each removes the least likely of what is left.

    Args:
        logprobs: rows x vocabulary. keys: rows x 2.
        columns: each setting, rows x 1.
    """
    logprobs = logprobs.astype(mx.float32)
    floors = []
    if needs_order:
        ordered = mx.sort(logprobs, axis=-1)
        mass = mx.exp(ordered)
        above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
        total = above[..., :1] + mass[..., :1]
        dropped = (above >= columns["top_p"] * total).sum(axis=-1, keepdims=True)
        first = mx.maximum(dropped, columns["num_cut"])
        floors.append(mx.take_along_axis(ordered, first, axis=-1))
    if cuts_tail:
        best = mx.max(logprobs, axis=-1, keepdims=True)
        floors.append(best + columns["log_min_p"])
    for floor in floors:
        logprobs = mx.where(logprobs < floor, -mx.inf, logprobs)
    size = logprobs.shape[-1:]
    noise = mx.vmap(lambda key: mx.random.gumbel(size, key=key))(keys)
    return mx.argmax(logprobs * columns["scale"] + noise, axis=-1)


# On a GPU the host's time for each operation counts: compiled, a dozen are one. On the
# CPU that would take seconds of a C++ compiler at first use, and gain nothing.
_compiled_draw = mx.compile(_draw)


def _mixed(number: int) -> int:
    """Steele and others' splitmix64: near numbers become far ones."""
    number &= _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


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
