"""
A projection with a bank of adapters, of which each row of a batch picks one.

It computes what mlx-lm's LoRALinear does, with the matrices of each row. On a GPU a
step of small kernels waits for the host that encodes them. So projections that read the
same array (queries, keys and values) share the product with A, the sum with the base is
part of the product with B, and the matrices of a batch's rows are picked out once. On
CUDA one kernel does all of it in a decode step (`adapter_kernel`).
"""

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sidecar.engine.adapters import adapter_kernel

Pair = tuple[mx.array, mx.array]  # A (inputs, rank) and B (rank, outputs)
_MAX_KEPT_BYTES = 128 << 20  # of a model's matrices, picked out for one batch
_NUM_KEPT = 2  # batches: the one that decodes, the prompt that is prefilled beside it


@dataclass(eq=False)
class SelectedRows:
    """
    Which row of the bank each row of the pass in hand is read with. GPU thread only.

    Args:
        rows: None: none is read with an adapter.
        row_bytes: of one row of the bank, all layers.
        last: what was computed last of projections that share what they read.
    """

    rows: tuple[int, ...] | None = None
    row_bytes: int = 0
    last: "_Shared | None" = None

    def select(self, rows: Sequence[int] | None) -> None:
        """Begin a pass, or end it."""
        self.rows, self.last = None if rows is None else tuple(rows), None


@dataclass(frozen=True, slots=True)
class _Shared:
    """
    What was computed for all of a layer's projections that read x.

    Args:
        with_a: x times A of each row of the batch; None: there are sums.
        sums: what each projection gives; none: they are still to be computed.
    """

    layer: "SharedInput"
    x: mx.array
    picked: "_Picked"
    with_a: mx.array | None = None
    sums: Sequence[mx.array] = ()


@dataclass(frozen=True, slots=True)
class _Picked:
    """
    The matrices of a batch's rows, in the type that the base computes in.

    Args:
        a: of all projections one behind the other (rows, ranks, inputs).
        bs: of each projection (rows, rank, outputs).
        adder: adds what they add, in a step of one token a row; None: not here.
    """

    a: mx.array
    bs: Sequence[mx.array]
    adder: adapter_kernel.Adder | None


class SharedInput:
    """
    Projections that read the same array, and what a batch's rows add to them.

    They hold it, not it them: what is unwrapped is gone without a garbage collection.
    """

    def __init__(self, selected: SelectedRows) -> None:
        self._selected = selected
        self._members: list[weakref.ref[BankedLinear]] = []
        self._kept: OrderedDict[tuple[Any, ...], _Picked] = OrderedDict()

    def join(self, member: "BankedLinear") -> None:
        """Take a projection in."""
        self._set_members([*self.members, member])

    def leave(self, member: "BankedLinear") -> None:
        """Let a projection go."""
        self._set_members([one for one in self.members if one is not member])

    @property
    def members(self) -> list["BankedLinear"]:
        """Those that are part of the model."""
        return [one for ref in self._members if (one := ref()) is not None]

    def forget(self) -> None:
        """Let go what was picked: the bank has changed, or the batches have ended."""
        self._kept.clear()

    def project(self, number: int, x: mx.array) -> mx.array:
        """
        What the base computes of x, and what the rows' adapters add to it.

        Args:
            number: of the projection.
        """
        last = self._selected.last
        if last is None or last.layer is not self or last.x is not x:
            last = self._selected.last = self._begin(x)
        if last.with_a is None:
            return last.sums[number]
        bs = last.picked.bs
        before = sum(b.shape[1] for b in bs[:number])
        own = last.with_a[..., before : before + bs[number].shape[1]]
        y = self.members[number].base(x)
        return mx.addmm(y, own, bs[number]).astype(y.dtype)

    def _begin(self, x: mx.array) -> _Shared:
        """Compute what is computed once for all projections."""
        picked = self._pick(x.dtype)
        if picked.adder is not None and x.shape[1] == 1:
            ys = [member.base(x) for member in self.members]
            if all(y.dtype == x.dtype for y in ys):
                return _Shared(self, x, picked, None, picked.adder(x, *ys))
        return _Shared(self, x, picked, x @ picked.a.swapaxes(1, 2))

    def _set_members(self, members: Sequence["BankedLinear"]) -> None:
        self._members = [weakref.ref(member) for member in members]
        for number, member in enumerate(members):
            member.number = number
        self.forget()

    def _pick(self, dtype: mx.Dtype) -> _Picked:
        rows = self._selected.rows
        assert rows is not None
        key = (dtype, *rows)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        indices, members = mx.array(rows), self.members
        a = [one.lora_a[indices].swapaxes(1, 2) for one in members]
        bs = [one.lora_b[indices].astype(dtype) for one in members]
        joined = mx.concatenate(a, axis=1).astype(dtype)
        is_kept = len(rows) * self._selected.row_bytes <= _MAX_KEPT_BYTES
        is_usable = is_kept and adapter_kernel.is_usable(joined)
        adder = adapter_kernel.adder(joined, bs) if is_usable else None
        picked = _Picked(joined, bs, adder)
        if is_kept:
            self._kept[key] = picked
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return picked


