"""How a model that encodes becomes a resident: embeddings, rerankers."""

import functools
import logging
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_tokenizer

from sidecar.config.settings import Config
from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.encoders import (
    Encoder,
    EncoderTurns,
    read_classifier,
    read_embedder,
    read_judge,
)
from sidecar.engine.gpu_thread import load_thread
from sidecar.engine.loading.checkpoint_files import (
    context_len,
    read_config,
    sizes_fault,
)
from sidecar.engine.loading.model_place import folder_of
from sidecar.engine.loading.reachable_arrays import evaluate_in_slices
from sidecar.residents.detection import Evidence
from sidecar.residents.encoder_resident import EncoderResident
from sidecar.residents.model_state import ModelSpec, Tell
from sidecar.residents.shared import Shared, not_loaded

logger = logging.getLogger(__name__)

_MAX_TOKENS = 8192  # where a checkpoint says nothing, or more than is sane


class EncoderLoader:
    """Makes residents of models that encode; `load` on any thread but the GPU's."""

    def __init__(self, config: Config, shared: Shared) -> None:
        self._stall_s = config.engine.decode_stall_ms / 1000
        self._shared = shared
        self._trust = config.model.trust_remote_code

    def load(self, spec: ModelSpec, tell: Tell) -> EncoderResident:
        """
        Read a model; its first computation is the first request's.

        Raises:
            ModelLoadFailed: with the reason.
        """
        shared, started = self._shared, time.monotonic()
        tell("weights_loading")
        folder, name = folder_of(spec.place), spec.id
        if folder is None:
            raise ModelLoadFailed(f"model {name} cannot be loaded: it has no folder")
        if fault := sizes_fault(folder):
            raise ModelLoadFailed(f"model {name} cannot be loaded: {fault}")
        config = read_config(folder) or {}
        is_pair = Evidence(folder, config).is_classifier
        try:
            tokenizer, encoder = self._read(spec.kind, folder, is_pair=is_pair)
        except (Exception, SystemExit) as error:
            raise not_loaded(name, folder, error) from error
        shared.gpu.call(shared.process.sample)
        seconds = shared.note_loaded(name, encoder.num_bytes, started)
        logger.info("loaded model=%s kind=%s seconds=%.1f", name, spec.kind, seconds)
        leave = functools.partial(shared.note_left, name)
        return EncoderResident(
            name,
            spec.kind,
            EncoderTurns(encoder, shared.gpu, self._stall_s),
            tokenizer,
            _max_tokens(config, tokenizer),
            encoder.num_bytes,
            int(config.get("vocab_size") or 1 << 31),
            is_pair,
            leave,
            threading.Lock(),
        )

    def _read(self, kind: str, folder: Path, *, is_pair: bool) -> tuple[Any, Encoder]:
        extra = {"trust_remote_code": self._trust}
        tokenizer = load_tokenizer(folder, tokenizer_config_extra=extra)
        read = functools.partial(_read, kind, folder, tokenizer, is_pair=is_pair)
        encoder = load_thread().call(read)
        return getattr(tokenizer, "_tokenizer", tokenizer), encoder  # mlx-lm wraps it


def _read(kind: str, folder: Path, tokenizer: Any, *, is_pair: bool) -> Encoder:
    """On the weights thread: the model, with all it holds computed."""
    if kind == "embedding":
        encoder = read_embedder(folder)
    elif is_pair:
        encoder = read_classifier(folder)
    else:
        encoder = read_judge(folder, _word(tokenizer, "yes"), _word(tokenizer, "no"))
    mx.eval(mx.random.state)
    for _ in evaluate_in_slices(encoder.model):
        pass
    return encoder


def _word(tokenizer: Any, word: str) -> int:
    """
    The one token of a word.

    Raises:
        ValueError: it has more.
    """
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"its tokenizer has no single token for {word}")
    return int(ids[0])


def _max_tokens(config: dict[str, Any], tokenizer: Any) -> int:
    claimed_len = getattr(tokenizer, "model_max_length", None)
    found = [_MAX_TOKENS, context_len(config) or _MAX_TOKENS]
    if isinstance(claimed_len, int) and 0 < claimed_len < 1_000_000:
        found.append(claimed_len)
    # RoBERTa counts positions from behind its padding id.
    if "roberta" in str(config.get("model_type", "")).lower():
        found.append((context_len(config) or _MAX_TOKENS) - 2)
    return min(found)
