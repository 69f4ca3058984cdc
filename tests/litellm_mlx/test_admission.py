"""Which requests LiteLLM's port lets in, by their heads."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from litellm_mlx import proxy_gate
from litellm_mlx.access import AdmissionPolicy, Asked, refusal

OWN = {"host": "127.0.0.1:4000"}
KEYLESS = AdmissionPolicy(None)
KEYED = AdmissionPolicy("sk-mine")
CHAT = "/v1/chat/completions"


def kind_of(
    policy: AdmissionPolicy, path: str = CHAT, method: str = "POST", **headers: str
) -> str | None:
    """Why it is refused; `_` in names of headers for `-`."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    why = refusal(Asked(method, path, {**OWN, **named}), policy)
    return why.kind if why else None


@pytest.mark.parametrize("policy", [KEYLESS, KEYED], ids=["keyless", "keyed"])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "http://localhost:4000"},
        {"origin": "http://127.0.0.1:4000, https://evil.example"},
        {"origin": ""},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "none, cross-site"},
    ],
)
def test_pages_of_other_origins_stay_out(
    policy: AdmissionPolicy, headers: Mapping[str, str]
) -> None:
    """With the right key, too: a page has no business with it."""
    for path in (CHAT, "/health/liveliness", "/ui", "/"):
        key = {"authorization": "Bearer sk-mine"}
        assert kind_of(policy, path, **key, **headers) == "forbidden"


def test_a_chosen_page_may_ask_whether_it_may_ask() -> None:
    """A browser gives no key then; what it asks for afterwards needs one."""
    page = "http://webui.lan:3000"
    policy = AdmissionPolicy("sk-mine", origins=(page,))
    asks = {"access_control_request_method": "POST"}
    assert kind_of(policy, method="OPTIONS", origin=page, **asks) is None
    assert kind_of(policy, method="OPTIONS", origin="http://x", **asks) == "forbidden"
    assert kind_of(policy, method="OPTIONS", origin=page) == "unauthorized"
    assert kind_of(policy, method="POST", origin=page, **asks) == "unauthorized"


def test_programs_own_pages_and_chosen_origins_come_in() -> None:
    assert kind_of(KEYLESS) is None
    assert kind_of(KEYLESS, origin="http://127.0.0.1:4000") is None
    assert kind_of(KEYLESS, sec_fetch_site="same-origin") is None
    assert kind_of(KEYLESS, sec_fetch_site="none") is None
    chosen = AdmissionPolicy(None, origins=("http://webui.lan:3000",))
    assert kind_of(chosen, origin="http://webui.lan:3000") is None
    assert kind_of(chosen, origin="http://webui.lan") == "forbidden"


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost:4000", True), ("127.0.0.1", True), ("[::1]:4000", True),
        ("192.168.1.7:4000", True), ("LOCALHOST", True), ("box.lan:4000", True),
        ("host.docker.internal:4000", True),
        ("evil.example:4000", False), ("127.0.0.1.evil.example", False),
        ("localhost:4000, evil.example", False), ("", False), ("[::1", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", [None, "sk-mine"], ids=["keyless", "keyed"])
@pytest.mark.parametrize("path", [CHAT, "/health/liveliness", "/ui/", "/", "/prompts"])
def test_the_name_must_be_this_machines(
    path: str, key: str | None, host: str, is_own: bool
) -> None:
    """On every route, with a key or none: a rebound name is its page's own origin."""
    policy = AdmissionPolicy(key, hosts=("box.lan",))
    for headers in ({}, {"authorization": "Bearer sk-mine"}):
        kind = kind_of(policy, path, host=host, **headers)
        is_shut = key is None and path in ("/ui/", "/prompts")
        assert (kind == "forbidden") is (is_shut or not is_own)


@pytest.mark.parametrize(
    "page",
    [{"origin": "http://host.docker.internal:4000"}, {"sec_fetch_site": "same-origin"}],
)
def test_a_name_for_containers_is_no_pages(page: Mapping[str, str]) -> None:
    """A browser here asks the network's resolver for it, which may answer anything."""
    host = "host.docker.internal:4000"
    assert kind_of(KEYLESS, host=host, **page) == "forbidden"
    assert kind_of(KEYLESS, host=host) is None
    chosen = AdmissionPolicy(None, hosts=("host.docker.internal",))
    assert kind_of(chosen, host=host, **page) is None


def test_a_path_names_one_model() -> None:
    """LiteLLM asks each of a list."""
    path = "/openai/deployments/local,cloud/chat/completions"
    assert kind_of(KEYLESS, path) == "forbidden"


@pytest.mark.parametrize("path", ["/openai/deployments/local/x", "/engines/local/x"])
def test_what_is_passed_to_a_cloud_unless_posted_is_posted(path: str) -> None:
    path = path.replace("/x", "/chat/completions")
    assert kind_of(KEYLESS, path, method="POST") is None
    assert kind_of(KEYLESS, path, method="GET") == "forbidden"


@pytest.mark.parametrize(
    "path",
    [
        CHAT, "/chat/completions", "/v1/completions", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/resp_1",
        "/v1/models", "/v1/models/local", "/v1/embeddings", "/v1/rerank",
        "/v1/audio/speech", "/v1beta/models/local:generateContent",
        "/models/local:streamGenerateContent", "/engines/local/completions",
        "/openai/deployments/local/chat/completions", "/health/readiness", "/",
    ],
)  # fmt: skip
def test_without_a_key_what_a_local_user_needs_is_open(path: str) -> None:
    assert kind_of(KEYLESS, path) is None


@pytest.mark.parametrize(
    "path",
    [
        "/prompts/test", "/anthropic/v1/messages", "/openai/v1/chat/completions",
        "/gemini/v1beta/models/x:generateContent", "/vertex_ai/live", "/bedrock/x",
        "/v1/moderations", "/health", "/key/generate", "/config/update", "/model/new",
        "/v1/files",
        "/mcp", "/ui", "/sso/key/generate", "/v1/realtime", "//v1/chat/completions",
        "/v1/chat/completions/", "/V1/models", "/v1/messages/../../prompts/test",
        "/v1/models\\n/prompts/test",
    ],
)  # fmt: skip
def test_without_a_key_all_else_is_shut(path: str) -> None:
    """Cloud routes on the user's keys, rendering, management, pages."""
    assert kind_of(KEYLESS, path) == "forbidden"


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-mine"},
        {"authorization": "bearer sk-mine"},
        {"x_api_key": "sk-mine"},
        {"x_goog_api_key": "sk-mine"},
        {"api_key": "sk-mine"},
        {"x_litellm_api_key": "Bearer sk-mine"},
    ],
)
def test_a_key_may_come_as_any_client_sends_it(headers: Mapping[str, str]) -> None:
    assert kind_of(KEYED, **headers) is None
    wrong = {name: text.replace("mine", "yours") for name, text in headers.items()}
    assert kind_of(KEYED, **wrong) == "unauthorized"


