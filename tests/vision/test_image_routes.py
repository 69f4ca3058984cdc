"""
Images by all three wire formats, with the vendors' SDKs, at the sidecar and through a
real LiteLLM proxy: each form reaches the model as the same pixels (V1).
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from sidecar.app import App
from testkit.pictures import data_url, encoded, picture
from testkit.proxy import Proxy, running_proxy
from testkit.servers import running_sidecar

Json = dict[str, Any]
WORDS = "what stands in this picture, and where does it stand in it? " * 8
SHOWN = picture(5)
TEXT = {"type": "text", "text": WORDS}


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    with running_sidecar({"MODEL_PATH": str(folder / "seeing")}) as app:
        yield app


@pytest.fixture(scope="module")
def proxy(app: App, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with running_proxy(app.url, tmp_path_factory.mktemp("proxy")) as proxy:
        yield proxy


@pytest.fixture(params=["direct", "proxy"])
def clients(
    request: pytest.FixtureRequest, app: App, proxy: Proxy
) -> Iterator[tuple[openai.OpenAI, anthropic.Anthropic]]:
    if request.param == "proxy":
        yield proxy.openai, proxy.anthropic
        return
    same: Json = {"api_key": "any", "max_retries": 0, "timeout": 120}
    with (
        openai.OpenAI(base_url=f"{app.url}/v1", **same) as chat,
        anthropic.Anthropic(base_url=app.url, **same) as messages,
    ):
        yield chat, messages


Clients = tuple[openai.OpenAI, anthropic.Anthropic]


def in_chat(clients: Clients, *, in_tool: bool) -> int:
    part = {"type": "image_url", "image_url": {"url": data_url(SHOWN)}}
    talk: list[Any] = [{"role": "user", "content": [TEXT, part]}]
    if in_tool:
        call = {
            "id": "call_1", "type": "function",
            "function": {"name": "look", "arguments": "{}"},
        }  # fmt: skip
        talk = [
            {"role": "user", "content": WORDS},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [part]},
        ]
    answer = clients[0].chat.completions.create(
        model="local", messages=talk, max_tokens=4
    )
    assert answer.usage is not None
    return answer.usage.prompt_tokens


def in_messages(clients: Clients, *, in_tool: bool) -> int:
    data = base64.b64encode(encoded(SHOWN)).decode()
    block: Json = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }
    talk: list[Any] = [{"role": "user", "content": [TEXT, block]}]
    if in_tool:
        use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": [block]}
        talk = [
            {"role": "user", "content": WORDS},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
    answer = clients[1].messages.create(model="local", messages=talk, max_tokens=4)
    usage = answer.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0)


def in_responses(clients: Clients, *, in_tool: bool) -> int:
    part = {"type": "input_image", "image_url": data_url(SHOWN), "detail": "high"}
    text = {"type": "input_text", "text": WORDS}
    items: list[Any] = [{"role": "user", "content": [text, part]}]
    if in_tool:
        items = [
            {"role": "user", "content": WORDS},
            {"type": "function_call", "call_id": "call_1", "name": "look",
             "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": [part]},
        ]  # fmt: skip
    answer = clients[0].responses.create(
        model="local", input=items, max_output_tokens=4
    )
    assert answer.usage is not None
    return answer.usage.input_tokens


def counters(app: App) -> dict[str, int]:
    with app.pool.lease("default") as model:
        return model.counters()


@pytest.mark.parametrize("in_tool", [False, True], ids=["user", "tool"])
@pytest.mark.parametrize("ask", [in_chat, in_messages, in_responses])
def test_each_form_reaches_the_model_as_the_same_pixels(
    app: App, clients: Clients, ask: Any, in_tool: bool
) -> None:
    before = counters(app)
    sent = ask(clients, in_tool=in_tool)
    after = counters(app)
    assert after["images_seen"] - before["images_seen"] == 1
    # By whichever form it came first, it is not decoded again: it is the same image.
    assert after["images_decoded"] <= 1
    assert sent > 150


def test_the_same_talk_is_the_same_prompt_in_all_formats(
    clients: Clients,
) -> None:
    for in_tool in (False, True):
        lengths = {
            ask(clients, in_tool=in_tool)
            for ask in (in_chat, in_messages, in_responses)
        }
        assert len(lengths) == 1


def test_a_count_of_tokens_counts_the_image(clients: Clients) -> None:
    data = base64.b64encode(encoded(SHOWN)).decode()
    block: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }
    talk: list[Any] = [{"role": "user", "content": [TEXT, block]}]
    counted = clients[1].messages.count_tokens(model="local", messages=talk)
    assert counted.input_tokens == in_messages(clients, in_tool=False)


def test_the_list_says_that_it_sees(app: App, proxy: Proxy) -> None:
    (listed,) = proxy.http.get(f"{app.url}/v1/models").json()["data"]
    assert listed["supports_vision"] is True
    told = proxy.http.get("/model/info").json()["data"]
    assert any(entry["model_info"].get("supports_vision") for entry in told)
