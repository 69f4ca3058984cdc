"""Every field a client may send reaches the sidecar, with no setting in the config."""

from typing import Any

import pytest

from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.fake_sidecar import FakeSidecar
from tests.litellm_mlx.proxy_client import HI
from tests.litellm_mlx.sidecar_answers import Json

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SCHEMA = {"name": "s", "schema": {"type": "object"}}

# Fields of a chat body that arrive under their own name, with their own value.
CHAT_FIELDS: list[tuple[str, Any]] = [
    ("temperature", 0.3),
    ("top_p", 0.4),
    ("top_k", 5),
    ("min_p", 0.06),
    ("repetition_penalty", 1.07),
    ("stop", ["a", "b"]),
    ("seed", 8),
    ("logprobs", True),
    ("top_logprobs", 3),
    ("n", 2),
    ("max_tokens", 77),
    ("response_format", {"type": "json_schema", "json_schema": SCHEMA}),
    ("tools", [TOOL]),
    ("tool_choice", "required"),
    ("parallel_tool_calls", False),
    ("presence_penalty", 0.1),
    ("frequency_penalty", 0.2),
    ("logit_bias", {"5": 1}),
    ("store", True),
    ("service_tier", "auto"),
    ("safety_identifier", "s"),
    ("prompt_cache_key", "k"),
    ("prediction", {"type": "content", "content": "p"}),
    ("modalities", ["text"]),
    ("functions", [TOOL["function"]]),
    ("enable_thinking", False),
    ("reasoning", {"effort": "low"}),
    ("chat_template_kwargs", {"enable_thinking": True}),
    ("session_id", "s1"),
    ("conversation_id", "c1"),
    ("thread_id", "t1"),
    ("guided_json", {"type": "object"}),
    ("draft_model", "d"),
    ("adapters", ["a"]),
    ("keep_alive", "5m"),
    ("whatever_comes", {"deep": [1, None]}),
    # Refused without the hook:
    ("reasoning_effort", "high"),
    ("thinking", {"type": "enabled", "budget_tokens": 4000}),
    ("thinking", "auto"),
    ("verbosity", "low"),
    ("context_management", {"edits": []}),
    # Dropped without it, or without the client's own body:
    ("metadata", {"k": "v", "session_id": "m1"}),
]


def sent_by(
    proxy: Proxy, sidecar: FakeSidecar, path: str, model: str, fields: Json, **kw: Any
) -> Json:
    body = {"model": f"mlx/{model}", **fields}
    answer = proxy.http.post(path, json=body, **kw)
    assert answer.status_code == 200, answer.text
    return sidecar.last_call(model).body


@pytest.mark.parametrize(("name", "value"), CHAT_FIELDS)
def test_chat_fields(proxy: Proxy, sidecar: FakeSidecar, name: str, value: Any) -> None:
    """One field at a time, so none hides behind another."""
    fields = {"messages": HI, name: value}
    body = sent_by(proxy, sidecar, "/v1/chat/completions", f"field-{name}", fields)
    assert body[name] == value


def test_drop_params_drops_nothing(proxy: Proxy, sidecar: FakeSidecar) -> None:
    """The setting that most LiteLLM configurations have."""
    thinking = {"type": "enabled", "budget_tokens": 4000}
    fields = {"messages": HI, "drop_params": True, "thinking": thinking}
    fields |= {"reasoning_effort": "high", "verbosity": "low"}
    body = sent_by(proxy, sidecar, "/v1/chat/completions", "dropping", fields)
    assert body["thinking"] == thinking
    assert body["x_mlx"]["thinking"] == thinking
    assert body["reasoning_effort"] == body["x_mlx"]["effort"] == "high"
    assert body["verbosity"] == "low"


def test_what_arrives_under_another_name(proxy: Proxy, sidecar: FakeSidecar) -> None:
    """LiteLLM's renaming, and an extra_body that was sent literally."""
    extra = {"enable_thinking": False, "top_k": 4}
    fields = {"messages": HI, "max_completion_tokens": 9, "extra_body": extra}
    body = sent_by(proxy, sidecar, "/v1/chat/completions", "renamed", fields)
    assert body["max_tokens"] == 9
    assert body["top_k"] == 4
    # What the sidecar ranks by its place stays where it was said.
    assert body["extra_body"] == {"enable_thinking": False}


BODY = {"max_tokens": 9, "seed": 1, "mlx_max_ttft_s": 50,
        "session_id": "b", "thinking": {"type": "enabled", "budget_tokens": 2048},
        "chat_template_kwargs": {"enable_thinking": True, "a": "b"}}  # fmt: skip
EXTRA = {"max_tokens": 8, "seed": 2, "mlx_max_ttft_s": 40,
         "session_id": "e", "thinking": {"type": "disabled"}, "top_k": 4,
         "conversation_id": "e", "min_p": 0.5,
         "chat_template_kwargs": {"enable_thinking": False, "a": "e", "c": "e"},
         }  # fmt: skip


