"""Bodies that LiteLLM would answer with 500: 400 before it sees them, by name."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from litellm_mlx.body_types import rules_for, wrong_field
from litellm_mlx.control_fields import NEVER, NOT_FOR_CLIENTS, retries_fault
from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.fake_sidecar import FakeSidecar
from tests.litellm_mlx.proxy_client import (
    CHAT,
    MESSAGES,
    RESPONSES,
    ROUTES,
    body_for,
)

SIZE = "at most 10000 messages, parts and calls"
MANY = f"a non-empty list of {SIZE}"
LINES = "an object of texts of one line"
NESTED = {"a": [{"b": [[{"c": None}]]}]}
# Each was 500 through LiteLLM; on which routes, what is wrong, what it takes.
WRONG: list[tuple[tuple[str, ...], str, Any, str]] = [
    (ROUTES, "tools", 3, "a list of objects, got a number"),
    (ROUTES, "tools", True, "a list of objects, got a boolean"),
    ((MESSAGES,), "tools", [None], "a list of objects, got a list of null"),
    ((MESSAGES,), "tools", NESTED, "a list of objects, got an object"),
    (ROUTES, "tags", [NESTED], "a list of at most 64 short strings"),
    ((MESSAGES, RESPONSES), "tags", "x", "a list of at most 64 short strings"),
    ((CHAT,), "headers", "x", LINES),
    (ROUTES, "extra_body", "x", "an object without model"),
    ((CHAT,), "extra_headers", [3], LINES),
    (
        ROUTES,
        "extra_headers",
        {"Authorization": "Bearer x"},
        "an object of texts of one line",
    ),
    (ROUTES, "headers", {"X-Api-Key": "x"}, LINES),
    (
        ROUTES,
        "extra_headers",
        {"openai-organization": "x"},
        "an object of texts of one line",
    ),
    (ROUTES, "headers", {"Host": "x"}, LINES),
    ((CHAT, MESSAGES), "messages", [{}] * 10_001, MANY),
    ((CHAT, MESSAGES), "messages", [{"content": [{}] * 10_000}], MANY),
    ((CHAT, MESSAGES), "messages", [{"tool_calls": [{}] * 10_000}], MANY),
    ((RESPONSES,), "input", [{}] * 10_001, f"a string or a list of {SIZE}"),
    (ROUTES, "text_format", "a", "left out: it is not for clients"),
    (ROUTES, "api_key", 3, "a string, got a number"),
    (ROUTES, "request_timeout", "x", "a number of seconds above 0"),
    (ROUTES, "timeout", NESTED, "a number of seconds above 0"),
    (ROUTES, "max_retries", "x", "a whole number from 0 to 10, got a string"),
    (ROUTES, "num_retries", [], "a whole number from 0 to 10, got an empty list"),
    (ROUTES, "additional_drop_params", ["a"] * 9, "left out: it is not for clients"),
    (ROUTES, "success_callback", ["posthog"], "left out: it is not for clients"),
    (ROUTES, "cache_control_injection_points", [{}], "left out: it is not for"),
    (ROUTES, "specific_deployment", True, "left out: it is not for clients"),
    (ROUTES, "aws_region_name", 5, "left out: it is not for clients"),
    (ROUTES, "_litellm_anything", 5, "left out: it is not for clients"),
    (ROUTES, "tags", ["t"] * 65, "a list of at most 64 short strings"),
    (ROUTES, "litellm_metadata", {"tags": ["t"] * 65}, "without a user of more"),
    ((CHAT, RESPONSES), "metadata", {"tags": ["t"] * 65}, "without a user_id of"),
    (ROUTES, "extra_headers", dict.fromkeys(map(str, range(65)), "a"), "an object of"),
    (ROUTES, "timeout", -5, "a number of seconds above 0"),
    (ROUTES, "timeout", 0, "a number of seconds above 0"),
    (ROUTES, "extra_headers", {"a": "b\r\nc: d"}, LINES),
    (ROUTES, "extra_body", {"model": "other"}, "an object without model"),
    (ROUTES, "extra_body", {"stream": True}, "an object without model"),
    (ROUTES, "api_version", {}, "a string, got an object"),
    (ROUTES, "num_retries", 11, "a whole number from 0 to 10, got a number"),
    (ROUTES, "max_retries", -1, "a whole number from 0 to 10, got a number"),
    (ROUTES, "litellm_params", {}, "left out: it is not for clients"),
    (ROUTES, "litellm_logging_obj", "x", "left out: it is not for clients"),
    (ROUTES, "input_cost_per_token", 0, "left out: it is not for clients"),
    (ROUTES, "context_window_fallback_dict", {"a": "b"}, "left out: it is not"),
    (ROUTES, "litellm_trace_id", 3, "a string, got a number"),
    (ROUTES, "allowed_openai_params", [{}], "a list of at most 64 short"),
    (ROUTES, "response_format", "json", "an object, got a string"),
    (ROUTES, "stream_options", [3], "an object, got a list of a number"),
    ((CHAT, RESPONSES), "prompt_id", 3, "a string, got a number"),
    ((CHAT,), "web_search_options", None, "an object, got null"),
    ((CHAT, MESSAGES), "messages", None, f"{MANY}, got null"),
    ((CHAT, MESSAGES), "messages", [], f"{MANY}, got an empty"),
    ((CHAT, MESSAGES), "messages", [3], f"{MANY}, got a list"),
    ((MESSAGES,), "tool_choice", "any", "an object, got a string"),
    ((MESSAGES,), "context_management", [], "an object, got an empty list"),
    (
        (RESPONSES,),
        "input",
        3,
        "a string or a list of at most 10000 messages, parts and calls, got",
    ),
    ((RESPONSES,), "stream", "x", "true or false, got a string"),
]
CASES = [(route, *rest) for routes, *rest in WRONG for route in routes]
# Only an administrator may set these: LiteLLM's own refusal.
ADMINS = ("api_base", "base_url")


def post(proxy: Proxy, route: str, model: str, **more: Any) -> httpx.Response:
    body = {**body_for(route, model, stream=False), **more}
    return proxy.http.post(route, json=body)


def assert_400(
    answer: httpx.Response, route: str, param: str | None, *said: str
) -> None:
    """In the route's shape, with the field where the shape has a place for it."""
    assert answer.status_code == 400, answer.text
    body = answer.json()
    error = body["error"]
    assert all(part in error["message"] for part in said), error
    assert error["type"] == "invalid_request_error"
    if route == MESSAGES:
        assert body["type"] == "error"
    else:
        assert (error["param"], error["code"]) == (param, "invalid_request")


