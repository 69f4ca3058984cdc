"""
Adapters beside one resident base: each is a row of a bank, row 0 is none.

The rows of a batch say which adapter each of them is read with, so requests with
different adapters share a forward pass (the idea is Punica's and S-LoRA's, 2023). A
layer computes what mlx-lm's LoRALinear does, with the matrices of each row.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from sidecar.engine.adapters.adapter_files import AdapterFiles

Pair = tuple[mx.array, mx.array]  # A (inputs, rank) and B (rank, outputs)
_PREFIXES = ("", "language_model.")  # of a model that mlx-vlm has read


class SelectedRows:
    """Which row of the bank each row of the pass in hand is read with."""

    rows: mx.array | None = None


class BankedLinear(nn.Module):  # type: ignore[misc]
    """
    A projection and what each adapter adds to it.

    Args:
        linear: the base's own, quantised or not; it stays as it is.
    """

    def __init__(self, linear: nn.Module, selected: SelectedRows) -> None:
        super().__init__()
        self.linear = linear
        self._selected = selected
        outputs, inputs = linear.weight.shape
        if isinstance(linear, nn.QuantizedLinear):
            inputs = inputs * 32 // linear.bits
        self.lora_a = mx.zeros((1, inputs, 1))
        self.lora_b = mx.zeros((1, 1, outputs))  # times the adapter's scale
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        rows = self._selected.rows
        if rows is None:
            return y
        if x.ndim != 3 or x.shape[0] != rows.shape[0]:
            raise ValueError("a layer with adapters must see one row a sequence")
        return _sum(y, (x @ self.lora_a[rows]) @ self.lora_b[rows])

    def __getattr__(self, name: str) -> Any:
        """What others ask of a projection is the base's."""
        if name in self or "linear" not in self:
            return super().__getattr__(name)
        return getattr(self["linear"], name)

    def put(self, row: int, pair: Pair | None, scale: float) -> None:
        """Set a row of the bank; None: it adds nothing."""
        num_rows, inputs, rank = self.lora_a.shape
        outputs = self.lora_b.shape[2]
        a, b = pair or (mx.zeros((inputs, 1)), mx.zeros((1, outputs)))
        if a.shape[0] != inputs or b.shape[1] != outputs or a.shape[1] != b.shape[0]:
            raise ValueError(f"its matrices are {a.shape} and {b.shape}")
        rank, num_rows = max(rank, a.shape[1]), max(num_rows, row + 1)
        self.lora_a = _with_row(self.lora_a, row, a, (num_rows, inputs, rank))
        self.lora_b = _with_row(self.lora_b, row, scale * b, (num_rows, rank, outputs))
        mx.eval(self.lora_a, self.lora_b)


@mx.compile  # one kernel; a step of small kernels waits for the host that encodes them
def _sum(y: mx.array, added: mx.array) -> mx.array:
    return y + added.astype(y.dtype)


def _with_row(
    bank: mx.array, row: int, one: mx.array, shape: tuple[int, ...]
) -> mx.array:
    """A bank of a shape that is no smaller, with a row of it set."""
    grown = _padded(bank, shape)
    own = _padded(one[None], (1, *shape[1:]))
    return mx.concatenate([grown[:row], own, grown[row + 1 :]])


def _padded(array: mx.array, shape: tuple[int, ...]) -> mx.array:
    widths = [(0, most - own) for own, most in zip(array.shape, shape, strict=True)]
    return mx.pad(array, widths)


class AdapterBank:
    """
    The adapters of one model. GPU thread only.

    Without any the model is as it was read: its layers are not wrapped.
    """

    def __init__(self) -> None:
        self._selected = SelectedRows()
        self._layers: dict[str, BankedLinear] = {}
        self._rows: dict[int, AdapterFiles] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices, padded to one rank."""
        layers = self._layers.values()
        return sum(one.lora_a.nbytes + one.lora_b.nbytes for one in layers)

    @contextlib.contextmanager
    def reading(self, rows: Sequence[int]) -> Iterator[None]:
        """Have the pass in hand read with these rows of the bank."""
        self._selected.rows = mx.array(list(rows))
        try:
            yield
        finally:
            self._selected.rows = None

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
            for path, layer in self._layers.items():
                layer.put(row, named.get(path), adapter.scale)
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
                layer.put(row, None, 0.0)
            return
        plain = [(path, layer.linear) for path, layer in self._layers.items()]
        if plain:
            model.update_modules(tree_unflatten(plain))
        self._layers = {}

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
                fresh[own] = BankedLinear(module, self._selected)
            named[own] = pair
        if fresh:
            model.update_modules(tree_unflatten(list(fresh.items())))
            self._layers |= fresh
        return named


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
