"""Chats with images, asked of a running sidecar, and what is compared of answers."""

from typing import Any

import httpx
import pytest

from sidecar.app import App

Json = dict[str, Any]
WORDS = "tell me what can be seen in here, piece by piece, and why it is so. " * 6


def user(*parts: str | Json) -> Json:
    """A message of texts and images."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": content}


def said(answer: Json) -> Json:
    """An answer, as the client sends it back."""
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def ask(app: App, talk: list[Json], **more: Any) -> Json:
    """A greedy answer with the probabilities of its tokens."""
    body = {
        "messages": talk, "max_tokens": 8, "temperature": 0, "logprobs": True, **more,
    }  # fmt: skip
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def forget(app: App) -> None:
    """Have all KV dropped, and all that was said."""
    assert httpx.post(f"{app.url}/admin/cache/clear", timeout=60).status_code == 200


def values(answer: Json) -> list[tuple[str, float]]:
    """The tokens of an answer, and their logarithms."""
    tokens = answer["choices"][0]["logprobs"]["content"]
    return [(token["token"], token["logprob"]) for token in tokens]


def assert_same(one: Json, other: Json) -> None:
    """Two answers are the same tokens, of the same probabilities."""
    for (token, value), (expected, wanted) in zip(
        values(one), values(other), strict=True
    ):
        assert token == expected
        assert value == pytest.approx(wanted, abs=2e-4)


def cached(answer: Json) -> int:
    """Tokens of the prompt that were reused."""
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def tower_runs(app: App) -> int:
    """How often the model has looked at an image."""
    with app.pool.lease("default") as model:
        vision_encoder = model.engine.model.vision_encoder
        assert vision_encoder is not None
        return int(vision_encoder.memo.num_runs)