@pytest.mark.parametrize(("route", "name", "value", "takes"), CASES)
def test_a_wrong_type_is_400_that_names_the_field_and_what_it_takes(
    proxy: Proxy, sidecar: FakeSidecar, route: str, name: str, value: Any, takes: str
) -> None:
    """Nothing is asked, no deployment is blamed for it."""
    model = f"typed-{name}"
    before = len(sidecar.calls_for(model))
    for kind in ("mlx", "native"):
        answer = post(proxy, route, f"{kind}/{model}", **{name: value})
        assert_400(answer, route, name, f"{name} must be {takes}")
    assert len(sidecar.calls_for(model)) == before


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        ("/v1/completions", "messages", []),
        ("/v1/completions", "messages", None),
        ("/v1/embeddings", "input", [[]]),
        ("/v1/embeddings", "input", 3),
    ],
)
def test_other_routes_too(proxy: Proxy, route: str, field: str, value: Any) -> None:
    """LiteLLM's 500, or an answer to nothing."""
    body = {"model": "mlx/odd", "prompt": "hi", field: value}
    assert_400(proxy.http.post(route, json=body), route, field, f"{field} must be")


@pytest.mark.parametrize("contents", [None, 3, [[]]])
@pytest.mark.parametrize(
    "verb", ["generateContent", "streamGenerateContent", "countTokens"]
)
def test_googles_contents(proxy: Proxy, verb: str, contents: Any) -> None:
    """Null was a 500; told in Google's shape."""
    body = {"contents": contents}
    answer = proxy.http.post(f"/v1beta/models/odd:{verb}", json=body)
    assert answer.status_code == 400, answer.text
    assert "contents must be an object, a text, or a list" in answer.text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/rerank", {"query": "hi", "documents": ["a"]}),
        ("/v1/images/generations", {"prompt": "a cat"}),
        ("/v1/audio/speech", {"input": "hi", "voice": "a"}),
        ("/v1/responses/compact", {"input": "hi"}),
    ],
)
def test_what_no_local_model_serves_is_501(proxy: Proxy, route: str, body: Any) -> None:
    """LiteLLM's answer was 500, with a traceback."""
    answer = proxy.http.post(route, json={"model": "mlx/odd", **body})
    assert answer.status_code == 501, answer.text
    assert answer.json()["error"]["message"] == f"a local model does not serve {route}"


