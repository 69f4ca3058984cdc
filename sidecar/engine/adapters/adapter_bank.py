"""
Adapters beside one resident base: each is a row of a bank, row 0 is none.

The rows of a batch say which adapter each of them is read with, so requests with
different adapters share a forward pass (the idea is Punica's and S-LoRA's, 2023).
"""

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from sidecar.engine.adapters.adapter_arrays import safetensors_arrays
from sidecar.engine.adapters.adapter_files import AdapterFiles
from sidecar.engine.adapters.banked_linear import (
    BankedLinear,
    Pair,
    SelectedRows,
    SharedInput,
    bank_bytes,
)

# Projections of a block that read the same array.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PREFIXES = ("", "language_model.")  # of a model that mlx-vlm has read


@dataclass(frozen=True, slots=True)
class _Row:
    """An adapter in the bank, and the paths of the layers that it changes."""

    adapter: AdapterFiles
    paths: frozenset[str]


class AdapterBank:
    """
    The adapters of one model. GPU thread only.

    A layer that none of them changes is as it was read: it is not wrapped.
    """

    def __init__(self) -> None:
        self._selected = SelectedRows()
        self._layers: dict[str, BankedLinear] = {}
        self._shared: dict[str, SharedInput] = {}
        self._rows: dict[int, _Row] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices, padded to one rank a layer."""
        return sum(layer.num_bytes for layer in self._layers.values())

    @contextlib.contextmanager
    def reading(self, rows: Sequence[int]) -> Iterator[None]:
        """Have the pass in hand read with these rows of the bank."""
        self._selected.select(rows)
        try:
            yield
        finally:
            self._selected.select(None)

    def growth(self, adapter: AdapterFiles, pairs: Mapping[str, Pair]) -> int:
        """Most bytes that loading an adapter takes, beyond what is held; any thread."""
        num_rows = self._num_rows(self._free_row())
        grown = {
            path: layer.bytes_of(num_rows, 0) for path, layer in self._layers.items()
        }
        for path, (a, b) in pairs.items():
            own = _own_path(path, self._layers) or path
            layer = self._layers.get(own)
            grown[own] = (
                layer.bytes_of(num_rows, adapter.rank)
                if layer is not None
                else bank_bytes(num_rows, a.shape[0], adapter.rank, b.shape[1])
            )
        copied = 2 * max(grown.values(), default=0)  # one layer at a time
        return max(0, sum(grown.values()) - self.num_bytes) + copied

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
        row = self._free_row()
        try:
            named = self._wrapped(model, pairs)
            num_rows = self._num_rows(row)
            for path, layer in self._layers.items():
                layer.put(row, named.get(path), adapter.scale, num_rows)
        except BaseException:
            self._clear(model, row)
            raise
        self._rows[row] = _Row(adapter, frozenset(named))
        self._selected.row_bytes = self._row_bytes()
        return row

    def unload(self, model: nn.Module, row: int) -> None:
        """Take an adapter out of the bank."""
        del self._rows[row]
        self._clear(model, row)

    def forget_picked(self) -> None:
        """Let go what was picked out for batches: they have ended."""
        for shared in self._shared.values():
            shared.forget()

    def _free_row(self) -> int:
        return next(n for n in range(1, len(self._rows) + 2) if n not in self._rows)

    def _num_rows(self, row: int) -> int:
        """Of a bank with one more."""
        return max(row, *self._rows, 0) + 1

    def _row_bytes(self) -> int:
        return sum(one.num_bytes // len(one.lora_a) for one in self._layers.values())

    def _clear(self, model: nn.Module, row: int) -> None:
        """Leave nothing of a row, and no layer wrapped that no other row changes."""
        ranks: dict[str, int] = {}
        for other in self._rows.values():
            for path in other.paths:
                ranks[path] = max(ranks.get(path, 0), other.adapter.rank)
        unused = {p: layer for p, layer in self._layers.items() if p not in ranks}
        if unused:
            plain = [(path, layer.linear) for path, layer in unused.items()]
            model.update_modules(tree_unflatten(plain))
        for path, layer in unused.items():
            layer.shared.leave(layer)
            del self._layers[path]
        num_rows = max(self._rows, default=0) + 1
        for path, layer in self._layers.items():
            if row < len(layer.lora_a):
                layer.put(row, None, 0.0, row + 1)
            layer.shrink(num_rows, ranks[path])
        self._shared = {key: one for key, one in self._shared.items() if one.members}
        self._selected.row_bytes = self._row_bytes()

    def _wrapped(self, model: nn.Module, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
        """The pairs by the paths of their layers, which are wrapped from now on."""
        modules = dict(model.named_modules())
        named: dict[str, Pair] = {}
        fresh: dict[str, BankedLinear] = {}
        for path, pair in pairs.items():
            own = _own_path(path, modules)
            if own is None or own.rpartition(".")[0] in self._layers:
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
                layer.shared.join(layer)
        return named

    def _reading(self, path: str) -> SharedInput:
        """The projections that read what one does, by its path."""
        block, _, name = path.rpartition(".")
        names = next((names for names in _TOGETHER if name in names), (name,))
        key = f"{block}.{names[0]}"
        return self._shared.setdefault(key, SharedInput(self._selected))


def _own_path(path: str, known: Container[str]) -> str | None:
    """What a layer of an adapter is called in the model, among those known."""
    return next((p + path for p in _PREFIXES if p + path in known), None)


def read_pairs(data: bytes) -> dict[str, Pair]:
    """
    An adapter's matrices by the paths of their layers, in float32, evaluated.

    What a row is read with must not hang on the types of other rows.

    Raises:
        ValueError: it has others than pairs, or is no whole safetensors file.
    """
    found: dict[str, dict[str, mx.array]] = {}
    for name, array in safetensors_arrays(data):
        path, _, kind = name.rpartition(".")
        if kind not in ("lora_a", "lora_b") or array.ndim != 2:
            raise ValueError(f"it has {name[:100]}, which is served with no bank")
        found.setdefault(path, {})[kind] = mx.array(array)
    if not found or any(len(pair) < 2 for pair in found.values()):
        raise ValueError("it lacks one of two matrices of a layer")
    mx.eval(found)
    return {path: (pair["lora_a"], pair["lora_b"]) for path, pair in found.items()}
