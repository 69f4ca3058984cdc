"""What a config.json leaves out and the weights show: which Qwen, its head size."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidecar.infra.safetensors_header import read_entries

_QUERY = "self_attn.q_proj.weight"
_QUERY_NORM = "self_attn.q_norm.weight"
_QUERY_BIAS = "self_attn.q_proj.bias"


def absent_fields(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """
    `model_type` and `head_dim`, where they are absent and the weights tell.

    Qwen3 has a norm of its queries, Qwen2 has none and a bias. mlx-lm builds no model
    without the first, and no Qwen3 without the second.
    """
    kind, has_head_dim = config.get("model_type"), config.get("head_dim") is not None
    is_complete = isinstance(kind, str) and (kind != "qwen3" or has_head_dim)
    if is_complete or "model_file" in config:
        return {}
    shapes = _shapes(folder)
    if not isinstance(kind, str):
        kind = _kind(shapes)
    is_named = config.get("model_type") is not None
    found: dict[str, Any] = {} if is_named else {"model_type": kind}
    if kind == "qwen3" and not has_head_dim:
        found["head_dim"] = _head_dim(shapes)
    return {name: value for name, value in found.items() if value is not None}


def _kind(shapes: Mapping[str, list[int]]) -> str | None:
    ends = {".".join(name.split(".")[3:]) for name in shapes}  # of model.layers.N
    if _QUERY not in ends:
        return None
    if _QUERY_NORM in ends:
        return "qwen3"
    return "qwen2" if _QUERY_BIAS in ends else None


def _head_dim(shapes: Mapping[str, list[int]]) -> int | None:
    """The length of the norm, whose weight is one head's."""
    norms = [shape for name, shape in shapes.items() if name.endswith(_QUERY_NORM)]
    return norms[0][0] if norms and len(norms[0]) == 1 else None


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Those of the arrays of the first file that has any of the layers."""
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            shapes = {
                name: [int(size) for size in one["shape"]]
                for name, one in read_entries(file).items()
            }
        except (ValueError, TypeError, KeyError):
            continue
        if any(name.endswith(_QUERY) for name in shapes):
            return shapes
    return {}
