"""What goes to the sidecar beside a body that LiteLLM sends on as it is."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import litellm
import pytest

from litellm_mlx import proxy_gate
from litellm_mlx.hook import MLXDeploymentHook
from litellm_mlx.private import native_header, without_ours
from litellm_mlx.settings import Settings
from litellm_mlx.translate import chat_call
from sidecar.core.requests import short_id

Json = dict[str, Any]


def kwargs(**more: Any) -> Json:
    """Of a Messages call, as its deployment hook gets them."""
    request = {
        "url": "http://p/v1/messages",
        "headers": {},
        "body": more.pop("body", {}),
    }
    return {
        "model": "mlx/m",
        "litellm_metadata": {"user_api_key_hash": "mine", "session_id": "s"},
        "proxy_server_request": request,
        **more,
    }


def test_it_says_who_asks_and_what_may_have_been_cut() -> None:
    body = {"messages": [1], "top_k": 3, "litellm_call_id": "x", "max_tokens": 5}
    facts = json.loads(native_header(kwargs(body=body, mlx_max_ttft_s=9)))
    assert facts["session"] == "s"
    assert len(facts["key"]) == 16
    assert facts["body"] == {"top_k": 3, "mlx_max_ttft_s": 9}


def test_keys_without_a_name_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom authority may name the user or the team; without either none share."""
    monkeypatch.setattr(proxy_gate, "has_keys", lambda: True)

    def key(**names: str) -> str:
        asked = kwargs(litellm_metadata=dict(names), metadata=dict(names))
        return str(json.loads(native_header(asked))["key"])

    carol, dave = ({"user_api_key_user_id": name} for name in ("carol", "dave"))
    assert key(**carol) == key(**carol) != key(**dave)
    assert key(user_api_key_team_id="red") != key(user_api_key_team_id="blue")
    assert key() != key()


def test_a_client_does_not_say_who_asks() -> None:
    """Nor in a field that LiteLLM hands on as it is."""
    claim = {"x_mlx": {"key": "another"}}
    for body in (claim, {"extra_body": claim}):
        facts = json.loads(native_header(kwargs(body=body)))
        assert facts["key"] == json.loads(native_header(kwargs()))["key"]
        assert "x_mlx" not in facts["body"]


def test_an_extra_body_does_not_beat_the_body() -> None:
    """Of a body that LiteLLM sends on as well."""
    extra = {"top_k": 4, "min_p": 0.5, "session_id": "e", "thread_id": "e"}
    body = {"top_k": 3, "session_id": "b", "extra_body": extra}
    facts = json.loads(native_header(kwargs(body=body)))
    ranked = {"session_id": "e", "thread_id": "e"}
    filled = {"top_k": 3, "session_id": "b", "min_p": 0.5}
    assert facts["body"] == {**filled, "extra_body": ranked}


def test_a_long_history_leaves_room_for_who_asks() -> None:
    """What stands in the body is not said again."""
    failed = {"type": "tool_result", "tool_use_id": "t" * 30, "is_error": True}
    body = {"messages": [{"role": "user", "content": [failed] * 2000}], "top_k": 3}
    facts = json.loads(native_header(kwargs(body=body)))
    assert (facts["session"], facts["body"]) == ("s", {"top_k": 3})


def test_long_names_are_as_short_as_the_sidecar_keeps_them() -> None:
    """Else the head is too large, and the request goes to the cloud."""
    long = "x" * 70_000
    header = native_header(
        kwargs(
            body={"session_id": long, "extra_body": {"thread_id": long}, "top_k": 3},
            litellm_metadata={"user_api_key_hash": "mine", "session_id": long},
        )
    )
    facts = json.loads(header)
    assert facts["key"] == json.loads(native_header(kwargs()))["key"]
    short = short_id(long)
    within = {"thread_id": short}
    assert facts["body"] == {"session_id": short, "top_k": 3, "extra_body": within}
    assert facts["session"] == short


@pytest.mark.parametrize("sign", ["x", "\u4e2d"])
@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("guided_json", lambda text: {"guided_json": {"description": text}}),
        ("field1", lambda text: {f"field{n}": text[:900] for n in range(20)}),
        ("conversation", lambda text: {"conversation": {"id": text}}),
        ("x+", lambda text: {"x" * len(text): 1}),
    ],
)
def test_what_does_not_fit_is_refused_and_not_dropped(
    sign: str, field: str, make: Callable[[str], Json]
) -> None:
    """The sidecar would answer as if nobody had asked for it."""
    body = {"top_k": 3, **make(sign * 17_000)}
    with pytest.raises(litellm.BadRequestError, match=field):
        native_header(kwargs(body=body))
    small = {"top_k": 3, **make(sign * 40)}
    assert json.loads(native_header(kwargs(body=small)))["body"] == small


