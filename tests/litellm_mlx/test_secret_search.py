"""What a client wrote is looked through for secrets, and holds nobody."""

import re

import pytest
from litellm.litellm_core_utils import secret_redaction, token_counter

from litellm_mlx import answers, image_sizes, secret_search
from litellm_mlx.secret_search import BoundedSearch
from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.proxy_client import CHAT, HI, RESPONSES

LONG_WORDS = ["a" * 80_000, "-----BEGIN PRIVATE KEY-----" * 3000, "http://a:" * 8000]


class Seen:
    """A pattern that keeps what it was asked."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def sub(self, replacement: str, text: str) -> str:
        self.texts.append(text)
        return text.replace("sk-1", replacement)


def test_a_long_text_is_cut_before_it_is_searched() -> None:
    seen = Seen()
    text = "sk-1" + "a" * 50_000 + "sk-1"
    found = BoundedSearch(seen).sub("GONE", text)
    assert found.startswith("GONEaaa")
    assert found.endswith("aaaGONE")
    assert "characters) .." in found
    assert max(map(len, seen.texts)) <= 4096


def test_many_private_keys_are_one_secret() -> None:
    seen = Seen()
    assert BoundedSearch(seen).sub("GONE", "-----begin private key-----" * 9) == "GONE"
    assert not seen.texts


def test_litellm_searches_so_and_still_finds_secrets() -> None:
    secret_search.install()
    secret_search.install()
    pattern = getattr(secret_redaction, "_SECRET_RE")  # noqa: B009
    assert isinstance(pattern, BoundedSearch)
    assert isinstance(pattern.pattern, str)
    assert isinstance(pattern._pattern, re.Pattern)
    text = secret_redaction.python_redact_string("api_key=abcdefghijkl and more")
    assert "abcdefghijkl" not in text
    assert text.endswith("and more")


def test_a_long_word_is_no_error_of_the_sidecar() -> None:
    for word in LONG_WORDS:
        assert answers._of_sidecar(word) is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("word", LONG_WORDS, ids=["letters", "keys", "addresses"])
def test_a_word_that_is_repeated_holds_the_proxy_no_longer_than_others(
    proxy: Proxy, word: str
) -> None:
    body = {"model": "local", "messages": HI, "tool_choice": {"type": word}}
    assert proxy.http.post(CHAT, json=body, timeout=20).status_code == 400
    tools = [{"type": "mcp", "server_url": f"litellm_proxy/mcp/{word}"}]
    body = {"model": "local", "input": "hi", "tools": tools}
    assert proxy.http.post(RESPONSES, json=body, timeout=20).status_code >= 400
    path = "/v1beta/models/local:generateContent"
    body = {"contents": [{"parts": [{word: 1}]}]}
    answer = proxy.http.post(path, json=body, timeout=20)
    assert answer.status_code == 400
    assert len(answer.content) < 5000


def test_no_picture_is_fetched_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[object] = []
    monkeypatch.setattr(token_counter, "safe_get", lambda *what: fetched.append(what))
    image_sizes.install()
    image_sizes.install()
    measure = token_counter.get_image_dimensions
    usual = measure("https://example.com/a.png")
    assert measure("data:;;;,A") == measure("nothing") == usual
    gif = (
        "data:image/gif;base64,R0lGODlhAwAFAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"
    )
    assert measure(gif) == (3, 5)
    assert fetched == []
