"""Each length that a buffer of KV can have is met once by a decode step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import run_to_end
from sidecar.engine.selftest import attention_plans
from sidecar.kv.kv_layers import atoms, buffer_length, make_room
from tests.engine.test_self_test import loaded

ModelFolder = Callable[[str], Path]


@given(st.integers(1, 1 << 21))
def test_a_buffer_has_few_lengths_and_little_room(num_tokens: int) -> None:
    length = buffer_length(num_tokens)
    assert length >= num_tokens
    assert length % 256 == 0
    assert length - num_tokens < max(256, num_tokens / 16 + 1)
    assert buffer_length(length) == length


def test_buffers_have_a_hundred_lengths_up_to_131072_tokens() -> None:
    lengths = {buffer_length(number) for number in range(1, 131_073)}
    assert len(lengths) == 96
    assert lengths == set(attention_plans._lengths(131_072))


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_a_step_is_done_at_each_length(
    kind: str, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that growing streams will have, and no arrays are left behind."""
    seen: list[set[int]] = []
    forward = LoadedModel.forward

    def note(self: LoadedModel, ids: mx.array, cache: list[Any]) -> mx.array:
        seen.append(_lengths_of(cache))
        return forward(self, ids, cache)

    def planned() -> int:
        model = loaded(model_folder(kind))
        return run_to_end(attention_plans.plan_attention(model))

    monkeypatch.setattr(LoadedModel, "forward", note)
    number = gpu_thread().call(planned)
    assert number == len(seen) - 1  # the first one reads the prompt
    assert _met(seen[1:]) >= {256, 512, 768, 1024}


def _lengths_of(cache: Sequence[Any]) -> set[int]:
    plain = [a for a in atoms(cache) if type(a) is KVCache and a.keys is not None]
    return {atom.keys.shape[2] for atom in plain}


def _met(seen: Sequence[set[int]]) -> set[int]:
    return set().union(*seen)


def test_a_growing_stream_has_only_planned_lengths() -> None:
    layer, met = KVCache(), set()
    keys = mx.zeros((1, 1, 1, 8))
    layer.update_and_fetch(keys, keys)
    for _ in range(6000):
        make_room([layer], 1)
        met.add(layer.keys.shape[2])
        layer.offset += 1
    assert met <= set(attention_plans._lengths(8192))
