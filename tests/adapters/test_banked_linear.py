"""A bank of adapters in one layer's projections, against mlx-lm's own layer."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tuner.lora import LoRALinear

from sidecar.engine.adapters.adapter_bank import AdapterBank
from sidecar.engine.adapters.adapter_files import AdapterFiles
from sidecar.engine.adapters.banked_linear import Pair, SharedInput

INPUTS, SCALE = 64, 2.0
WIDTHS = {"q_proj": 96, "k_proj": 32, "v_proj": 32, "o_proj": 64}


class Block(nn.Module):  # type: ignore[misc]
    """Three projections that read one array, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        for name, outputs in WIDTHS.items():
            setattr(self, name, nn.Linear(INPUTS, outputs, bias=False))

    def __call__(self, x: mx.array) -> dict[str, mx.array]:
        found = {name: self[name](x) for name in ("q_proj", "k_proj", "v_proj")}
        return {**found, "o_proj": self.o_proj(found["q_proj"][..., :INPUTS])}


def adapter(rank: int, *names: str) -> tuple[AdapterFiles, dict[str, Pair]]:
    pairs = {
        name: (mx.random.normal((INPUTS, rank)), mx.random.normal((rank, WIDTHS[name])))
        for name in names
    }
    return AdapterFiles("a", Path(), "", rank, SCALE, "d", 1), pairs


def alone(block: Block, pairs: dict[str, Pair], x: mx.array) -> dict[str, mx.array]:
    """What mlx-lm's layer says with one adapter."""
    fused: Any = Block()
    for name in WIDTHS:
        linear = getattr(block[name], "linear", block[name])
        if name in pairs:
            a, b = pairs[name]
            layer = LoRALinear.from_base(linear, r=a.shape[1], scale=SCALE)
            layer.lora_a, layer.lora_b = a, b
            linear = layer
        setattr(fused, name, linear)
    return dict(fused(x))


def is_equal(one: mx.array, other: mx.array) -> bool:
    return bool(mx.allclose(one, other, rtol=1e-4, atol=1e-4).item())


def test_each_row_is_read_with_its_own_adapter() -> None:
    """Of several ranks, in several projections, some of them in none."""
    block, bank = Block(), AdapterBank()
    given = [
        adapter(4, "q_proj", "v_proj"),
        adapter(8, "v_proj"),
        adapter(2, "q_proj", "k_proj", "v_proj", "o_proj"),
    ]
    rows = [bank.load(block, *one) for one in given]
    x = mx.random.normal((5, 3, INPUTS))
    read_with = (rows[2], 0, rows[0], rows[1], rows[2])
    with bank.reading(read_with):
        found = block(x)
    for number, row in enumerate(read_with):
        pairs = given[rows.index(row)][1] if row else {}
        wanted = alone(block, pairs, x[number : number + 1])
        for name in WIDTHS:
            assert is_equal(found[name][number], wanted[name][0]), (name, row)


def test_an_adapter_in_the_place_of_another_leaves_those_behind_it() -> None:
    """It wraps a layer that the others do not have."""
    block, bank = Block(), AdapterBank()
    given = [adapter(4, "q_proj") for _ in range(3)]
    rows = [bank.load(block, *one) for one in given]
    bank.unload(block, rows[1])
    given[1] = adapter(4, "o_proj")
    assert bank.load(block, *given[1]) == rows[1]
    x = mx.random.normal((3, 2, INPUTS))
    with bank.reading(rows):
        found = block(x)
    for number, (_, pairs) in enumerate(given):
        wanted = alone(block, pairs, x[number : number + 1])
        for name in WIDTHS:
            assert is_equal(found[name][number], wanted[name][0]), (name, number)


def test_a_batch_s_matrices_are_picked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the bank changes; and not a prompt's anew beside them."""
    block, bank = Block(), AdapterBank()
    row = bank.load(block, *adapter(4, "q_proj", "v_proj"))
    kept: list[tuple[int, ...]] = []
    pick = SharedInput._pick

    def noted(shared: SharedInput) -> Any:
        before = set(shared._kept)
        picked = pick(shared)
        kept.extend(set(shared._kept) - before)
        return picked

    monkeypatch.setattr(SharedInput, "_pick", noted)
    for _ in range(3):
        for rows in ((row, 0), (row,)):
            with bank.reading(rows):
                mx.eval(block(mx.ones((len(rows), 1, INPUTS))))
    assert sorted(kept) == [(row,), (row, 0)]
    bank.load(block, *adapter(4, "q_proj"))
    with bank.reading((row, 0)):
        mx.eval(block(mx.ones((2, 1, INPUTS))))
    assert len(kept) == 3


def test_an_adapter_that_does_not_fit_leaves_the_block_as_it_was() -> None:
    block, bank = Block(), AdapterBank()
    row = bank.load(block, *adapter(4, "q_proj"))
    x = mx.random.normal((2, 1, INPUTS))
    with bank.reading((row, 0)):
        before = block(x)
    broken, pairs = adapter(4, "v_proj")
    with pytest.raises(ValueError, match="no layer"):
        bank.load(block, broken, {**pairs, "nowhere": pairs["v_proj"]})
    with bank.reading((row, 0)):
        after = block(x)
    assert all(is_equal(before[name], after[name]) for name in WIDTHS)