def test_a_literal_extra_body_does_not_beat_the_body(
    proxy: Proxy, sidecar: FakeSidecar
) -> None:
    """It fills gaps, as it does without a proxy; what is ranked keeps its rank."""
    fields = {"messages": HI, **BODY, "extra_body": EXTRA}
    body = sent_by(proxy, sidecar, "/v1/chat/completions", "extra", fields)
    found = {field: body.get(field) for field in BODY}
    assert found == BODY
    assert (body["top_k"], body["min_p"]) == (4, 0.5)
    assert "conversation_id" not in body
    assert body["extra_body"]["conversation_id"] == "e"


def test_ranked_names_of_an_extra_body_stay_in_it(
    proxy: Proxy, sidecar: FakeSidecar
) -> None:
    """With nothing in the body: metadata stands before them at the sidecar."""
    fields = {"messages": HI, "metadata": {"session_id": "m"}, "extra_body": EXTRA}
    path = "/v1/chat/completions"
    body = sent_by(proxy, sidecar, path, "ranked", fields)
    assert body["metadata"] == {"session_id": "m"}
    assert body["chat_template_kwargs"] == {"a": "e", "c": "e"}
    ranked = ("session_id", "conversation_id", "thinking")
    assert body["extra_body"] == {
        **{name: EXTRA[name] for name in ranked},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert not {*ranked} & {*body}


def test_nothing_of_litellm_leaks(proxy: Proxy, sidecar: FakeSidecar) -> None:
    """A plain request has these fields and no others."""
    headers = {"authorization": "Bearer secret-key", "user-agent": "me/1"}
    path, fields = "/v1/chat/completions", {"messages": HI, "stream": True}
    body = sent_by(proxy, sidecar, path, "plain", fields, headers=headers)
    expected = {"model", "messages", "stream", "stream_options", "x_mlx"}
    assert body.keys() == expected
    assert body["stream_options"] == {"include_usage": True}
    key = body["x_mlx"].pop("key")
    assert len(key) == 16
    assert key not in "secret-key"
    assert body["x_mlx"] == {"user_agent": "me/1"}
    assert "secret-key" not in str(sidecar.last_call("plain"))


SESSIONS: list[tuple[str, Json, Json]] = [
    ("litellm header", {"x-litellm-session-id": "session-1"}, {}),
    ("claude code", {"x-claude-code-session-id": "session-1"}, {}),
    ("bare header", {"x-session-id": "session-1"}, {}),
    ("metadata", {}, {"metadata": {"session_id": "session-1"}}),
]


@pytest.mark.parametrize(
    ("headers", "fields"), [row[1:] for row in SESSIONS], ids=[r[0] for r in SESSIONS]
)
def test_sessions(
    proxy: Proxy, sidecar: FakeSidecar, headers: Json, fields: Json
) -> None:
    """However a client names its session, the sidecar reads one field."""
    fields = {"messages": HI, **fields}
    path = "/v1/chat/completions"
    body = sent_by(proxy, sidecar, path, "session", fields, headers=headers)
    assert body["x_mlx"]["session"] == "session-1"


def test_anthropic_fields(proxy: Proxy, sidecar: FakeSidecar) -> None:
    """What LiteLLM translates, and in x_mlx what it loses over that."""
    mark = {"cache_control": {"type": "ephemeral"}}
    user_id = "user_a_account__session_0f8fad5b-d9cb-469f-a165-70867728950e"
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": "no"}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    fields: Json = {
        "max_tokens": 500,
        "system": [{"type": "text", "text": "be good", **mark}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{**failed, "is_error": True, **mark}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, **mark}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "top_k": 7,
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "metadata": {"user_id": user_id},
    }
    body = sent_by(proxy, sidecar, "/v1/messages?beta=true", "anthropic", fields)
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert body["tools"][0]["function"]["name"] == "f"
    assert body["stop"] == ["END"]
    assert body["top_k"] == 7
    assert body["user"] == user_id
    assert body["metadata"] == {"user_id": user_id}
    private = body["x_mlx"]
    assert private["session"] == "0f8fad5b-d9cb-469f-a165-70867728950e"
    assert private["thinking"] == fields["thinking"]
    assert private["effort"] == "high"


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "adaptive"},
        {"type": "disabled"},
        {"type": "adaptive", "display": "omitted"},
    ],
)
def test_every_kind_of_thinking_is_told_exactly(
    proxy: Proxy, sidecar: FakeSidecar, thinking: Json
) -> None:
    """LiteLLM makes an effort word of it; the client's own stands in x_mlx."""
    fields = {"max_tokens": 9, "messages": HI, "thinking": thinking}
    body = sent_by(proxy, sidecar, "/v1/messages", "thinking", fields)
    assert body["x_mlx"]["thinking"] == thinking


def test_responses_fields(proxy: Proxy, sidecar: FakeSidecar) -> None:
    """The Responses dialect, translated and recovered."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    fields: Json = {
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "out"},
        ],
        "instructions": "be good",
        "max_output_tokens": 55,
        "reasoning": {"effort": "low"},
        "tools": [tool],
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
    }
    body = sent_by(proxy, sidecar, "/v1/responses", "responses-fields", fields)
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert body["max_tokens"] == 55
    assert body["reasoning_effort"] == "low"
    assert body["prompt_cache_key"] == "k"
    assert body["metadata"] == {"a": "b"}
    assert body["x_mlx"]["effort"] == "low"
