"""What a body may be on LiteLLM's port, read as it comes."""

import asyncio
import json
from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_mlx import request_body
from litellm_mlx.access import AdmissionPolicy
from litellm_mlx.proxy_gate import ProxyGate
from litellm_mlx.request_body import (
    MAX_VALUES,
    BadBody,
    Body,
    Disconnected,
    ProxyBodyBudget,
    ProxyBodyHead,
    ValueCounter,
)
from litellm_mlx.settings import Settings, read_settings
from testkit.json_marks import JSON, num_marks

CHAT = "/v1/chat/completions"
LIMIT = 8 << 20


@given(value=JSON, is_ascii=st.booleans(), cut=st.integers(1, 9))
def test_values_are_counted_however_the_text_is_cut(
    value: Any, is_ascii: bool, cut: int
) -> None:
    """What stands in strings does not count."""
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    counter, found = ValueCounter(), 1
    for start in range(0, len(text), cut):
        found = counter.add(text[start : start + cut])
    assert found == 1 + num_marks(value)


class Sender:
    """A client's body in pieces; counts those that were taken."""

    def __init__(self, *pieces: bytes, leaves: bool = False) -> None:
        self.num_taken = 0
        self._pieces, self._leaves = pieces, leaves

    async def receive(self) -> MutableMapping[str, Any]:
        if self.num_taken == len(self._pieces):
            return {"type": "http.disconnect"}
        piece = self._pieces[self.num_taken]
        self.num_taken += 1
        is_more = self._leaves or self.num_taken < len(self._pieces)
        return {"type": "http.request", "body": piece, "more_body": is_more}


def body(path: str = CHAT, kind: str = "application/json", limit: int = LIMIT) -> Body:
    return Body(ProxyBodyHead("POST", path, kind), ProxyBodyBudget(limit))


def read(sender: Sender, one: Body) -> bytes:
    return asyncio.run(one.read(sender.receive))


def test_an_object_is_handed_on_as_it_came() -> None:
    assert read(Sender(b' \n{"a"', b": 1", b"}"), body()) == b' \n{"a": 1}'
    assert read(Sender(b""), body()) == b""


@pytest.mark.parametrize("text", [b"[]", b"3", b"null", b'"x"', b" [{}]"])
def test_what_is_no_object_is_400(text: bytes) -> None:
    """LiteLLM takes it for one, and answers with 500."""
    with pytest.raises(BadBody, match="JSON object") as refused:
        read(Sender(text), body())
    assert refused.value.status == 400


@pytest.mark.parametrize("text", [b"{", b'{"a": "\xff"}', b'{"a":' * 3000, b"\xff{}"])
def test_what_is_no_json_is_400(text: bytes) -> None:
    for path in (CHAT, "/v1/rerank"):
        with pytest.raises(BadBody, match="must be JSON") as refused:
            read(Sender(text), body(path))
        assert refused.value.status == 400


def test_where_litellm_does_not_look_there_must_be_json() -> None:
    """No nothing and no form, whatever it holds."""
    for path in ("/v1/rerank", "/v2/rerank", "/v1/audio/speech"):
        assert read(Sender(b'{"a": 1}'), body(path)) == b'{"a": 1}'
        with pytest.raises(BadBody, match="must be JSON"):
            read(Sender(b""), body(path))
        with pytest.raises(BadBody, match="content type"):
            read(Sender(b"{}"), body(path, "application/x-www-form-urlencoded"))


def test_the_name_of_a_model_is_short() -> None:
    """LiteLLM repeats it in its error, and seeks secrets in that for seconds."""
    for name in ("m" * 513, "m" * (2 << 20)):
        with pytest.raises(BadBody, match="of at most 512"):
            read(Sender(json.dumps({"model": name}).encode()), body())
    text = json.dumps({"model": "m" * 512}).encode()
    assert read(Sender(text), body()) == text


def test_prompts_of_token_ids_may_be_longer() -> None:
    text = json.dumps({"prompt": [7] * (MAX_VALUES + 1)}).encode()
    assert read(Sender(text), body("/v1/completions")) == text
    with pytest.raises(BadBody, match="JSON values"):
        read(Sender(text), body())


def test_too_many_values_are_413_however_small_they_are() -> None:
    """The rest is read and thrown away, so that the answer is heard."""
    piece = b"[]," * (1 << 14)
    sender = Sender(b'{"a": [', *[piece] * 50, b"[]]}")
    with pytest.raises(BadBody, match=f"{MAX_VALUES} JSON values") as refused:
        read(sender, body())
    assert refused.value.status == 413
    assert sender.num_taken == 52


def test_a_body_without_end_is_left() -> None:
    """Once as much again as is allowed has come."""
    sender = Sender(*[b"x" * (1 << 20)] * 100, leaves=True)
    with pytest.raises(BadBody, match=f"{LIMIT} bytes"):
        read(sender, body())
    assert sender.num_taken <= 2 * (LIMIT >> 20) + 2


