"""A model's weights in memory: their bytes, and how they are let go."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from sidecar.kv.kv_layers import release_freed_memory


def weights_nbytes(model: Any) -> int:
    """Bytes of a model's parameters."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def weights_count(model: Any) -> int:
    """How many arrays they are."""
    return len(tree_flatten(model.parameters()))


def let_go(model: Any) -> None:
    """Let the weights go, whoever still holds the model; GPU thread only."""
    for module in model.modules():
        module.clear()


def let_go_measured(model: Any) -> int:
    """The same; the bytes that came back."""
    before = mx.get_active_memory()
    mx.synchronize()
    let_go(model)
    release_freed_memory()
    return max(0, before - mx.get_active_memory())
