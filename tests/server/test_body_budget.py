"""What bodies and heads may take, each by what it becomes, and all of them together."""

import http.client
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.app import App
from sidecar.core.errors import PayloadTooLarge, Unavailable
from sidecar.server import request_body
from sidecar.server.request_body import MAX_VALUES, BodyBudget, BodyShare, count_values
from sidecar.server.request_head import HeadReader
from testkit.json_marks import JSON, num_marks
from testkit.raw_http import eventually, exchange, request
from testkit.servers import running_sidecar

CHAT = "/v1/chat/completions"


class TestCount:
    @given(value=JSON, is_ascii=st.booleans(), cut=st.integers(1, 9))
    def test_strings_do_not_count(self, value: Any, is_ascii: bool, cut: int) -> None:
        """However the text is cut into slices, and whatever stands in its strings."""
        text = json.dumps(value, ensure_ascii=is_ascii).encode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request_body, "_SLICE", cut)
            found = request_body._count_outside_strings(text, 1 << 40)
        assert found == 1 + num_marks(value)

    def test_prose_with_commas_is_one_string(self) -> None:
        body = json.dumps({"content": "a, b: [c], {d}, " * 500_000}).encode()
        assert count_values(body, 1000) == 3

    def test_it_stops_where_it_is_too_much(self) -> None:
        """At the end of the slice in which the limit was passed."""
        assert 1000 < count_values(b"[" + b"[]," * (10 << 20), 1000) < 1 << 17


class TestBudget:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the least that is always there."""
        monkeypatch.setattr(request_body, "_MIN", 0)

    def test_large_bodies_are_bounded_together(self) -> None:
        """Five do not fit where four do; small ones do all the same."""
        budget = BodyBudget(8 << 20)
        shares = [BodyShare(budget) for _ in range(4)]
        for share in shares:
            share.grow(9 << 20)
        with BodyShare(budget) as fifth:
            fifth.grow(1 << 20)
            with pytest.raises(Unavailable) as refused:
                fifth.grow(1)
            assert refused.value.retry_after_s
        shares[0].__exit__(None, None, None)
        with BodyShare(budget) as fifth:
            fifth.grow(9 << 20)
        for share in shares:
            share.__exit__(None, None, None)
        assert budget.used_bytes == 0

    def test_what_it_becomes_counts(self) -> None:
        """A list of empty lists takes far more than its bytes."""
        budget = BodyBudget(64 << 20)
        with BodyShare(budget) as share:
            share.weigh(b"[" + b"[]," * 400_000 + b"[]]")
            assert budget.used_bytes > 400_000 * 64
        assert budget.used_bytes == 0

    def test_too_many_values_are_refused(self) -> None:
        with BodyShare(BodyBudget(64 << 20)) as share, pytest.raises(PayloadTooLarge):
            share.weigh(b"[" + b"[]," * MAX_VALUES + b"[]]")


def test_a_head_is_bounded_while_it_is_read() -> None:
    """Not behind a hundred lines of 64 KiB."""
    raw = io.BytesIO(b"".join(b"X-%d: %s\r\n" % (n, b"a" * 64_000) for n in range(99)))
    stream: Any = io.BufferedReader(raw, 4096)
    with pytest.raises(http.client.HTTPException, match="must be at most"):
        http.client.parse_headers(HeadReader(stream, b"GET / HTTP/1.1\r\n"))  # type: ignore[arg-type]
    assert raw.tell() < 3 * 65_536


@pytest.fixture(scope="module")
def server(model_folder: Callable[[str], Path]) -> Iterator[App]:
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        yield app


def test_a_body_of_empty_lists_is_not_parsed(server: App) -> None:
    """60 MiB of them were 2.4 GiB, and three seconds in which nobody was answered."""
    body = b'{"messages":[' + b"[]," * (20 << 20) + b"[]]}"
    answer = exchange(server.listener.port, request(CHAT, body))
    assert answer.status == 413
    assert "JSON values" in answer.json["error"]["message"]
    assert eventually(lambda: server.listener.bodies.used_bytes == 0)


def test_small_bodies_are_served_beside_large_ones(server: App) -> None:
    """All the memory for large ones is taken: 503 for one more, and only for that."""
    bodies, port = server.listener.bodies, server.listener.port
    said = {"role": "user", "content": "x"}
    small = json.dumps({"messages": [said], "max_tokens": 1}).encode()
    bodies.take(taken := bodies._max)
    refused = exchange(port, request(CHAT, small + b" " * (2 << 20)))
    assert (refused.status, refused.header("retry-after")) == (503, "2")
    assert exchange(port, request(CHAT, small)).status == 200
    bodies.take(-taken)
    assert exchange(port, request(CHAT, small + b" " * (2 << 20))).status == 200
    assert eventually(lambda: bodies.used_bytes == 0)
