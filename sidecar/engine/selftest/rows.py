"""Rows of the engine's own decode batches that are made to say given tokens."""

from collections.abc import Generator, Sequence
from typing import TypeVar

import mlx.core as mx

from sidecar.config.settings import GenerationConfig
from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.core.requests import SamplingParams
from sidecar.engine.decode_batches import DecodeBatches
from sidecar.engine.job import JobSpec
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.sampling import LogitsProcessor, settle
from sidecar.engine.step_ahead import AheadLimit
from sidecar.kv.kv_layers import KVLayers

R = TypeVar("R")
# A computation that lets others go on at each yield: running streams.
Steps = Generator[None, None, R]

GREEDY = settle(SamplingParams(temperature=0.0), GenerationConfig(), {})


def forced_tokens(model: LoadedModel, count: int) -> list[int]:
    """Ordinary tokens, as many as are to be said."""
    size = min(model.vocab_size, 997)
    return [(11 * i + 5) % size for i in range(count)]


def forcing(forced: Sequence[int], seen: list[mx.array]) -> LogitsProcessor:
    """
    What makes a row say given tokens, and keeps the logits of each in a list.

    A step that is described in vain is described again: the list has the last one's.
    """

    def force(said: mx.array, logits: mx.array) -> mx.array:
        place = said.shape[0] - 1  # behind the prompt's last token
        del seen[place:]
        seen.append(logits)
        wanted = forced[min(place, len(forced) - 1)]
        chosen = mx.arange(logits.shape[-1]) == wanted
        # Zero, and yet computed from the logits: whoever waits for it has those.
        zero = mx.where(mx.isnan(logits), 0.0, 0.0).astype(logits.dtype)
        return mx.where(chosen, zero, -mx.inf)

    return force


class Rows:
    """
    Sequences in the engine's own decode batches, each made to say given tokens.

    Args:
        sequences: a prompt each, with the caches of all of it but its last token.
        goes_ahead: whether steps are described before their turn.
    """

    def __init__(
        self,
        model: LoadedModel,
        sequences: Sequence[tuple[ModelIds, KVLayers]],
        *,
        goes_ahead: bool = False,
    ) -> None:
        self._model = model
        self._sequences = sequences
        self._goes_ahead = goes_ahead
        self.ahead_limit = AheadLimit()
        self.logits: list[list[mx.array]] = [[] for _ in sequences]
        self.caches: list[KVLayers] = [[] for _ in sequences]

    def run(self, forced: Sequence[int], joins_after: Sequence[int]) -> Steps[None]:
        """
        Decode until all have said `forced`, those that joined later a little less.

        Args:
            joins_after: the step before which each joins, ascending.
        """
        fitting, num_steps, waiting = DecodeBatches(self._model), 0, list(joins_after)
        fitting.may_go_ahead(self._goes_ahead)
        fitting.tests_go_ahead = fitting.begins_ahead = self._goes_ahead
        self.ahead_limit, num_ended = fitting.ahead_limit, 0
        while num_ended < len(self._sequences):
            while waiting and waiting[0] <= num_steps:
                self._join(fitting, len(joins_after) - len(waiting), forced)
                waiting.pop(0)
            for response in fitting.next():
                if response.finish_reason is not None:
                    self.caches[response.uid] = response.prompt_cache
                    num_ended += 1
            num_steps += 1
            yield

    def _join(self, fitting: DecodeBatches, row: int, forced: Sequence[int]) -> None:
        ids, cache = self._sequences[row]
        seen = self.logits[row]

        spec = JobSpec(ModelPrompt(ids), GREEDY, len(forced))
        force = forcing(forced, seen)
        single = fitting.begin(row, spec, cache, processors=[force])
        fitting.join(row, single, len(ids))
