"""
What a warm turn costs the GPU thread beside the model, and whether it grows.

    python -m bench kept [--kept 24 200] [--rounds 5]

A store keeps so many conversations, of four layers and 4,000 tokens each, that began
with the same 1,000. One of them goes on: its KV is looked for, lent, shown to others
and given back, as the scheduler has it done. No model runs. Printed is the median time
of a turn, and its ratio to that with the first number of conversations; the numbers
take turns.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from bench.options import positive
from sidecar.core.conversation import Conversation
from sidecar.core.prompt import ModelIds
from sidecar.kv.eviction import KVBudget, Limits
from sidecar.kv.prefix_store import PrefixStore

_NUM_LAYERS, _NUM_TOKENS, _NUM_SHARED = 4, 4_000, 1_000
_TURNS = 20  # of a round
_NEW = 40  # tokens of a turn


@dataclass(slots=True)
class _Talk:
    """One conversation, and what its store is asked for it."""

    store: PrefixStore
    conversation: Conversation
    ids: ModelIds

    def turn(self, number: int) -> float:
        """Go on with it; seconds without what computes KV."""
        new = tuple(10_000_000 + number * _NEW + i for i in range(_NEW))
        prompt = ModelIds((*self.ids, *new))
        asked = replace(self.conversation, generation=self.store.generation)
        started = time.perf_counter()
        restored = self.store.restore(prompt, asked)
        seconds = time.perf_counter() - started
        _compute(restored.cache, len(prompt) - restored.cached_len)
        restored.lease.live = lambda: restored.cache
        started = time.perf_counter()
        self.store.register(restored.lease, prompt)
        self.store.commit_kv(restored.lease, prompt, restored.cache, {})
        seconds += time.perf_counter() - started
        self.ids = prompt
        return seconds


def main(argv: list[str]) -> int:
    """Exit code 0; the table goes to standard output."""
    parser = argparse.ArgumentParser(prog="python -m bench kept", description=__doc__)
    parser.add_argument("--kept", type=positive, nargs="+", default=[24, 200])
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args(argv)
    talks = {kept: _filled(kept) for kept in options.kept}
    seconds: dict[int, list[float]] = {kept: [] for kept in talks}
    for number in range(options.rounds * _TURNS):
        for kept, talk in talks.items():
            seconds[kept].append(talk.turn(number))
    first = statistics.median(seconds[options.kept[0]])
    sys.stdout.write(f"{'conversations kept':<20}{'ms a turn':>10}{'ratio':>7}\n")
    for kept, each in seconds.items():
        median = statistics.median(each)
        sys.stdout.write(f"{kept:<20}{1e3 * median:>10.3f}{median / first:>7.2f}\n")
    return 0


def _filled(num_kept: int) -> _Talk:
    """A store that keeps so many; the last of them."""
    limits = Limits(max_bytes=1 << 40, max_leaves=num_kept, ttl_s=1800.0)
    store = PrefixStore(KVBudget(limits), _new_cache)
    for number in range(num_kept):
        begin = number * 100_000
        own = range(begin + _NUM_SHARED, begin + _NUM_TOKENS)
        talk = _Talk(store, Conversation(None, f"s{number}"), _prompt(own))
        talk.turn(-1 - number)
    return talk


def _prompt(own: range) -> ModelIds:
    return ModelIds((*range(_NUM_SHARED), *own))


def _new_cache() -> list[KVCache]:
    return [KVCache() for _ in range(_NUM_LAYERS)]


def _compute(cache: list[KVCache], num_tokens: int) -> None:
    """Stand in for the model: KV of zeros."""
    for layer in cache:
        layer.update_and_fetch(*(mx.zeros((1, 1, num_tokens, 8)) for _ in range(2)))
    mx.eval([layer.state for layer in cache])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
