"""
Takes the pictures of docs/admin.md: the admin page of a real server in real Chromium.

    python -m tools.picture_admin_page [FOLDER]

Four states: what is loaded (light), a prompt that is read beside one that waits (dark),
why a turn was not warm, and a narrow screen.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, expect

from sidecar.app import App
from testkit.browser import browser
from testkit.servers import held_gpu, running_sidecar

DOCS = Path(__file__).parents[1] / "docs"
NAMES = ("loaded", "running", "why", "narrow")
_WIDE, _NARROW = 1100, 320


def take(app: App, chromium: Browser, folder: Path) -> list[Path]:
    """Write the four pictures; their files."""
    _play(app)
    return [
        _picture(app, chromium, folder / "admin-loaded.png", "#models, #memory"),
        _running(app, chromium, folder / "admin-running.png"),
        _picture(app, chromium, folder / "admin-why.png", "#why"),
        _picture(app, chromium, folder / "admin-narrow.png", "#models", _NARROW),
    ]


def _play(app: App) -> None:
    """A conversation that goes on, and one whose system text changes."""
    talk = [
        {"role": "system", "content": "You help with the files of a project. " * 30},
        {"role": "user", "content": "Which files are there?"},
    ]
    for word in ("And the tests?", "And the docs?"):
        said = _ask(app, talk)["choices"][0]["message"]["content"]
        talk += [{"role": "assistant", "content": said}]
        talk += [{"role": "user", "content": word}]
    talk[0]["content"] = "Build 4711 of the agent. " + talk[0]["content"]
    _ask(app, talk)
    app.gpu.call(lambda: app.shared.stored.evict_bytes(1 << 40))
    _ask(app, talk)


def _ask(app: App, messages: list[dict[str, Any]], **more: Any) -> Any:
    body = {
        "model": "local",
        "messages": messages,
        "max_tokens": 12,
        "session_id": "work",
        **more,
    }
    headers = {"User-Agent": "my-agent/1.0"}
    url = f"{app.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=120)
    answer.raise_for_status()
    return answer.json()


def _opened(app: App, chromium: Browser, width: int, scheme: Any) -> Page:
    context = chromium.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme
    )
    page = context.new_page()
    page.goto(f"{app.url}/admin/")
    expect(page.locator("#ended-body tbody tr").first).to_be_visible()
    return page


def _picture(
    app: App, chromium: Browser, file: Path, places: str, width: int = _WIDE
) -> Path:
    page = _opened(app, chromium, width, "light")
    boxes = [place.bounding_box() for place in page.locator(places).all()]
    top = 0 if width == _NARROW else min(box["y"] for box in boxes if box)
    bottom = max(box["y"] + box["height"] for box in boxes if box)
    clip = {"x": 0, "y": top, "width": width, "height": bottom - top}
    page.screenshot(path=file, clip=clip, full_page=True)  # type: ignore[arg-type]
    page.context.close()
    return file


def _running(app: App, chromium: Browser, file: Path) -> Path:
    words = [{"role": "user", "content": "Read all of this. " * 200}]
    threads = [
        threading.Thread(target=_ask, args=(app, words), kwargs={"session_id": name})
        for name in ("one", "two")
    ]
    page = _opened(app, chromium, _WIDE, "dark")
    with held_gpu(app):
        for thread in threads:
            thread.start()
            time.sleep(0.2)
        expect(page.locator("#running-body tbody tr")).to_have_count(2)
        page.locator("#requests").screenshot(path=file)
    for thread in threads:
        thread.join(120)
    page.context.close()
    return file


def main() -> None:
    """Write them into docs/, or another folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    with running_sidecar() as app, browser() as chromium:
        for file in take(app, chromium, folder):
            print(file)


if __name__ == "__main__":
    main()