@pytest.mark.parametrize("session", [["x" * 20_000], {"a": "x" * 20_000}, 7])
def test_a_session_that_is_no_text_is_bounded_too(session: Any) -> None:
    metadata = {"user_api_key_hash": "mine", "session_id": session}
    facts = json.loads(native_header(kwargs(litellm_metadata=metadata)))
    assert len(str(facts["session"])) < 256


def test_of_a_long_program_name_the_beginning_is_kept() -> None:
    """As the sidecar does where a request comes to it."""
    request = {"url": "http://p/v1/messages", "headers": {"user-agent": "a" * 20_000}}
    asked = kwargs(proxy_server_request={**request, "body": {}})
    assert json.loads(native_header(asked))["user_agent"] == "a" * 256


def test_what_litellm_sends_on_itself_may_be_long() -> None:
    """Of Messages the form of an answer."""
    form = {"format": {"type": "json_schema", "schema": {"description": "x" * 20_000}}}
    body = {"output_config": {**form, "effort": "low"}, "top_k": 3}
    facts = json.loads(native_header(kwargs(body=body)))
    assert facts["body"] == {"output_config": {"effort": "low"}, "top_k": 3}


def test_on_googles_route_the_key_stands_elsewhere() -> None:
    other = {"litellm_metadata": {}, "metadata": {"user_api_key_hash": "mine"}}
    there = json.loads(native_header(kwargs(**other)))
    assert there["key"] == json.loads(native_header(kwargs()))["key"]


def test_a_clients_body_sets_no_header_of_ours() -> None:
    """`extra_headers` is a parameter of LiteLLM's, and anybody's."""
    asked = {"X-MLX": "{}", "x-mlx": "{}", "Authorization": "Bearer b", "x-trace": "7"}
    asked |= {"X-Request-ID": "of-another-call", "connection": "upgrade"}
    asked |= {"X-MLX ": "1", "x-mlx\t": "1", "": "1", "a b": "1", "x-\u00e9": "1"}
    assert without_ours(asked) == {"x-trace": "7"}
    given = kwargs(extra_headers=dict(asked), headers=dict(asked))
    hook = MLXDeploymentHook()
    found = asyncio.run(
        hook.async_pre_call_deployment_hook(given, "anthropic_messages")
    )
    assert found is not None
    headers = found["extra_headers"]
    assert isinstance(headers, dict)
    assert json.loads(headers.pop("x-mlx"))["session"] == "s"
    assert headers.pop("X-Request-ID") != "of-another-call"
    assert headers.pop("Connection") == "close"
    assert headers == found["headers"] == {"x-trace": "7"}


@pytest.mark.parametrize("is_list", [False, True])
def test_nor_for_one_provider(is_list: bool) -> None:
    """LiteLLM has these headers take the place of all others."""
    asked = {"x-mlx": '{"key": "alice"}', "X-Request-ID": "1", "x-trace": "7"}
    one: Json = {"custom_llm_provider": "mlx", "extra_headers": asked}
    given = kwargs(provider_specific_header=[one] if is_list else one)
    found = asyncio.run(
        MLXDeploymentHook().async_pre_call_deployment_hook(given, "anthropic_messages")
    )
    assert found is not None
    kept: Any = found["provider_specific_header"]
    (kept,) = kept if is_list else [kept]
    assert kept == {"custom_llm_provider": "mlx", "extra_headers": {"x-trace": "7"}}
    assert asked["x-mlx"], "what the client sent stays as it was"


def test_nor_in_a_chat() -> None:
    call = {
        "model": "m", "messages": [], "litellm_params": {}, "optional_params": {},
        "headers": {"x-mlx": "{}", "authorization": "Bearer b", "x-trace": "7"},
    }  # fmt: skip
    settings = Settings(api_key="ours")
    sent = {
        k.lower(): v for k, v in chat_call(call, settings, stream=False).headers.items()
    }
    assert "x-mlx" not in sent
    assert sent["authorization"] == "Bearer ours"
    assert sent["x-trace"] == "7"
