"""
What KV a model takes, told from its config.json: its weights need not be there.

mlx-lm builds the model, which is run over some tokens without computing anything.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

from sidecar.engine.loading.checkpoint_files import WEIGHTS, read_config, sizes_fault
from sidecar.engine.memory_fit import lazy_kv_sizes


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
        if sizes_fault(folder):  # it would take the memory that it claims to need
            return None
        model = _built(folder)
        sizes = lazy_kv_sizes(lambda: make_prompt_cache(model), model)
    except (Exception, SystemExit):  # noqa: BLE001 - whatever a library thinks of it
        return None
    return KVEstimate(*sizes)


def _built(folder: Path) -> Any:
    if any(folder.glob(WEIGHTS)):
        return load_model(folder, lazy=True, strict=False)[0]
    config = read_config(folder) or {}
    # Not by load_model: many a model's `sanitize` looks for weights by name.
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.update(tree_map(_absent, model.parameters()))
    return model


def _absent(parameter: mx.array) -> mx.array:
    """Zeros that take no memory, of the type that weights have."""
    dtype = parameter.dtype
    if mx.issubdtype(dtype, mx.floating):
        dtype = mx.bfloat16
    return mx.broadcast_to(mx.zeros((), dtype), parameter.shape)
