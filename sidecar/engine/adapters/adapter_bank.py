"""
Adapters beside one resident base: each is a row of a bank, row 0 is none.

The rows of a batch say which adapter each of them is read with, so requests with
different adapters share a forward pass (the idea is Punica's and S-LoRA's, 2023).
"""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from sidecar.engine.adapters.adapter_files import AdapterFiles
from sidecar.engine.adapters.banked_linear import (
    BankedLinear,
    Pair,
    SelectedRows,
    SharedInput,
)

# Projections of a block that read the same array.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PREFIXES = ("", "language_model.")  # of a model that mlx-vlm has read


class AdapterBank:
    """
    The adapters of one model. GPU thread only.

    Without any the model is as it was read: its layers are not wrapped.
    """

    def __init__(self) -> None:
        self._selected = SelectedRows()
        self._layers: dict[str, BankedLinear] = {}
        self._shared: dict[str, SharedInput] = {}
        self._rows: dict[int, AdapterFiles] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices, padded to one rank."""
        layers = self._layers.values()
        return sum(one.lora_a.nbytes + one.lora_b.nbytes for one in layers)

    @contextlib.contextmanager
    def reading(self, rows: Sequence[int]) -> Iterator[None]:
        """Have the pass in hand read with these rows of the bank."""
        self._selected.select(rows)
        try:
            yield
        finally:
            self._selected.select(None)

    def load(
        self, model: nn.Module, adapter: AdapterFiles, pairs: Mapping[str, Pair]
    ) -> int:
        """
        Put an adapter into the bank; its row.

        Args:
            pairs: its matrices by the paths of their layers, evaluated.
        Raises:
            ValueError: it does not fit the model; the bank is as it was.
        """
        for path, (a, _) in pairs.items():
            if a.shape[1] != adapter.rank:
                raise ValueError(
                    f"{path[:100]} has rank {a.shape[1]}, and its configuration says "
                    f"{adapter.rank}"
                )
        row = next(n for n in range(1, len(self._rows) + 2) if n not in self._rows)
        try:
            named = self._wrapped(model, pairs)
            num_rows = max(row, *self._rows, 0) + 1
            for path, layer in self._layers.items():
                layer.put(row, named.get(path), adapter.scale, num_rows)
            self._selected.row_bytes = sum(n.row_bytes for n in self._layers.values())
        except BaseException:
            self._clear(model, row)
            raise
        self._rows[row] = adapter
        return row

    def unload(self, model: nn.Module, row: int) -> None:
        """Take an adapter out of the bank."""
        del self._rows[row]
        self._clear(model, row)

    def _clear(self, model: nn.Module, row: int) -> None:
        if self._rows:
            for layer in self._layers.values():
                layer.put(row, None, 0.0, row + 1)
            return
        plain = [(path, layer.linear) for path, layer in self._layers.items()]
        if plain:
            model.update_modules(tree_unflatten(plain))
        self._layers, self._shared = {}, {}

    def _wrapped(self, model: nn.Module, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
        """The pairs by the paths of their layers, which are wrapped from now on."""
        modules = dict(model.named_modules())
        named: dict[str, Pair] = {}
        fresh: dict[str, BankedLinear] = {}
        for path, pair in pairs.items():
            own = next((p + path for p in _PREFIXES if p + path in modules), None)
            if own is None:
                raise ValueError(f"the model has no layer {path[:100]}")
            module = modules[own]
            if not isinstance(module, nn.Linear | nn.QuantizedLinear | BankedLinear):
                raise ValueError(f"{path[:100]} is no linear layer")
            if not isinstance(module, BankedLinear):
                fresh[own] = BankedLinear(module, self._selected, self._reading(own))
            named[own] = pair
        if fresh:
            model.update_modules(tree_unflatten(list(fresh.items())))
            self._layers |= fresh
            for layer in fresh.values():
                layer.join()
        return named

    def _reading(self, path: str) -> SharedInput:
        """The projections that read what one does, by its path."""
        block, _, name = path.rpartition(".")
        names = next((names for names in _TOGETHER if name in names), (name,))
        key = f"{block}.{names[0]}"
        return self._shared.setdefault(key, SharedInput(self._selected))


def read_pairs(data: bytes) -> dict[str, Pair]:
    """
    An adapter's matrices by the paths of their layers, in float32, evaluated.

    What a row is read with must not hang on the types of other rows.

    Raises:
        ValueError: it has others than pairs.
    """
    try:
        arrays: Any = mx.load(io.BytesIO(data), format="safetensors")
    except (RuntimeError, ValueError) as error:
        why = f"its weights cannot be read: {str(error)[:200]}"
        raise ValueError(why) from None
    found: dict[str, dict[str, mx.array]] = {}
    for name, array in arrays.items():
        path, _, kind = name.rpartition(".")
        if kind not in ("lora_a", "lora_b") or array.ndim != 2:
            raise ValueError(f"it has {name[:100]}, which is served with no bank")
        found.setdefault(path, {})[kind] = array.astype(mx.float32)
    if not found or any(len(pair) < 2 for pair in found.values()):
        raise ValueError("it lacks one of two matrices of a layer")
    mx.eval(found)
    return {path: (pair["lora_a"], pair["lora_b"]) for path, pair in found.items()}
