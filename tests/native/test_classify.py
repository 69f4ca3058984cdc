"""POST /native/classify against mlx-lm's own forward pass, each prompt alone."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from sidecar.app import App
from sidecar.core.errors import BadRequest
from sidecar.core.ports import RequestFacts
from sidecar.dialects.native import parse_classify
from sidecar.engine.native.classification import label_tokens
from sidecar.engine.native.last_logits import LastLogits
from tests.native.conftest import KINDS, Ask

PROMPTS = ["a short one", "a somewhat longer text of several words " * 5, "x",
           "another " * 40, "the last of them"]  # fmt: skip


def alone(app: App, kind: str, texts: list[Any], tail: list[int]) -> np.ndarray:
    """Logits behind each text, computed one by one by mlx-lm."""
    with app.pool.lease(kind) as served:
        model = served.engine.model

    def compute() -> np.ndarray:
        library: Any = load_model(model.folder)[0]
        rows = [
            library(mx.array([[*model.tokenizer.encode(t), *tail]]))[0, -1]
            for t in texts
        ]
        return np.array(mx.stack(rows).astype(mx.float32))

    return app.gpu.call(compute)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_each_prompt_alone(native_app: App, ask: Ask, kind: str) -> None:
    status, body = ask("/native/classify", model=kind, prompts=PROMPTS,
                       return_logits=True)  # fmt: skip
    assert status == 200, body
    wanted = alone(native_app, kind, PROMPTS, [])
    found = np.array([row["logits"] for row in body["results"]])
    assert np.abs(found - wanted).max() < 1e-4
    ids = [row["token"]["id"] for row in body["results"]]
    assert ids == wanted.argmax(axis=1).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_last_places_go_through_the_head(native_app: App, kind: str) -> None:
    """Else a batch of short texts would need a row of the vocabulary for each token."""
    with native_app.pool.lease(kind) as served:
        last = LastLogits(served.engine.model)
    rows = native_app.gpu.call(lambda: last([[5, 6, 7], [8, 9]]).shape)
    assert rows[0] == 2
    assert last._owner is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_longer_than_a_chunk_is_computed_in_several(
    native_app: App, ask: Ask, kind: str
) -> None:
    long = "many words of a text " * 700
    status, body = ask("/native/classify", model=kind, prompts=[long, "x"],
                       return_logits=True)  # fmt: skip
    assert status == 200, body
    found = np.array([row["logits"] for row in body["results"]])
    wanted = alone(native_app, kind, [long, "x"], [])
    assert np.abs(found - wanted).max() < 1e-4


def test_labels_are_scored_at_their_first_own_token(native_app: App, ask: Ask) -> None:
    """Behind what all of them begin with."""
    with native_app.pool.lease("dense") as served:
        encode = served.engine.encode
    labels = [" class one", " class two", " class ten"]
    shared = list(label_tokens([encode(label) for label in labels]).shared)
    assert shared
    status, body = ask("/native/classify", model="dense", prompts=PROMPTS,
                       labels=labels)  # fmt: skip
    assert status == 200, body
    own = [encode(label)[len(shared)] for label in labels]
    columns = alone(native_app, "dense", PROMPTS, shared)[:, own]
    wanted = np.exp(columns) / np.exp(columns).sum(axis=1, keepdims=True)
    for row, scores in zip(body["results"], wanted, strict=True):
        assert list(row["scores"]) == labels
        assert np.abs(np.array(list(row["scores"].values())) - scores).max() < 1e-4
        assert row["label"] == labels[int(scores.argmax())]
        assert "logits" not in row


def test_equal_seeds_draw_equal_tokens(ask: Ask) -> None:
    def drawn(seed: int) -> list[int]:
        sampling = {"temperature": 5, "seed": seed, "top_k": 0, "top_p": 1, "min_p": 0}
        status, body = ask(
            "/native/classify", model="dense", prompts=PROMPTS, **sampling
        )
        assert status == 200, body
        return [row["token"]["id"] for row in body["results"]]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_prompt_that_cannot_be_read_harms_no_other(ask: Ask) -> None:
    prompts = ["fine", "", [1 << 30], "x " * 90_000, [5, 6]]
    status, body = ask("/native/classify", model="dense", prompts=prompts)
    assert status == 200, body
    errors = [row.get("error") for row in body["results"]]
    assert [bool(error) for error in errors] == [False, True, True, True, False]
    assert "empty" in errors[1]
    assert "token ids" in errors[2]
    assert "tokens" in errors[3]


def test_conversations_are_printed_by_the_template(native_app: App, ask: Ask) -> None:
    messages = [{"role": "user", "content": "Is it good?"}]
    status, body = ask("/native/classify", model="dense", messages=[messages],
                       return_logits=True)  # fmt: skip
    assert status == 200, body
    with native_app.pool.lease("dense") as served:
        tokenizer = served.engine.model.tokenizer
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    wanted = alone(native_app, "dense", [text], [])
    assert np.abs(np.array(body["results"][0]["logits"]) - wanted[0]).max() < 1e-4


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": "text"}, "prompts"),
        ({"prompts": [5]}, "prompts[0]"),
        ({"prompts": ["x"], "labels": ["one"]}, "labels"),
        ({"prompts": ["x"], "labels": ["one", "one"]}, "labels[1]"),
        ({"prompts": ["x"], "labels": ["one", ""]}, "labels[1]"),
        ({"prompts": ["x"], "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"prompts": ["x"], "messages": [[]]}, "prompts"),
        ({"messages": [[{"role": "user", "content": 5}]]}, "messages[0][0].content"),
        ({"prompts": ["x"] * 2000, "return_logits": True}, "return_logits"),
        ({"prompts": ["x"], "temperature": "hot"}, "temperature"),
    ],
)
def test_what_cannot_be_done_is_refused(ask: Ask, more: Any, param: str) -> None:
    status, body = ask("/native/classify", model="dense", **more)
    assert (status // 100, body["error"]["param"]) == (4, param)


def test_half_a_letter_is_no_label() -> None:
    """It could not be sent back as what it was."""
    body = {"prompts": ["x"], "labels": ["one", "\ud800"]}
    with pytest.raises(BadRequest, match=r"labels\[1\]"):
        parse_classify(body, RequestFacts("r", "", {}))


def test_labels_that_cannot_be_told_apart_are_refused() -> None:
    assert label_tokens([[1, 2, 3], [1, 2, 4]]).own == (3, 4)
    assert label_tokens([]).own == ()
    with pytest.raises(BadRequest, match="beginning of another"):
        label_tokens([[1, 2], [1, 2, 3]])
    with pytest.raises(BadRequest, match=r"labels\[1\] and labels\[0\]"):
        label_tokens([[1, 2, 3], [1, 2, 4], [5]])
