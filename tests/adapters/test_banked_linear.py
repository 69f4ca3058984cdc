"""A bank of adapters in one layer's projections, against mlx-lm's own layer."""

import gc
import weakref
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

    def noted(shared: SharedInput, dtype: mx.Dtype) -> Any:
        before = set(shared._kept)
        picked = pick(shared, dtype)
        kept.extend(key[1:] for key in set(shared._kept) - before)
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
    assert isinstance(block.v_proj, nn.Linear)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_quantised_base_is_read_in_the_type_that_it_computes_in(
    mode: str, dtype: mx.Dtype
) -> None:
    block, bank = Block(), AdapterBank()
    block.set_dtype(dtype)
    for name in WIDTHS:
        setattr(block, name, block[name].to_quantized(mode=mode))
    files, pairs = adapter(4, "q_proj", "v_proj")
    row = bank.load(block, files, pairs)
    x = mx.random.normal((2, 3, INPUTS)).astype(dtype)
    with bank.reading((row, 0)):
        found = block(x)
    wanted, plain = alone(block, pairs, x[:1]), alone(block, {}, x[1:])
    for name in WIDTHS:
        assert found[name].dtype == dtype
        near = 1e-4 if dtype == mx.float32 else 0.05
        scale = mx.abs(wanted[name]).max()
        assert mx.abs(found[name][0] - wanted[name][0]).max() <= near * scale, name
        assert mx.abs(found[name][1] - plain[name][0]).max() <= near * scale, name


def test_what_leaves_is_gone_without_a_garbage_collection() -> None:
    """The rank beside it shrinks, and layers that nobody changes are unwrapped."""
    block, bank = Block(), AdapterBank()
    small = bank.load(block, *adapter(2, "q_proj"))
    held = bank.num_bytes
    large = bank.load(block, *adapter(64, "q_proj", "k_proj", "o_proj"))
    wrapped = [weakref.ref(one) for one in (block.k_proj, block.o_proj)]
    with bank.reading((small, large)):
        mx.eval(block(mx.ones((2, 1, INPUTS))))
    gc.disable()
    try:
        bank.unload(block, large)
        assert [ref() for ref in wrapped] == [None, None]
    finally:
        gc.enable()
    assert bank.num_bytes <= 1.5 * held  # a row of zeros is left
    assert isinstance(block.k_proj, nn.Linear)
    bank.unload(block, small)
    assert isinstance(block.q_proj, nn.Linear)
    assert bank.num_bytes == 0


def test_what_an_adapter_takes_is_known_before() -> None:
    """Rows beside it are padded to its rank."""
    block, bank = Block(), AdapterBank()
    for _ in range(8):
        bank.load(block, *adapter(1, "q_proj", "o_proj"))
    files, pairs = adapter(64, "q_proj", "v_proj")
    foreseen, before = bank.growth(files, pairs), bank.num_bytes
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    bank.load(block, files, pairs)
    assert bank.num_bytes - before > 4 * sum(
        a.nbytes + b.nbytes for a, b in pairs.values()
    )
    assert mx.get_peak_memory() - active <= foreseen + 4096
    del pairs
    gc.collect()
    assert mx.get_active_memory() - active <= bank.num_bytes - before  # no other copy


def test_the_inside_of_a_wrapped_layer_is_no_layer() -> None:
    block, bank = Block(), AdapterBank()
    bank.load(block, *adapter(4, "q_proj"))
    files, pairs = adapter(4, "q_proj")
    with pytest.raises(ValueError, match="no layer"):
        bank.load(block, files, {"q_proj.linear": pairs["q_proj"]})


def test_a_bank_has_no_more_rows_than_its_last_adapter_needs() -> None:
    block, bank = Block(), AdapterBank()
    rows = [bank.load(block, *adapter(4, "q_proj")) for _ in range(9)]
    one = bank.num_bytes // 10  # row 0 is none
    for row in rows[1:]:
        bank.unload(block, row)
    assert bank.num_bytes == 2 * one
    x = mx.random.normal((2, 1, INPUTS))
    with bank.reading([rows[0], 0]):
        mx.eval(block(x))


def test_a_bank_has_no_larger_rank_than_its_adapters_need() -> None:
    block, bank = Block(), AdapterBank()
    small = bank.load(block, *adapter(2, "q_proj"))
    before = bank.num_bytes
    large = bank.load(block, *adapter(16, "q_proj"))
    bank.unload(block, large)
    assert bank.num_bytes == before
    assert small == 1


def test_what_was_picked_out_goes_with_its_batch() -> None:
    block, bank = Block(), AdapterBank()
    rows = [bank.load(block, *adapter(4, "q_proj", "v_proj")) for _ in range(2)]
    x = mx.random.normal((2, 1, INPUTS))
    with bank.reading(rows):
        mx.eval(block(x))
    assert any(shared._kept for shared in bank._shared.values())
    bank.forget_picked()
    assert not any(shared._kept for shared in bank._shared.values())