def test_a_form_is_short() -> None:
    path, kind = "/login", "application/x-www-form-urlencoded"
    assert read(Sender(b"a&b=1"), body(path, kind)) == b"a&b=1"
    with pytest.raises(BadBody) as refused:
        read(Sender(b"a&" * (1 << 20)), body(path, kind))
    assert refused.value.status == 413


def test_bodies_share_a_budget_and_give_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small ones are free of it."""
    monkeypatch.setattr(request_body, "_MIN_HELD_BYTES", 0)
    budget = ProxyBodyBudget(LIMIT)
    head = ProxyBodyHead("POST", CHAT, "")
    large = b'{"system": "' + b"x" * (LIMIT - 100) + b'"}'
    held = [Body(head, budget) for _ in range(4)]
    for one in held:
        assert read(Sender(large), one) == large
    with pytest.raises(BadBody, match="too many large bodies") as refused:
        read(Sender(large), Body(head, budget))
    assert refused.value.status == 503
    assert read(Sender(b"{}"), Body(head, budget)) == b"{}"
    for one in held:
        one.close()
        one.close()
    assert budget.held_bytes == 0


def test_who_leaves_before_the_end_is_not_passed_on() -> None:
    with pytest.raises(Disconnected):
        read(Sender(b'{"a"', leaves=True), body())


SCOPE = {"type": "http", "method": "POST", "path": CHAT}
HEADERS = [(b"host", b"127.0.0.1:4000")]


def ask(
    sender: Sender, kind: bytes = b"", path: str = CHAT, key: str | None = None
) -> Sequence[Any]:
    """What the app behind the gate read, and what the client was answered."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del scope
        seen.append(await receive())
        seen.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        seen.append(message.get("status") or json.loads(message["body"]))

    gate = ProxyGate(app, lambda: AdmissionPolicy(key), Settings(max_body_bytes=LIMIT))
    given = (b"authorization", f"Bearer {key}".encode())
    headers = [*HEADERS, (b"content-type", kind), given]
    scope = {**SCOPE, "path": path, "headers": headers}
    asyncio.run(gate(scope, sender.receive, send))
    assert gate._bodies.held_bytes == 0
    return seen


def test_the_app_reads_the_body_once_and_then_hears_the_client_leave() -> None:
    first, second, status = ask(Sender(b'{"a":', b"1}"))
    assert (first["body"], first["more_body"]) == (b'{"a":1}', False)
    assert (second["type"], status) == ("http.disconnect", 200)


def test_files_go_through() -> None:
    kind, path = b"multipart/form-data; boundary=x", "/v1/audio/transcriptions"
    first, _, status = ask(Sender(b"[", b"]"), kind, path)
    assert (first["body"], status) == (b"[]", 200)


def test_what_is_asked_of_no_model_goes_through_as_it_comes() -> None:
    """With the user's key: a list of his settings, a file for a cloud."""
    first, *_, status = ask(Sender(b"[", b"]"), path="/guardrails/apply", key="sk-1")
    assert (first["body"], status) == (b"[]", 200)
    kind = b"multipart/form-data; boundary=x"
    path = "/openai/v1/files"
    first, second, status = ask(Sender(b"[", b"]"), kind, path, key="sk-1")
    assert (first["body"], second["body"], status) == (b"[", b"]", 200)
    assert ask(Sender(b"[]"), path="/v1/moderations", key="sk-1")[0] == 400


OTHERS = ["/cursor/chat/completions", "/openai/v1/responses", "/v1beta/interactions"]


@pytest.mark.parametrize("path", OTHERS)
def test_routes_that_ask_models_elsewhere_are_held_to_the_same(path: str) -> None:
    """They come to a key's owner; what they say becomes arguments as well."""
    for body in (b'{"cooldown_time": 40}', b'{"extra_headers": {"api-key": "x"}}',
                 b'{"messages": [' + b"{}," * 10_000 + b"{}]}"):  # fmt: skip
        status, problem = ask(Sender(body), path=path, key="sk-1")
        assert status == 400
        assert "must be" in str(problem)


def test_no_route_parses_more_values_than_any_needs() -> None:
    """LiteLLM parses a body before it asks for a key."""
    many = b"[" + b"[]," * 260_000 + b"[]]"
    for path in ("/key/generate", "/v2/login", "/guardrails/apply"):
        assert ask(Sender(many), path=path, key="sk-1")[0] == 413