class BankedLinear(nn.Module):  # type: ignore[misc]
    """
    A projection and what each adapter adds to it.

    Args:
        linear: the base's own, quantised or not; it stays as it is.
        shared: the projections that read what it reads. number: among them.
    """

    def __init__(
        self, linear: nn.Module, selected: SelectedRows, shared: SharedInput
    ) -> None:
        super().__init__()
        self.linear = linear
        self._selected, self.shared, self.number = selected, shared, 0
        outputs, inputs = linear.weight.shape
        if isinstance(linear, nn.QuantizedLinear):
            inputs = inputs * 32 // linear.bits
        self.lora_a = mx.zeros((1, inputs, 1))
        self.lora_b = mx.zeros((1, 1, outputs))  # times the adapter's scale
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        rows = self._selected.rows
        if rows is None:
            return self.base(x)
        if x.ndim != 3 or x.shape[0] != len(rows):
            raise ValueError("a layer with adapters must see one row a sequence")
        return self.shared.project(self.number, x)

    def base(self, x: mx.array) -> mx.array:
        """What the base computes."""
        y: mx.array = self["linear"](x)
        return y

    def __getattr__(self, name: str) -> Any:
        """What others ask of a projection is the base's."""
        if name in self or "linear" not in self:
            return super().__getattr__(name)
        return getattr(self["linear"], name)

    @property
    def num_bytes(self) -> int:
        """Bytes of its bank."""
        return int(self.lora_a.nbytes + self.lora_b.nbytes)

    def bytes_of(self, num_rows: int, rank: int) -> int:
        """Bytes of a bank of so many rows, of a rank as large at least."""
        _, inputs, own_rank = self.lora_a.shape
        return bank_bytes(num_rows, inputs, max(rank, own_rank), self.lora_b.shape[2])

    def put(self, row: int, pair: Pair | None, scale: float, num_rows: int) -> None:
        """
        Set a row of the bank.

        Args:
            pair: None: it adds nothing.
            num_rows: that the bank has at least; a new layer begins with one.
        """
        own_rows, inputs, rank = self.lora_a.shape
        outputs = self.lora_b.shape[2]
        a, b = pair or (mx.zeros((inputs, 1)), mx.zeros((1, outputs)))
        if a.shape[0] != inputs or b.shape[1] != outputs or a.shape[1] != b.shape[0]:
            raise ValueError(f"its matrices are {a.shape} and {b.shape}")
        rank, num_rows = max(rank, a.shape[1]), max(num_rows, own_rows)
        a_shape, b_shape = (num_rows, inputs, rank), (num_rows, rank, outputs)
        self._hold(
            _with_row(self.lora_a, row, a, a_shape),
            _with_row(self.lora_b, row, scale * b, b_shape),
        )

    def shrink(self, num_rows: int, rank: int) -> None:
        """Let the bank have no more rows and no larger rank than its adapters need."""
        own_rows, _, own_rank = self.lora_a.shape
        if num_rows < own_rows or rank < own_rank:
            a, b = self.lora_a[:num_rows, :, :rank], self.lora_b[:num_rows, :rank]
            self._hold(mx.contiguous(a), mx.contiguous(b))

    def _hold(self, lora_a: mx.array, lora_b: mx.array) -> None:
        mx.eval(lora_a, lora_b)
        self.lora_a, self.lora_b = lora_a, lora_b
        self.shared.forget()


def bank_bytes(num_rows: int, inputs: int, rank: int, outputs: int) -> int:
    """Bytes of a layer's bank."""
    return num_rows * rank * (inputs + outputs) * mx.float32.size


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
