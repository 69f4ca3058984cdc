"""A model as a Python object: what it says is what the server would say."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from sidecar import library
from sidecar.config.sources import ConfigError
from sidecar.core.errors import BadRequest, SidecarError, Unavailable
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.library import Model, Piece, open_model
from testkit.servers import running_sidecar

TALK = [{"role": "user", "content": "What is in the file?"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
QUICK = {"CACHE_SELFTEST": "off"}


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path]) -> str:
    return str(model_folder("hybrid"))


@pytest.fixture(scope="module")
def model(folder: str) -> Iterator[Model]:
    with open_model(folder, QUICK) as model:
        yield model


def text_of(pieces: Iterator[Piece] | list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_it_says_what_the_server_says(folder: str, model: Model) -> None:
    with running_sidecar({"MODEL_PATH": folder}) as app:
        url = f"{app.url}/v1/completions"
        raw = httpx.post(url, json={"prompt": "Once", **GREEDY}, timeout=60).json()
        url = f"{app.url}/v1/chat/completions"
        chat = httpx.post(url, json={"messages": TALK, **GREEDY}, timeout=60).json()
    assert text_of(model.generate("Once", **GREEDY)) == raw["choices"][0]["text"]
    said = list(model.chat(TALK, **GREEDY))
    message = chat["choices"][0]["message"]
    kinds = {
        kind: text_of([piece for piece in said if piece.kind == kind])
        for kind in ("text", "reasoning")
    }
    assert kinds["text"] == (message["content"] or "")
    assert kinds["reasoning"] == message.get("reasoning_content", "")
    assert said[-1] == Piece("end", finish_reason="length")


def test_pieces_bring_their_tokens(model: Model) -> None:
    pieces = list(model.generate([5, 6, 7], **GREEDY))
    assert sum(len(piece.tokens) for piece in pieces) == 12
    (metrics,) = [model.metrics()]
    assert metrics is not None
    assert (metrics["prompt_tokens"], metrics["generated_tokens"]) == (3, 12)
    assert model.err() is None


def test_a_second_turn_reuses_the_first(model: Model) -> None:
    long = [{"role": "user", "content": "Many words of a long task. " * 60}]
    said = text_of(model.chat(long, **GREEDY))
    more = [*long, {"role": "assistant", "content": said}, *TALK]
    list(model.chat(more, **GREEDY))
    metrics = model.metrics()
    assert metrics is not None
    assert metrics["cached_tokens"] > 300


def test_a_batch_and_labels(model: Model) -> None:
    prompts = ["one", "two words", ""]
    good, also, bad = model.batch_generate(prompts, **GREEDY)
    assert good["text"] == text_of(model.generate("one", **GREEDY))
    assert also["text"] == text_of(model.generate("two words", **GREEDY))
    assert "empty" in bad["error"]
    (row,) = model.classify(["This is"], labels=[" good", " bad"])
    assert sum(row["scores"].values()) == pytest.approx(1)
    assert row["label"] in row["scores"]


def test_keys_come_as_arrays(model: Model) -> None:
    found = model.inspect_attention([5, 6, 7, 8])
    kinds = found["layer_kinds"]
    assert {"attention", "recurrent"} == set(kinds)
    for layer, keys in found["keys"].items():
        if kinds[layer] == "recurrent":
            assert keys is None
        else:
            assert keys.shape == (found["num_heads"], 4, found["head_dim"])


def test_what_cannot_be_done_says_why(model: Model) -> None:
    for fields, match in [
        ({"max_tokens": 0}, "max_tokens"), ({"tint": "blue"}, "tint has no effect"),
        ({"stream": True}, "stream"), ({"n": 2}, "n must"),
        ({"model": "other"}, "model"),
    ]:  # fmt: skip
        with pytest.raises(SidecarError, match=match):
            list(model.generate("x", **fields))
        if "max_tokens" in fields:
            assert "max_tokens" in (model.err() or "")
    with pytest.raises(BadRequest, match="one text or its token ids"):
        model.generate(["a", "b"])  # type: ignore[list-item]
    with pytest.raises(BadRequest, match="tint"):
        model.batch_generate(["x"], tint="blue")
    list(model.generate("x", max_tokens=1))
    assert model.err() is None


def test_an_iterator_that_is_closed_or_cancelled_ends(model: Model) -> None:
    pieces = model.generate("x", max_tokens=5000, temperature=0)
    next(pieces)
    pieces.close()
    pieces = model.generate("x", max_tokens=5000, temperature=0)
    num_read = 0
    for piece in pieces:
        assert piece.kind != "end"
        num_read += 1
        if num_read == 3:
            model.cancel()
    assert num_read < 4000
    assert model.err() == "cancelled"
    assert text_of(model.generate("one", **GREEDY))
    assert model.err() is None


def test_calls_at_the_same_time_are_answered_alike(model: Model) -> None:
    wanted = text_of(model.generate("one", **GREEDY))
    found: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(text_of(model.generate("one", **GREEDY)))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [wanted] * 4


def test_what_is_known_of_a_model(model: Model) -> None:
    info = model.info()
    assert info["model_type"]
    assert info["layers"] == len(model.inspect_attention([5])["layer_kinds"])
    assert info["vocab_size"] > 1000
    assert info["hidden_size"] > 0
    assert info["num_bytes"] > 0


def test_a_close_frees_the_weights_without_the_garbage_collector(folder: str) -> None:
    """A cycle that holds them would keep them until it runs."""
    gc.collect()
    gc.disable()
    try:
        model = open_model(folder, QUICK)
        num_bytes = model.info()["num_bytes"]
        assert text_of(model.generate("one", **GREEDY))
        before = gpu_thread().call(mx.get_active_memory)
        freed = model.close()
        after = gpu_thread().call(mx.get_active_memory)
    finally:
        gc.enable()
    assert freed >= num_bytes
    assert before - after >= num_bytes
    assert model.close() == 0
    with pytest.raises(Unavailable, match="closed"):
        list(model.generate("one"))
    with pytest.raises(Unavailable, match="closed"):
        model.info()


def test_a_model_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(SidecarError):
        open_model(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="MAX_KV_SIZE"):
        open_model(None, {"MAX_KV_SIZE": "many"})


def test_it_listens_to_no_address(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a socket was bound")

    monkeypatch.setattr("socket.socket.bind", refuse)
    with open_model(folder, QUICK) as model:
        assert model.info()["vocab_size"]


def test_derivatives_are_those_of_mlx() -> None:
    """Against finite differences, and the losses against numbers."""
    x = np.array([0.3, -0.8, 1.2], np.float32)

    def f(x: mx.array) -> mx.array:
        return (mx.sin(x) * x).sum()

    step = 1e-2
    slopes = [
        (f(mx.array(x + step * unit)) - f(mx.array(x - step * unit))).item()
        / (2 * step)
        for unit in np.eye(3, dtype=np.float32)
    ]
    value, gradient = library.value_and_grad(f)(mx.array(x))
    assert value.item() == pytest.approx(float((np.sin(x) * x).sum()), abs=1e-5)
    assert np.array(gradient) == pytest.approx(slopes, abs=1e-3)
    _, backwards = library.vjp(f, [mx.array(x)], [mx.array(2.0)])
    assert np.array(backwards[0]) == pytest.approx(2 * np.array(slopes), abs=2e-3)
    _, forwards = library.jvp(f, [mx.array(x)], [mx.array([1.0, 0.0, 2.0])])
    wanted = slopes[0] + 2 * slopes[2]
    assert forwards[0].item() == pytest.approx(wanted, abs=3e-3)


def test_losses_against_numbers() -> None:
    logits = np.array([[1.0, 2.0, 0.5], [0.1, 0.2, 3.0]], np.float32)
    targets = np.array([1, 2])
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wanted = -np.log(probabilities[[0, 1], targets])
    found = library.losses.cross_entropy(mx.array(logits), mx.array(targets))
    assert np.array(found) == pytest.approx(wanted, abs=1e-5)
    mean = library.losses.mse_loss(mx.array(logits), mx.zeros((2, 3)))
    assert mean.item() == pytest.approx(float((logits**2).mean()), abs=1e-5)
    assert library.losses is nn.losses


def test_settings_that_are_none_are_refused(folder: str) -> None:
    """As a `.env` warns of them; a path may be a Path."""
    for wrong in ({"MAX_KVSIZE": "100"}, {"MAX_KV_SIZE": 100}, {"MAX_KV_SIZE": "x"}):
        with pytest.raises(ConfigError, match="MAX_KV"):
            open_model(folder, wrong)  # type: ignore[arg-type]
    with open_model(Path(folder), {"CACHE_SELFTEST": "off"}) as model:
        assert model.info()["vocab_size"] > 0


def test_conversations_are_taken_where_http_takes_them(model: Model) -> None:
    talk = [{"role": "user", "content": "Hello"}]
    assert len(model.classify(messages=[talk, talk])) == 2
    assert model.inspect_attention(messages=talk)["keys"]
    with pytest.raises(SidecarError, match="echo"):
        next(model.generate("a", echo=True))


def test_each_prompt_is_drawn_for_itself(model: Model) -> None:
    """Of equal ones, too; with a seed, as before."""
    asked = {"temperature": 2.0, "top_k": 0, "top_p": 1, "min_p": 0}
    tokens = [r["token"]["id"] for r in model.classify(["Once upon"] * 60, **asked)]
    assert len(set(tokens)) > 5
    again = [
        [r["token"]["id"] for r in model.classify(["Once"] * 20, seed=7, **asked)]
        for _ in range(2)
    ]
    assert again[0] == again[1]
