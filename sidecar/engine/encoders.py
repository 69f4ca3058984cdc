"""
Models that give texts a vector, or a pair of texts a score.

Encoders (BERT and its kin) run on mlx-vlm, decoders on mlx-lm: of those the last token
counts. Texts are batched by length, as many as fit into the time that running streams
may be stalled: each batch is one turn of the GPU thread.
"""

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from sidecar.core.errors import GenerationFailed
from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.loading.checkpoint_files import read_config
from sidecar.engine.loading.weights import let_go_measured, weights_nbytes
from sidecar.engine.paced_batches import Ids, PacedBatches
from sidecar.kv.kv_layers import give_back_much

Pooling = Literal["cls", "mean", "max", "lasttoken"]
Rows = np.ndarray  # (texts, width), float32

_MODES: dict[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class Encoder:
    """
    A loaded model that encodes.

    Args:
        run: (ids, mask), both (rows, tokens), padded on the right -> vectors or
            scores, one row each.
    """

    model: Any
    run: Callable[[mx.array, mx.array, mx.array | None], mx.array]

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return weights_nbytes(self.model)


class EncoderTurns:
    """Has texts encoded on the GPU thread, in turns. Any thread."""

    def __init__(self, encoder: Encoder, gpu: GpuThread, stall_s: float) -> None:
        self._encoder = encoder
        self._gpu = gpu
        self._batches = PacedBatches(stall_s)
        self.is_closed = False

    def encode(
        self,
        texts: Sequence[Ids],
        check: Callable[[], None],
        second: Sequence[int] | None = None,
    ) -> Rows:
        """
        A row for each text, in their order.

        Args:
            check: raises if nobody waits any more; called between batches.
            second: where the second text of each pair begins; None: no pairs.
        """
        steps = self._steps(texts, check, second)
        return self._gpu.call_in_steps(steps, is_background=False)

    def close(self) -> int:
        """Let the weights go; the bytes. A second time does nothing."""
        if self.is_closed:
            return 0
        self.is_closed = True
        return self._gpu.call(lambda: let_go_measured(self._encoder.model))

    def _steps(
        self,
        texts: Sequence[Ids],
        check: Callable[[], None],
        second: Sequence[int] | None,
    ) -> Generator[None, None, Rows]:
        def run(batch: list[int]) -> Sequence[np.ndarray]:
            begins = None if second is None else [second[i] for i in batch]
            return list(self._run([texts[i] for i in batch], begins))

        found = np.stack((yield from self._batches.steps(texts, check, run)))
        if not np.isfinite(found).all():
            raise GenerationFailed("the model gives no numbers for these texts")
        return found

    def _run(self, texts: Sequence[Ids], second: Sequence[int] | None) -> np.ndarray:
        longest = max(map(len, texts))
        ids = np.zeros((len(texts), longest), np.int32)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
            if second is not None:
                types[row, second[row] : len(text)] = 1
        kinds = mx.array(types) if second is not None else None
        found = self._encoder.run(mx.array(ids), mx.array(mask), kinds)
        found = found.astype(mx.float32)
        mx.eval(found)
        give_back_much()
        return np.array(found)


def read_embedder(folder: Path) -> Encoder:
    """
    A model that gives vectors of length 1, pooled as its checkpoint asks.

    Raises:
        ValueError: it pools in a way that is not known here.
    """
    pooling = pooling_of(folder)
    model = _by_library(folder)
    if model is None:
        model, _ = load_model(folder, lazy=True)
        mode: Pooling = pooling or "lasttoken"

        def run(ids: mx.array, mask: mx.array, _: mx.array | None) -> mx.array:
            return _normalised(_pooled(model.model(ids), mask, mode))

        return Encoder(model, run)

    def run_library(ids: mx.array, mask: mx.array, _: mx.array | None) -> mx.array:
        found = model(ids, attention_mask=mask)
        if pooling is None or _has_dense(folder):
            return _normalised(found.text_embeds)
        return _normalised(_pooled(found.last_hidden_state, mask, pooling))

    return Encoder(model, run_library)


def read_classifier(folder: Path) -> Encoder:
    """A cross-encoder: a pair's score between 0 and 1; by mlx-vlm."""
    from mlx_vlm.reranker_loader import load_sequence_classification_model

    model: Any = load_sequence_classification_model(folder, lazy=True)

    def run(ids: mx.array, mask: mx.array, types: mx.array | None) -> mx.array:
        named = {} if types is None else {"token_type_ids": types}
        found = model(ids, attention_mask=mask, **named)
        return mx.sigmoid(getattr(found, "logits", found).reshape(ids.shape[0], 1))

    return Encoder(model, run)


def read_judge(folder: Path, yes: int, no: int) -> Encoder:
    """A decoder that answers yes or no: how much likelier yes is, between 0 and 1."""
    model: Any
    model, _ = load_model(folder, lazy=True)

    def run(ids: mx.array, mask: mx.array, _: mx.array | None) -> mx.array:
        last = _pooled(model.model(ids), mask, "lasttoken")
        if hasattr(model, "lm_head"):
            logits = model.lm_head(last)
        else:
            logits = model.model.embed_tokens.as_linear(last)
        return mx.sigmoid(logits[:, yes : yes + 1] - logits[:, no : no + 1])

    return Encoder(model, run)


def pooling_of(folder: Path) -> Pooling | None:
    """
    How a sentence-transformers checkpoint pools; None: it does not say.

    Raises:
        ValueError: in a way that is not known here.
    """
    file = folder / "1_Pooling" / "config.json"
    if not file.exists():
        return None
    config = json.loads(file.read_bytes())
    named = config.get("pooling_mode")
    asked = [named] if isinstance(named, str) else []
    old = (name for name in config if name.startswith("pooling_mode_"))
    asked += [name for name in old if config[name] is True]
    if len(asked) == 1 and asked[0] in _MODES:
        return _MODES[asked[0]]
    modes = ascii(", ".join(asked)[:80] or "nothing")
    raise ValueError(f"it pools by {modes}, which is not known")


def _has_dense(folder: Path) -> bool:
    """Whether layers stand behind the pooling, which mlx-vlm computes itself."""
    return any(folder.glob("[0-9]_Dense"))


def _by_library(folder: Path) -> Any:
    """By mlx-vlm, if it is there and has it as one that embeds."""
    try:
        from mlx_vlm.embedding_loader import (
            EMBEDDING_MODEL_REMAPPING,
            load_embedding_model,
        )
    except ImportError:
        return None
    config = read_config(folder) or {}
    kind = str(config.get("model_type", "")).lower()
    known = (*EMBEDDING_MODEL_REMAPPING, "bert", "modernbert", "xlm_roberta")
    return load_embedding_model(folder, lazy=True) if kind in known else None


def _pooled(hidden: mx.array, mask: mx.array, mode: Pooling) -> mx.array:
    """Of (rows, tokens, width) one vector a row; padding on the right counts not."""
    if mode == "cls":
        return hidden[:, 0]
    if mode == "lasttoken":
        return hidden[mx.arange(hidden.shape[0]), mask.sum(axis=1) - 1]
    there = mask[:, :, None]
    if mode == "max":
        return mx.where(there == 0, -mx.inf, hidden).max(axis=1)
    return (hidden * there).sum(axis=1) / there.sum(axis=1)


def _normalised(vectors: mx.array) -> mx.array:
    wide = vectors.astype(mx.float32)
    return wide / mx.maximum(mx.linalg.norm(wide, axis=-1, keepdims=True), 1e-12)
