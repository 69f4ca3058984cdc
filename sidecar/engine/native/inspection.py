"""
The inside of a model's attention: the keys that it keeps of a prompt, layer by layer.

They are as the layers keep them: behind the rotary embedding. What a recurrent layer
keeps are no keys.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from sidecar.engine.loading.checkpoint_files import read_config, text_config
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.native.prompt_chunks import compute_in_chunks
from sidecar.engine.text_engine import TextEngine
from sidecar.kv.kv_layers import KVLayers, atoms, release_freed_memory


@dataclass(frozen=True, slots=True)
class AttentionKeys:
    """
    Of one prompt.

    Args:
        layer_kinds: of each layer: `attention`, `sliding` or `recurrent`.
        keys: of each layer, (KV heads, positions, head dim), float32; None: none.
        positions: of the keys of each layer, in the prompt.
        num_query_heads: as the model's configuration says; None: it does not.
    """

    architecture: str
    seq_len: int
    layer_kinds: tuple[str, ...]
    keys: tuple[np.ndarray | None, ...]
    positions: tuple[tuple[int, ...], ...]
    num_query_heads: int | None


def inspect_attention(
    engine: TextEngine, ids: Sequence[int], chunk_len: int, check: Callable[[], None]
) -> AttentionKeys:
    """
    Compute a prompt in fresh caches and copy what they hold. Any thread.

    Args:
        check: raises if nobody waits any more; called between chunks.
    Raises:
        Busy, InsufficientMemory, Unavailable.
    """
    steps = _steps(engine.model, ids, chunk_len, check)
    return engine.run_beside(steps, len(ids))


def _steps(
    model: LoadedModel, ids: Sequence[int], chunk_len: int, check: Callable[[], None]
) -> Generator[None, None, AttentionKeys]:
    cache = model.new_cache()
    yield from compute_in_chunks(model, ids, cache, chunk_len, check)
    found = _copied(model, cache, len(ids))
    cache.clear()
    release_freed_memory()
    return found


def _copied(model: LoadedModel, cache: KVLayers, seq_len: int) -> AttentionKeys:
    config = read_config(model.folder) or {}
    layers = [_keys_of(layer) for layer in cache]
    heads = text_config(model.folder).get("num_attention_heads")
    return AttentionKeys(
        str(config.get("model_type", "")),
        seq_len,
        tuple(kind for kind, _, _ in layers),
        tuple(keys for _, keys, _ in layers),
        tuple(positions for _, _, positions in layers),
        heads if isinstance(heads, int) else None,
    )


def _keys_of(layer: Any) -> tuple[str, np.ndarray | None, tuple[int, ...]]:
    """A layer's kind, its keys, and where in the prompt these stand."""
    atom = next((a for a in atoms([layer]) if hasattr(a, "keys_and_values")), None)
    if atom is None or atom.keys is None:
        return "recurrent", None, ()
    if not hasattr(atom, "max_size"):
        keys = atom.keys_and_values()[0]
        return "attention", _as_array(keys), tuple(range(keys.shape[2]))
    keys = atom._temporal_order(atom.keys)
    first = atom.offset - keys.shape[2]
    kept = range(atom.keep if first else 0)  # of the prompt's beginning
    return "sliding", _as_array(keys), (*kept, *range(first + len(kept), atom.offset))


def _as_array(keys: mx.array) -> np.ndarray:
    wide = keys[0].astype(mx.float32)
    mx.eval(wide)
    return np.array(wide)
