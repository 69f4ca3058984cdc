"""
Logits behind the last token of each text of a batch, in one forward pass.

Texts stand in rows, padded on the right: no real token sees what is behind it. A model
would compute logits of all places, each as wide as its vocabulary; so its body is
wrapped for the pass, and its head gets the last place of each row alone. Whether that
gives the same is tried once on each model; where it does not, the head computes all.
"""

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv.kv_layers import KVLayers

logger = logging.getLogger(__name__)

Ids = Sequence[int]
_TRIED_LEN = 8  # tokens of the longer text that the wrapping is tried on
_ALLOWED = 1e-3  # of the largest logit


class LastLogits:
    """Of one model. GPU thread only."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._owner = _owner_of_body(model.model)
        self._is_tried = self._owner is None

    def __call__(self, texts: Sequence[Ids], cache: KVLayers | None = None) -> mx.array:
        """
        Logits, (texts, vocabulary), in float32; not computed yet.

        Args:
            cache: of one text's earlier tokens; None: each text is whole.
        """
        if not self._is_tried:
            self._is_tried = True
            self._try(texts[0])
        return self._logits(texts, cache)

    def _logits(self, texts: Sequence[Ids], cache: KVLayers | None) -> mx.array:
        longest = max(map(len, texts))
        ids = np.zeros((len(texts), longest), np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        last = mx.array([len(text) - 1 for text in texts])
        cache = self._model.new_cache() if cache is None else cache
        if self._owner is None:
            logits = self._model.forward(mx.array(ids), cache)
            return _at(logits, last)[:, 0].astype(mx.float32)
        body = self._owner.model
        self._owner.model = _AtPlaces(body, last)
        try:
            logits = self._model.forward(mx.array(ids), cache)
        finally:
            self._owner.model = body
        return logits[:, 0].astype(mx.float32)

    def _try(self, text: Ids) -> None:
        longer = [*text, *text, *text][:_TRIED_LEN]
        texts = [longer[: len(longer) // 2 + 1], longer]
        owner, self._owner = self._owner, None
        wanted = self._logits(texts, None)
        self._owner = owner
        try:
            apart = mx.abs(self._logits(texts, None) - wanted)
            is_same = mx.max(apart) <= _ALLOWED * mx.max(mx.abs(wanted))
            if bool(is_same.item()):
                return
        except Exception as error:  # noqa: BLE001 - whatever an architecture raises
            logger.debug("its head computes all places: %r", error)
        self._owner = None


class _AtPlaces(nn.Module):  # type: ignore[misc]
    """A model's body of which one place of each row is left."""

    def __init__(self, body: Any, places: mx.array) -> None:
        super().__init__()
        self.body, self._places = body, places

    def __call__(self, *arguments: Any, **named: Any) -> mx.array:
        return _at(self.body(*arguments, **named), self._places)

    def __getattr__(self, name: str) -> Any:
        if name in self or "body" not in self:
            return super().__getattr__(name)
        return getattr(self["body"], name)


def _at(rows: mx.array, places: mx.array) -> mx.array:
    """One place of each row: (rows, 1, width)."""
    return mx.take_along_axis(rows, places[:, None, None], axis=1)


def _owner_of_body(model: Any) -> Any:
    """The module that computes logits from what its `model` gives; None: none does."""
    while hasattr(model, "language_model"):
        model = model.language_model
    return model if isinstance(getattr(model, "model", None), nn.Module) else None