def test_a_refusal_has_the_shape_of_the_route() -> None:
    status, problem = ask(Sender(b"[]"))
    assert (status, problem["error"]["code"]) == (400, "invalid_request")
    status, problem = ask(Sender(b"[]"), path="/v1/messages")
    assert (status, problem["error"]["type"]) == (400, "invalid_request_error")
    status, problem = ask(Sender(b"[]"), path="/v1beta/models/x:generateContent")
    assert (status, problem["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert ask(Sender(b"{", leaves=True)) == []


def test_the_limit_is_the_sidecars() -> None:
    assert read_settings({"MAX_BODY_MB": "3"}).max_body_bytes == 3 << 20
    assert read_settings({}).max_body_bytes == 64 << 20
    with pytest.raises(ValueError, match="MAX_BODY_MB"):
        read_settings({"MAX_BODY_MB": "0"})


FORMS = [
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/json, application/x-www-form-urlencoded",
]  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
def test_what_the_sidecar_serves_is_asked_in_json(kind: str) -> None:
    """A form would not be looked at, and LiteLLM reads it all the same."""
    with pytest.raises(BadBody, match="must be application/json"):
        read(Sender(b'{"a": 1}'), body(kind=kind))


def test_a_parameter_of_the_type_makes_no_form_of_it() -> None:
    kind = "application/json; a=x-www-form-urlencoded"
    with pytest.raises(BadBody, match="cooldown_time"):
        read(Sender(b'{"cooldown_time": 9}'), body(kind=kind))


def test_files_bring_no_settings_of_litellms() -> None:
    """In a form with files, too, where that is taken."""
    path, kind = "/v1/audio/transcriptions", "multipart/form-data; boundary=x"
    part = b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\nopenai\r\n--x--'
    with pytest.raises(BadBody) as refused:
        read(Sender(part % b"custom_llm_provider"), body(path, kind))
    assert refused.value.param == "custom_llm_provider"
    assert read(Sender(part % b"model"), body(path, kind)) == part % b"model"


@pytest.mark.parametrize(
    "head",
    [
        b'Content-Disposition: form-data; name = "custom_llm_provider"',
        b"content-disposition : form-data; NAME=custom_llm_provider",
        b"Content-Disposition: form-data; name=\tcustom_llm_provider",
        b"Content-Disposition: form-data; name*=utf-8''custom%5Fllm_provider",
        b"Content-Disposition: form-data; name*0=custom_; name*1=llm_provider",
        b'Content-Disposition: form-data; name="file"; name="custom_llm_provider"',
        b'Content-Disposition: form-data; name="custom_llm_provider[]"',
    ],
)
def test_a_field_is_found_however_it_is_written(head: bytes) -> None:
    """As the form's own parser reads it."""
    path, kind = "/v1/audio/transcriptions", "multipart/form-data; boundary=x"
    form = b"--x\r\nContent-Type: text/plain\r\n" + head + b"\r\n\r\nopenai\r\n--x--"
    with pytest.raises(BadBody) as refused:
        read(Sender(form), body(path, kind))
    assert refused.value.param == "custom_llm_provider"


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (b'--x\r\ncontent-disposition: a; name="' + b'\\";' * 60_000, "boundary=x"),
        (b"\ncontent-disposition: a" * 257, "boundary=x"),
        (b"", "boundary=x" + ";" * 2000),
    ],
    ids=["line", "parts", "type"],
)
def test_a_form_is_looked_at_no_longer_than_it_may_be(form: bytes, kind: str) -> None:
    """The standard parser takes time that grows with the square of a line."""
    path, kind = "/v1/audio/transcriptions", f"multipart/form-data; {kind}"
    with pytest.raises(BadBody) as refused:
        read(Sender(form), body(path, kind))
    assert refused.value.status == 400


def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it took is free for others."""
    monkeypatch.setattr(request_body, "_GAP_S", 0.01)
    one = body(limit=4 << 20)

    class Silent(Sender):
        async def receive(self) -> MutableMapping[str, Any]:
            if self.num_taken == 1:
                await asyncio.Event().wait()
            return await super().receive()

    with pytest.raises(BadBody) as refused:
        read(Silent(b'"' + b"x" * (3 << 20), leaves=True), one)
    assert refused.value.status == 408
    assert one._budget.held_bytes > 0
    one.close()
    assert one._budget.held_bytes == 0


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"\ude00\ud83d", "\ufffd\ufffd"),
        (rb"\ud83d\ude00", "\U0001f600"),
        (rb"\ud800\\ud83d", "\ufffd\\ud83d"),
        (rb"\\ud83d\ude00", "\\ud83d\ufffd"),
        (rb"\\\ud83d", "\\\ufffd"),
    ],
)
def test_half_a_surrogate_pair_is_read_and_handed_on(sent: bytes, read: str) -> None:
    """JavaScript writes it; LiteLLM's parser refuses it, at each later turn."""
    whole, value = request_body._parsed(b'{"said": "' + sent + b'"}')
    assert value == {"said": read}
    assert json.loads(whole) == value
