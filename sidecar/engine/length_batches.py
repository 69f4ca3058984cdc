"""
Decode batches by length class, taking turns step by step.

mlx-lm pads every row of a batch to its longest: a 100-token row that joins one of 32k
tokens doubles its KV and slows both. But a batch of its own reads all the weights once
more for every token. So a row joins a batch where the padding is small beside the
weights, else it gets a batch of its own.
"""

from collections.abc import Sequence
from typing import Any

from sidecar.engine.decode_batch import DecodeBatch, empty_batch
from sidecar.engine.loader import LoadedModel
from sidecar.kv.kv_layers import KVLayers, token_nbytes

_MOST_PADDING = 1 / 4  # bytes of padding over bytes of weights


class Lanes:
    """The decode batches of one model. GPU thread only."""

    def __init__(self, model: LoadedModel) -> None:
        self.may_batch = True  # False: each row decodes in a batch of its own
        self._model = model
        self._batches: list[DecodeBatch] = []
        self._lengths: dict[int, int] = {}

    @property
    def has_rows(self) -> bool:
        """Whether any sequence is left."""
        return bool(self._batches)

    def join(self, uid: int, single: DecodeBatch, length: int) -> None:
        """Add a batch of one sequence with `length` tokens to the fitting batch."""
        most = _MOST_PADDING * self._model.num_bytes / token_nbytes(single.prompt_cache)
        lanes = [b for b in self._batches if self._padding(b, length) <= most]
        if self._model.quantization or not self.may_batch:
            lanes = []  # mlx-lm's batch caches hold no quantised KV
        if lanes:
            min(lanes, key=lambda b: self._padding(b, length)).extend(single)
        else:
            batch = empty_batch(self._model)
            batch.extend(single)
            self._batches.append(batch)
        self._lengths[uid] = length

    def next(self) -> list[Any]:
        """
        One step of the batch whose turn it is: mlx-lm's responses.

        If it raises, `drop_current` tells which sequences are lost.
        """
        if self._model.quantization:
            self._model.quantization.apply(self._batches[0].prompt_cache)
        responses: list[Any] = self._batches[0].next()
        for response in responses:
            self._lengths[response.uid] += 1
            if response.finish_reason is not None:
                del self._lengths[response.uid]
        self._batches.append(self._batches.pop(0))
        self._drop_empty()
        return responses

    def drop_current(self) -> list[int]:
        """Forget the batch whose turn it is; the sequences that were in it."""
        lost = list(self._batches.pop(0).uids) if self._batches else []
        for uid in lost:
            self._lengths.pop(uid, None)
        return lost

    def extract(self, uid: int) -> KVLayers:
        """The caches of a sequence."""
        return self._of(uid).extract_row(uid)

    def remove(self, uids: Sequence[int]) -> None:
        """Take sequences out."""
        for batch in self._batches:
            keep = [i for i, uid in enumerate(batch.uids) if uid not in uids]
            if len(keep) < len(batch.uids):
                batch.filter(keep)
        for uid in uids:
            self._lengths.pop(uid, None)
        self._drop_empty()

    def _padding(self, batch: DecodeBatch, length: int) -> int:
        """Tokens of padding in a batch once a row of `length` has joined."""
        lengths = [*(self._lengths[uid] for uid in batch.uids), length]
        return len(lengths) * max(lengths) - sum(lengths)

    def _of(self, uid: int) -> DecodeBatch:
        return next(batch for batch in self._batches if uid in batch.uids)

    def _drop_empty(self) -> None:
        self._batches = [batch for batch in self._batches if batch.uids]
