"""A browser for all tests of the page here, and servers to look at."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser

from sidecar.app import App
from testkit.browser import browser, needs_browser
from testkit.servers import running_sidecar


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "admin_page/" in item.nodeid:
            item.add_marker(needs_browser)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Of one file: while it is driven, this thread has an event loop that runs."""
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def app(model_folder: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[App]:
    """A server with a default model, and two that can be loaded beside it."""
    root = tmp_path_factory.mktemp("beside")
    for name in ("beside-one", "beside-two"):
        shutil.copytree(model_folder("dense"), root / name)
    settings = {"MODEL_DIR": str(root), "ENABLE_REQUEST_LOGGING": "false"}
    with running_sidecar(settings) as served:
        yield served


def chat(app: App, messages: list[dict[str, str]], **more: Any) -> str:
    body = {"model": "local", "messages": messages, "max_tokens": 8, **more}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"] or "")