def test_a_key_is_asked_for_everywhere_but_where_nothing_is_to_be_had() -> None:
    for path in (CHAT, "/prompts/test", "/anthropic/v1/messages", "/health"):
        assert kind_of(KEYED, path) == "unauthorized"
    for path in ("/", "/health/liveliness", "/ui/", "/openapi.json"):
        assert kind_of(KEYED, path) is None


def test_a_key_in_the_query_is_googles_way() -> None:
    asked = Asked("POST", "/v1beta/models/x:generateContent", OWN, "sk-mine")
    assert refusal(asked, KEYED) is None


def test_keys_that_others_gave_out_are_theirs_to_check() -> None:
    """A database of virtual keys, single sign-on: LiteLLM asks them."""
    others = AdmissionPolicy("sk-mine", has_other_keys=True)
    assert kind_of(others, authorization="Bearer sk-virtual") is None
    assert kind_of(others, origin="https://evil.example") == "forbidden"


def test_outside_the_proxy_there_is_nothing_to_guard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(proxy_gate.sys.modules, proxy_gate._SERVER, raising=False)
    proxy_gate.install()


@pytest.mark.parametrize("is_started", [False, True])
def test_it_is_put_in_place_once_before_or_after_the_start(
    is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app's own stack stays inside."""
    from fastapi import FastAPI

    app = FastAPI()
    if is_started:
        app.middleware_stack = app.build_middleware_stack()
    server: Any = SimpleNamespace(app=app, general_settings={}, master_key=None)
    monkeypatch.setitem(proxy_gate.sys.modules, proxy_gate._SERVER, server)
    for _ in range(2):
        proxy_gate.install()
    stack = app.middleware_stack or app.build_middleware_stack()
    gates = 0
    while stack is not None:
        gates += isinstance(stack, proxy_gate.ProxyGate)
        stack = getattr(stack, "_app", None) or getattr(stack, "app", None)
    assert gates == 1


@pytest.mark.parametrize(
    "host", ["0.0.0.0:4000", "[::ffff:127.0.0.1]:4000", "10.0.0.7"]
)
def test_a_browser_that_does_not_say_for_whom_stays_out(host: str) -> None:
    """An image of a page: to such addresses no header tells whose."""
    browser = {"host": host, "user-agent": "Mozilla/5.0 (X11) Chrome/156"}
    path = "/v1/responses/resp_1"
    assert kind_of(KEYLESS, path, **browser) == "forbidden"
    assert kind_of(KEYLESS, path, host=host, **{"user-agent": "curl/8"}) is None
    own = {**browser, "host": "127.0.0.1:4000"}
    assert kind_of(KEYLESS, path, **own) is None