@pytest.mark.parametrize("name", ["deployment_id", "custom_llm_provider"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_request_for_the_local_model_is_not_sent_to_a_cloud(
    proxy: Proxy, route: str, name: str
) -> None:
    """By a field of its body LiteLLM would send it to Azure, on the user's key."""
    answer = post(proxy, route, "mlx/stays", **{name: "azure"})
    assert_400(answer, route, name, f"{name} must be left out")


EXPONENTIAL = {
    "$defs": {
        f"d{depth}": {"allOf": [{"$ref": f"#/$defs/d{depth + 1}"}] * 2}
        for depth in range(40)
    }
    | {"d40": {}},
    "$ref": "#/$defs/d0",
}


@pytest.mark.parametrize("where", ["", "extra_body", "litellm_params"])
@pytest.mark.parametrize("route", [CHAT, "/engines/odd/chat/completions"])
def test_no_schema_of_a_client_is_walked_by_litellm(
    proxy: Proxy, route: str, where: str
) -> None:
    """A schema of 3 kB held the port for ever; it read addresses, too."""
    asked: dict[str, Any] = {"enable_json_schema_validation": True}
    schema = {"name": "x", "schema": EXPONENTIAL}
    body = {
        "model": "mlx/odd",
        "messages": [{"role": "user", "content": "1"}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        **({where: asked} if where else asked),
    }
    answer = proxy.http.post(route, json=body, timeout=60)
    if where != "extra_body":  # which LiteLLM gives to the provider alone
        assert answer.status_code == 400, answer.text
        assert "must be left out: it is not for clients" in answer.text
    assert proxy.http.get("/health/liveliness", timeout=5).status_code == 200


@pytest.mark.parametrize("said", ["1000000000", "-1", "x", "1.5", "", "١", "1" * 5000])
@pytest.mark.parametrize("route", ROUTES)
def test_litellm_tries_again_ten_times_at_most(
    proxy: Proxy, route: str, said: str
) -> None:
    """It went on for an hour after its clients had left."""
    body = body_for(route, "mlx/odd", stream=False)
    headers = {"x-litellm-num-retries": said.encode()}
    answer = proxy.http.post(route, json=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert "x-litellm-num-retries must be a whole number from 0 to 10" in answer.text
    assert retries_fault(None) is retries_fault("10") is retries_fault(" 0 ") is None


@pytest.mark.parametrize("name", ADMINS)
@pytest.mark.parametrize("route", ROUTES)
def test_what_only_an_administrator_may_set_is_400(
    proxy: Proxy, route: str, name: str
) -> None:
    """LiteLLM loses its own refusal without a database client, and says 500."""
    answer = post(proxy, route, "mlx/refused", **{name: "http://x"})
    assert_400(answer, route, name, f"{name} is not allowed in request body")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", [[], 3, "x", None])
def test_a_body_that_is_no_object_is_400(proxy: Proxy, route: str, body: Any) -> None:
    answer = proxy.http.post(route, content=json.dumps(body))
    assert_400(answer, route, None, "the body must be a JSON object")


def test_other_failures_keep_their_status(proxy: Proxy, sidecar: FakeSidecar) -> None:
    """A 500 that is held back to see why goes out as it was."""
    answer = post(proxy, CHAT, "dead")
    assert answer.status_code == 503
    assert proxy.http.post(CHAT, content=b"{no json").status_code == 400


@pytest.mark.parametrize("route", ROUTES)
def test_null_is_as_good_as_absent(route: str) -> None:
    """But where LiteLLM takes it for a value."""
    rules = rules_for(route)
    strict = {name for name, type_ in rules.types.items() if not type_.may_be_null}
    assert strict <= {"messages", "web_search_options"}
    assert wrong_field(dict.fromkeys(rules.types.keys() - strict), rules) is None


@pytest.mark.parametrize(
    "path",
    ["/chat/completions", "/engines/m/chat/completions", "/v1/completions",
     "/openai/deployments/m/completions", "/v1/messages/count_tokens", "/responses"],
)  # fmt: skip
def test_routes_under_other_names_are_looked_at(path: str) -> None:
    rules = rules_for(path)
    assert wrong_field({"tools": 3}, rules) is not None


@pytest.mark.parametrize(
    "path", ["/v1/moderations", "/v1/responses/resp_1/cancel", "/"]
)
def test_other_routes_are_not(path: str) -> None:
    """Their fields are others, but for those that LiteLLM reads everywhere."""
    assert not rules_for(path).types.keys() & {"tools", "messages", "input"}


def test_a_key_is_never_repeated() -> None:
    """Answers are logged here and there."""
    rules = rules_for(CHAT)
    found = wrong_field({"api_key": ["sk-secret"]}, rules)
    assert found is not None
    assert "sk-secret" not in found.message


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/rerank", CHAT])
def test_no_route_takes_what_would_shut_the_model_out(path: str) -> None:
    """LiteLLM would send it nobody for as long as the body says."""
    rules = rules_for(path)
    for name in NOT_FOR_CLIENTS:
        found = wrong_field({"model": "local", name: 86400}, rules)
        assert found is not None
        assert (found.param, "left out" in found.message) == (name, True)


def test_routes_of_litellms_own_take_what_they_need() -> None:
    """A key's budget and a model's price are LiteLLM's to know."""
    rules = rules_for("/key/generate")
    assert wrong_field({"max_budget": 3, "budget_duration": "30d"}, rules) is None
    for name in NEVER:
        assert wrong_field({name: 1}, rules) is not None


def test_what_litellm_offers_to_clients_is_taken() -> None:
    """As its pages say."""
    offered = {"metadata": {}, "tags": ["a"], "cache": {"no-cache": True}, "id": "x"}
    offered |= {"num_retries": 10, "litellm_session_id": "s", "no-log": True}
    offered |= {"prompt_variables": {"a": "b"}, "timeout": 3, "user": "u"}
    for route in ROUTES:
        assert (
            wrong_field(
                {**body_for(route, "m", stream=False), **offered}, rules_for(route)
            )
            is None
        )


def test_models_to_fall_back_to_are_few_and_short() -> None:
    """Each costs LiteLLM milliseconds in which it serves nobody."""
    rules = rules_for(CHAT)
    assert wrong_field({"fallbacks": ["a", {"model": "b"}]}, rules) is None
    for many in (["m"] * 9, ["m" * 9000], [{"model": "m" * (2 << 20)}], "m"):
        assert wrong_field({"fallbacks": many}, rules) is not None
    assert wrong_field({"model": "local,local"}, rules) is not None


@pytest.mark.parametrize(
    "more",
    [
        {"mock_response": "x"}, {"enable_json_schema_validation": True},
        {"num_retries": 200}, {"cooldown_time": 9}, {"metadata": {}},
        {"litellm_metadata": {"user_api_key_user_id": "dora"}}, {"user": "dora"},
        {"headers": {}}, {"response_format": {}}, {"timeout": -1},
        {"timeout": float("nan")}, {"model": "m" * 513}, {"model": "a,b"},
        {"messages": 5}, {"seed": 1e99},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("field", ["fallbacks", "context_window_fallbacks"])
def test_an_object_to_fall_back_to_says_little(field: str, more: Any) -> None:
    """LiteLLM takes it for arguments of its call: who asks, and what is answered."""
    rules = rules_for(CHAT)
    plain = {"model": "b", "max_tokens": 5, "messages": [{"role": "user"}]}
    assert wrong_field({field: [plain]}, rules) is None
    assert wrong_field({field: [{"a": ["b", plain]}]}, rules) is None
    for value in ([{**plain, **more}], [{"a": [{**plain, **more}]}], [{"a": [[]]}]):
        assert wrong_field({field: value}, rules) is not None


def test_no_fallback_forges_who_asks(proxy: Proxy, sidecar: FakeSidecar) -> None:
    """Told by LiteLLM's own port, before anything is asked."""
    forged = {"model": "mlx/b", "metadata": {"user_api_key_user_id": "dora"}}
    answer = post(proxy, CHAT, "mlx/forging", fallbacks=[forged])
    assert_400(answer, CHAT, "fallbacks", "fallbacks must be a list of at most 8")
    assert sidecar.calls_for("forging") == []


USERS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("user", lambda name: name),
    ("safety_identifier", lambda name: name),
    ("metadata", lambda name: {"user_id": name}),
    ("litellm_metadata", lambda name: {"user": name}),
)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("field", "made"), USERS, ids=[name for name, _ in USERS])
def test_the_name_of_a_user_has_a_bound(
    proxy: Proxy, route: str, field: str, made: Callable[[str], Any]
) -> None:
    """LiteLLM keeps it, megabytes of it for each of a thousand requests."""
    for length, status in ((4096, 200), (4097, 400)):
        answer = post(proxy, route, "mlx/local", **{field: made("u" * length)})
        assert answer.status_code == status, answer.text[:300]
    assert_400(answer, route, field, f"{field} must be")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": {"type": "a" * 70_000}},
        {"service_tier": "a" * 70_000},
        {"odd": ["a" * 1000] * 70},
        {"tools": [{"type": "a" * 3000}]},
        {"tools": [{"type": "mcp", "server_url": "a" * 3000}]},
    ],
)
def test_what_is_no_word_of_a_conversation_is_short(
    route: str, more: dict[str, Any]
) -> None:
    """LiteLLM repeats what it refuses, and looks through it."""
    body = {**body_for(route, "m", stream=False), **more}
    found = wrong_field(body, rules_for(route))
    assert found is not None
    assert found.param == next(iter(more))
    short = {**body_for(route, "m", stream=False), "odd": "a" * 60_000}
    assert wrong_field(short, rules_for(route)) is None
