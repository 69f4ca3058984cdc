"""What one API key asked is no secret kept by another one's cache: KV stays apart."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sidecar.app import App
from testkit.servers import running_sidecar

Json = dict[str, Any]
SECRET = "My account's number is 48213377, and it must stay between the two of us. " * 8


def ask(app: App, route: str, text: str, key: str, **more: Any) -> int:
    """How many tokens of a prompt the server says it had; keys as the plugin tells."""
    headers = {"Authorization": "Bearer sidecar's"}
    messages = [{"role": "user", "content": text}]
    mark = {"x_mlx": {"key": key, "key_checked": True}} if key else {}
    body: Json = {"model": "local", **mark, **more}
    if route == "completions":
        body |= {"prompt": text, "max_tokens": 1}
    elif route == "responses":
        body |= {"input": text, "max_output_tokens": 1, "store": False}
    else:
        body |= {"messages": messages, "max_tokens": 1}
    answer = httpx.post(f"{app.url}/v1/{route}", json=body, headers=headers, timeout=99)
    assert answer.status_code == 200, answer.text
    return cached(answer.json())


def cached(body: Json) -> int:
    """The count of cached tokens, wherever the dialect has it."""
    usage = body.get("usage", body)
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if name in usage:
            return int(usage[name]["cached_tokens"])
    return int(usage.get("cache_read_input_tokens", usage.get("cached_tokens", -1)))


ROUTES = ("chat/completions", "completions", "messages", "responses", "cache/probe")


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_says_what_another_key_asked(app: App, route: str) -> None:
    """Not a token of it is counted as cached, though its own key reuses nearly all."""
    asked = "chat/completions" if route == "cache/probe" else route
    text = f"{route}: {SECRET}"
    owner, other = f"key of one, {route}", f"key of another, {route}"
    ask(app, asked, text, owner)
    assert ask(app, route, text, other) == 0
    template = 16  # tokens before the text, which others without a key have asked
    assert ask(app, route, text, "") <= template
    assert ask(app, route, text, owner) > 100


def test_made_up_keys_share(app: App) -> None:
    """Where LiteLLM asks for no key, it has not checked the one that a client sends."""
    text = f"made up: {SECRET}"
    ask(app, "chat/completions", text, "", x_mlx={"key": "any"})
    assert ask(app, "cache/probe", text, "", x_mlx={"key": "sk-other"}) > 100
    assert ask(app, "cache/probe", text, "") > 100
    assert ask(app, "cache/probe", text, "a key that was checked") == 0


@pytest.fixture(scope="module")
def sharing() -> Iterator[App]:
    """A server whose administrator lets keys share."""
    with running_sidecar({"CACHE_SHARE_BETWEEN_KEYS": "true"}) as app:
        yield app


def test_keys_share_where_the_administrator_says_so(sharing: App) -> None:
    """One setting; what is shared is KV of equal prompts, never a value."""
    ask(sharing, "chat/completions", SECRET, "one")
    assert ask(sharing, "cache/probe", SECRET, "another") > 100
    assert ask(sharing, "messages", SECRET, "a third") > 100
