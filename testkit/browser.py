"""The real Chromium of this machine, driven headless."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PATH = next(filter(None, map(shutil.which, NAMES)), None)

needs_browser = pytest.mark.skipif(
    PATH is None,
    reason="needs a browser: apt install chromium-headless-shell",
)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own; it is ended at the end."""
    with sync_playwright() as driver:
        found = driver.chromium.launch(
            executable_path=PATH, headless=True, args=["--no-sandbox"]
        )
        try:
            yield found
        finally:
            found.close()


class Watched:
    """
    A page, and what it asked and said.

    Args:
        requests: addresses that it asked. words: what stands on its console.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.words: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.words.append(message.text))
        page.on("pageerror", lambda error: self.words.append(str(error)))
