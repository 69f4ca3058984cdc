"""
What KV a model takes, told from its config.json: its weights need not be there.

mlx-lm builds the model, and it is run over one token without computing anything: MLX is
lazy, and knows the shapes of the KV before.
"""

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from sidecar.engine.loading.checkpoint_files import WEIGHTS
from sidecar.engine.memory_fit import kv_sizes


@dataclass(frozen=True, slots=True)
class KVEstimate:
    """Bytes that each token adds, and those that do not grow (recurrent, windows)."""

    per_token: int
    fixed: int

    def num_bytes(self, num_tokens: int) -> int:
        """Of a context of so many tokens."""
        return self.fixed + self.per_token * num_tokens

    def context(self, free_bytes: int) -> int:
        """Tokens of a context that takes at most so many bytes."""
        room = max(0, free_bytes - self.fixed)
        return room // self.per_token if self.per_token else room


def estimate_kv(folder: Path) -> KVEstimate | None:
    """
    The KV of a model.

    Args:
        folder: has its config.json; without weights bfloat16 is taken for granted.
    Returns:
        None where it cannot be told.
    """
    try:
        model, _ = load_model(folder, lazy=True, strict=False)
        if not any(folder.glob(WEIGHTS)):
            model.update(tree_map(_absent, model.parameters()))
        cache = make_prompt_cache(model)
        model(mx.array([[0]]), cache=cache)
        per_token, fixed = kv_sizes(cache)
    except Exception:  # noqa: BLE001 - whatever a library thinks of a config
        return None
    return KVEstimate(per_token, fixed)


def _absent(parameter: mx.array) -> mx.array:
    """Zeros that take no memory, of the type that weights have."""
    dtype = parameter.dtype
    if mx.issubdtype(dtype, mx.floating):
        dtype = mx.bfloat16
    return mx.broadcast_to(mx.zeros((), dtype), parameter.shape)
