"""What of LiteLLM's output the launcher does not show."""

import contextlib
import io

import pytest

from litellm_mlx.launcher.chatter import is_chatter, without_chatter

KEPT = [
    "INFO:     Application startup complete.",
    "21:04:36 - LiteLLM Proxy:ERROR: common_request_processing.py:1687 - failed",
    "Traceback (most recent call last):",
    "CRITICAL: the database is gone",
    "docs: see the Provider List: https://example.org/list in the config",
    "LITELLM_MASTER_KEY is set",
    "═══ a heading",
]


def test_litellms_own_logo_is_known() -> None:
    """As the installed LiteLLM prints it."""
    from litellm.proxy.common_utils.banner import show_banner

    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        show_banner()
    assert len(screen.getvalue().splitlines()) > 5
    assert list(without_chatter(screen.getvalue().splitlines())) == []


@pytest.mark.parametrize(
    "line",
    [
        "\x1b[1;31mProvider List: https://docs.example.org/providers\x1b[0m",
        "\x1b[1;31mGive Feedback / Get Help: https://example.org/issues/new\x1b[0m",
        "LiteLLM.Info: If you need to debug this error, use `litellm.turn_on_debug()'.",
        "21:04:30 - LiteLLM Proxy:CRITICAL: proxy_server.py:6957 - LITELLM_MASTER_KEY "
        "is not set! All requests will be treated as INTERNAL_USER.",
        "21:04:30 - LiteLLM Proxy:WARNING: master_key_boot_check.py:125 - "
        "dangerously_permit_weak_or_unset_master_key is on, so the proxy is starting",
        "16:00:38 - LiteLLM Proxy:WARNING: login_throttle.py:126 - "
        "trusted_proxy_ranges is not set or not a valid list of ranges, so failed",
    ],
)
def test_known_lines_are_left_out(line: str) -> None:
    """With the blank lines before and after them."""
    assert is_chatter(line)
    assert list(without_chatter(["one", "", line, "", "two"])) == ["one", "two"]


def test_all_else_is_shown() -> None:
    """Blank lines that belong to something are, too."""
    lines = [word for line in KEPT for word in (line, "")][:-1]
    assert list(without_chatter(lines)) == lines


def test_a_line_is_shown_as_it_comes() -> None:
    """Nobody waits for the next one to read this one."""
    shown = without_chatter(iter(["one", "two"]))
    assert next(iter(shown)) == "one"
