"""What a client wrote is looked through for secrets, and holds nobody."""

import re

import pytest
from litellm.litellm_core_utils import (
    logging_utils,
    secret_redaction,
    token_counter,
)

from litellm_mlx import (
    answers,
    fallback_policy,
    image_sizes,
    litellm_patterns,
)
from litellm_mlx.litellm_patterns import BoundedSearch
from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.proxy_client import CHAT, HI, RESPONSES

LONG_WORDS = {
    "letters": "a" * 60_000,
    "keys": "-----BEGIN PRIVATE KEY-----" * 2000,
    "ends of keys": "-----BEGIN" * 170 + "PRIVATE KEY-----" * 4 + "-----END" * 190,
    "addresses": "http://a:" * 7000,
    "answers": "(sidecar answered 1, " + "a" * 60_000,
}


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


def test_all_behind_the_beginning_of_a_key_is_a_secret() -> None:
    seen = Seen()
    text = "it is: " + "-----begin" * 99 + "private key-----" + "-----END" * 99
    assert BoundedSearch(seen).sub("GONE", text) == "it is: GONE"
    assert seen.texts == ["it is: "]


def test_litellm_searches_so_and_still_finds_secrets() -> None:
    litellm_patterns.install()
    litellm_patterns.install()
    pattern = getattr(secret_redaction, "_SECRET_RE")  # noqa: B009
    assert isinstance(pattern, BoundedSearch)
    assert isinstance(pattern.pattern, str)
    assert isinstance(pattern._pattern, re.Pattern)
    text = secret_redaction.python_redact_string("api_key=abcdefghijkl and more")
    assert "abcdefghijkl" not in text
    assert text.endswith("and more")


def test_a_long_word_is_no_error_of_the_sidecar() -> None:
    for word in LONG_WORDS.values():
        assert answers._of_sidecar(word) is None
        assert not fallback_policy._is_too_long(ValueError(), word)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", LONG_WORDS)
def test_a_word_that_is_repeated_holds_the_proxy_no_longer_than_others(
    proxy: Proxy, kind: str
) -> None:
    word = LONG_WORDS[kind]
    body = {"model": "local", "messages": HI, "tool_choice": {"type": word}}
    assert proxy.http.post(CHAT, json=body, timeout=20).status_code == 400
    tools = [{"type": "mcp", "server_url": f"litellm_proxy/mcp/{word[:2000]}"}]
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


@pytest.mark.timeout(60)
def test_pictures_and_patterns_are_found_in_linear_time() -> None:
    litellm_patterns.install()
    cut = logging_utils.truncate_base64_in_messages
    text = "data:" * 400_000
    messages = [{"role": "user", "content": text}]
    assert cut(messages)[0]["content"] == text
    picture = "data:image/png;base64," + "A" * 4000
    said = cut([{"role": "user", "content": f"see {picture} here"}])[0]["content"]
    assert said.startswith("see data")
    assert "AAAA" * 500 not in said
    assert litellm_patterns.is_no_pattern("(a")
    assert litellm_patterns.is_no_pattern("a" * 9000)
    assert not litellm_patterns.is_no_pattern("(?i)" + "[\u0001-\uffff]" * 1000)
