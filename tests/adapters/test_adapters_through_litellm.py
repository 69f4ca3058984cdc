"""Adapters through LiteLLM's router: by their own names, and by a field."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from testkit.proxy import Proxy, running_proxy
from tests.adapters.conftest import Served

TALK: list[Any] = [{"role": "user", "content": "What is in the file?"}]


@pytest.fixture(scope="module")
def proxy(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder: Path = tmp_path_factory.mktemp("proxy")
    with running_proxy(served.app.url, folder) as proxy:
        yield proxy


def said(proxy: Proxy, model: str, **more: Any) -> str:
    answer = proxy.openai.chat.completions.create(
        model=model, messages=TALK, max_tokens=12, temperature=0, extra_body=more
    )
    message = answer.choices[0].message
    return f"{getattr(message, 'reasoning_content', '')}|{message.content}"


def test_a_name_and_a_field_mean_the_same(proxy: Proxy) -> None:
    base = said(proxy, "dense")
    adapted = said(proxy, "dense:dense-a")
    assert adapted != base
    assert said(proxy, "mlx/dense:dense-a") == adapted
    assert said(proxy, "dense", adapter="dense-a") == adapted
    assert said(proxy, "dense", adapter="dense-b") not in (base, adapted)


def test_the_router_lists_them(proxy: Proxy) -> None:
    names = {model.id for model in proxy.openai.models.list()}
    assert {"dense:dense-a", "hybrid:hybrid-a"} <= names


def test_messages_takes_them_as_well(proxy: Proxy) -> None:
    def answered(model: str, **more: Any) -> Any:
        message = proxy.anthropic.messages.create(
            model=model,
            messages=TALK,
            max_tokens=12,
            extra_body={"temperature": 0, **more},
        )
        return [block.model_dump(exclude={"signature"}) for block in message.content]

    adapted = answered("dense:dense-a")
    assert adapted != answered("dense")
    assert answered("dense", adapter="dense-a") == adapted


def test_one_that_is_not_there_is_not_found(proxy: Proxy) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        said(proxy, "dense", adapter="nobody")
    with pytest.raises((anthropic.NotFoundError, anthropic.BadRequestError)):
        proxy.anthropic.messages.create(
            model="dense", messages=TALK, max_tokens=2, extra_body={"adapter": "nobody"}
        )
