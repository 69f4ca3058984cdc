"""POST /native/attention against the caches of mlx-lm's own forward pass."""

import io
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from sidecar.app import App
from tests.native.conftest import KINDS, Ask

TEXT = "some words of a text that is looked into " * 12


def cached_keys(app: App, kind: str, text: str) -> list[np.ndarray | None]:
    """What mlx-lm's layers hold after one pass, in its own order."""
    with app.pool.lease(kind) as served:
        model = served.engine.model
        ids = served.pipeline.encoder.encode(text).ids

    def compute() -> list[np.ndarray | None]:
        library: Any = load_model(model.folder)[0]
        cache = make_prompt_cache(library)
        mx.eval(library(mx.array([ids]), cache=cache))
        return [
            np.array(layer.keys_and_values()[0][0].astype(mx.float32))
            if hasattr(layer, "keys_and_values")
            else None
            for layer in cache
        ]

    return app.gpu.call(compute)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_those_of_the_layers(native_app: App, ask: Ask, kind: str) -> None:
    status, body = ask("/native/attention", model=kind, prompt=TEXT)
    assert status == 200, body
    wanted = cached_keys(native_app, kind, TEXT)
    assert body["num_layers"] == len(wanted) == len(body["keys"])
    for layer, found, own in zip(body["layers"], body["keys"], wanted, strict=True):
        if own is None:
            assert (found, body["layer_kinds"][layer]) == (None, "recurrent")
            assert body["positions"][layer] == []
            continue
        heads, num_positions, _ = own.shape
        assert heads == body["num_heads"] == len(found)
        assert np.abs(np.array(found) - own.reshape(heads, -1)).max() < 1e-4
        first = body["seq_len"] - num_positions
        assert body["positions"][layer] == list(range(first, body["seq_len"]))
    assert body["num_query_heads"] > 0
    assert body["queries"] is None
    assert body["architecture"]


def test_the_same_in_a_file_of_arrays(native_app: App, ask: Ask) -> None:
    """The layers that are asked for, each with its positions."""
    body = {"model": "dense", "prompt": TEXT, "format": "npz", "layers": [1]}
    answer = httpx.post(f"{native_app.url}/native/attention", json=body, timeout=60)
    arrays = np.load(io.BytesIO(answer.content))
    wanted = cached_keys(native_app, "dense", TEXT)[1]
    assert sorted(arrays) == ["layer_1", "positions_1"]
    assert np.abs(arrays["layer_1"] - wanted).max() < 1e-4
    assert arrays["positions_1"].tolist() == list(range(wanted.shape[1]))


def test_another_prompt_has_other_keys(ask: Ask) -> None:
    """The same words one place later, too: keys are behind the rotary embedding."""
    one = ask("/native/attention", model="dense", prompt=[7, 8, 9, 10])[1]["keys"]
    later = ask("/native/attention", model="dense", prompt=[6, 7, 8, 9])[1]["keys"]
    width = len(one[0][0]) // 4
    assert (
        np.abs(np.array(one[0][0][:width]) - later[0][0][width : 2 * width]).max()
        > 0.01
    )


def test_a_conversation_is_printed_first(native_app: App, ask: Ask) -> None:
    messages = [{"role": "user", "content": "Look into it."}]
    status, body = ask("/native/attention", model="dense", messages=messages)
    assert status == 200, body
    with native_app.pool.lease("dense") as served:
        tokenizer = served.engine.model.tokenizer
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    wanted = cached_keys(native_app, "dense", text)
    keys = np.array(body["keys"][0])
    assert np.abs(keys - wanted[0].reshape(keys.shape)).max() < 1e-4


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "word " * 500}, "prompt"),
        ({"prompt": [1 << 30]}, "prompt"),
        ({"prompt": "x", "format": "csv"}, "format"),
        ({"prompt": "x", "layers": [99]}, "layers"),
        ({"prompt": "x", "layers": []}, "layers"),
        ({"prompt": "x", "layers": ["all"]}, "layers"),
        ({"prompt": "x", "queries": True}, "queries"),
    ],
)
def test_what_cannot_be_done_is_refused(ask: Ask, more: Any, param: str) -> None:
    status, body = ask("/native/attention", model="dense", **more)
    assert (status // 100, body["error"]["param"]) == (4, param)
