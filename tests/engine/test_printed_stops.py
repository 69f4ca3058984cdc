"""A turn whose end a template prints otherwise than the model wrote it (gpt-oss)."""

import functools
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from sidecar.engine.loading.printed_stops import printed_stops
from testkit.chats import words
from testkit.real_templates import BY_NAME, FAMILIES, FamilyChats, write_tokenizer
from testkit.scripted import Forced
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model

SETTINGS = {"CACHE_SELFTEST": "off", "CACHE_VERIFY": "true"}


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_only_gpt_oss_prints_another_token(family: str) -> None:
    tokenizer = FamilyChats(family).pipeline.template._tokenizer
    names = {number: token for token, number in tokenizer.get_added_vocab().items()}
    found = printed_stops(tokenizer, tokenizer.eos_token_ids)
    told = {names[stop]: names[printed] for stop, printed in found.items()}
    assert told == ({"<|return|>": "<|end|>"} if family == "gpt-oss" else {})


@pytest.mark.parametrize("kind", ["dense", "sliding"])
def test_its_answers_are_reused_whole(kind: str, tmp_path: Path) -> None:
    """A window cannot be cut back: one other token at the end would cost it all."""
    write = functools.partial(write_tokenizer, family=BY_NAME["gpt-oss"])
    model = make_model(tmp_path / "model", kind, hidden=32, write_tokenizer=write)
    encode = Tokenizer.from_file(str(model / "tokenizer.json")).encode
    raw = f"<|channel|>final<|message|>{words(150)}<|return|>"
    ids = encode(raw, add_special_tokens=False).ids
    said: list[Any] = [{"role": "user", "content": f"Tell me. {words(30, 1)}"}]
    with (
        running_sidecar(
            {**SETTINGS, "MODEL_PATH": str(model)}, lambda job, choice: [Forced(ids)]
        ) as app,
        httpx.Client(base_url=app.url, timeout=60, trust_env=False) as http,
    ):
        usages = []
        for _ in range(3):
            body = {"messages": said, "max_tokens": 400}
            answer = http.post("/v1/chat/completions", json=body).json()
            usages.append(answer["usage"])
            assert answer["choices"][0]["finish_reason"] == "stop"
            said += [answer["choices"][0]["message"]]
            said += [{"role": "user", "content": "More."}]
        with app.pool.lease("") as served:
            assert served.engine.store.check_integrity() == []
            assert served.pipeline.counters["invariant_violation"] == 0
    for before, after in zip(usages, usages[1:], strict=False):
        known = before["prompt_tokens"] + before["completion_tokens"]
        assert after["prompt_tokens_details"]["cached_tokens"] >= known - 1
