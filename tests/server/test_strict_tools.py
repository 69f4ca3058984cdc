"""A strict tool is called with arguments of its schema, where the model calls it."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tokenizers import Tokenizer

from sidecar.service.turn import IGNORED as HEADER
from testkit.real_templates import BY_NAME, write_tokenizer
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model

Json = dict[str, Any]
Ask = Callable[..., httpx.Response]
OPENERS = {
    "qwen3": "<tool_call>", "qwen3-coder": "<tool_call>", "gemma4": "<|tool_call>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜>", "minimax-m2": "<minimax:tool_call>",
    "lfm2": "<|tool_call_start|>", "devstral": "[TOOL_CALLS]",
    "kimi-k2": "<|tool_calls_section_begin|>", "glm4.6": "<tool_call>",
}  # fmt: skip
MOVE: Json = {
    "type": "object",
    "properties": {
        "to": {"enum": ["left", "right"]},
        "by": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["to", "by"],
    "additionalProperties": False,
}
STOP: Json = {"type": "object", "properties": {}, "additionalProperties": False}
HOT = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "max_tokens": 150}
TALK = [{"role": "user", "content": "Count the lamps."}]


def tools(*, strict: bool = True, **more: Any) -> list[Json]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema,
                                          "strict": strict, **more}}
        for name, schema in (("move", MOVE), ("stop", STOP))
    ]  # fmt: skip


@pytest.fixture(params=OPENERS)
def calling(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ask]:
    """A random model of a family that always begins with a call."""
    family = BY_NAME[request.param]
    write = functools.partial(write_tokenizer, family=family)
    model = make_model(tmp_path / "model", "dense", hidden=32, write_tokenizer=write)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    opener = tokenizer.token_to_id(OPENERS[request.param])
    asked = {"messages": TALK, "enable_thinking": False, **HOT}
    asked |= {"logit_bias": {str(opener): 100}, "parallel_tool_calls": False}
    if request.param == "minimax-m2":  # it always thinks
        asked["thinking_budget"] = 4
    settings = {"MODEL_PATH": str(model), "CACHE_SELFTEST": "off"}
    with (
        running_sidecar(settings) as app,
        httpx.Client(base_url=app.url, timeout=300, trust_env=False) as http,
    ):
        path = "/v1/chat/completions"
        yield lambda **body: http.post(path, json={**asked, **body})


def test_its_calls_keep_to_their_schema(calling: Ask) -> None:
    """Without it a random model writes no call at all, and nothing else changes."""
    found = 0
    for seed in range(5):
        answer = calling(tools=tools(), seed=seed)
        assert answer.status_code == 200, answer.text
        assert HEADER not in answer.headers
        message = answer.json()["choices"][0]["message"]
        for call in message.get("tool_calls") or ():
            found += 1
            schema = {"move": MOVE, "stop": STOP}[call["function"]["name"]]
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    assert found >= 3
    prompts = {
        calling(tools=tools(strict=one), max_tokens=1).json()["usage"]["prompt_tokens"]
        for one in (True, False)
    }
    assert len(prompts) == 1
    free = calling(tools=tools(strict=False), seed=1).json()["choices"][0]["message"]
    assert not free.get("tool_calls")


@pytest.mark.parametrize("name", ["llama3.1", "gpt-oss"])
def test_where_calls_begin_with_no_token_it_is_named(name: str, tmp_path: Path) -> None:
    write = functools.partial(write_tokenizer, family=BY_NAME[name])
    model = make_model(tmp_path / "model", "dense", hidden=32, write_tokenizer=write)
    settings = {"MODEL_PATH": str(model), "CACHE_SELFTEST": "off"}
    chat = {"messages": TALK, "tools": tools(), "max_tokens": 2}
    flat = [{"type": "function", **tool["function"]} for tool in tools()]
    responses = {"input": "hi", "tools": flat, "max_output_tokens": 16}
    named = [{"name": t["name"], "input_schema": t["parameters"], "strict": True}
             for t in flat]  # fmt: skip
    messages = {"messages": TALK, "tools": named, "max_tokens": 2}
    with (
        running_sidecar(settings) as app,
        httpx.Client(base_url=app.url, timeout=60, trust_env=False) as http,
    ):
        for path, body, param in (
            ("/v1/chat/completions", chat, "tools[].function.strict"),
            ("/v1/responses", responses, "tools[].strict"),
            ("/v1/messages", messages, "tools[].strict"),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers[HEADER] == param
            chosen = {"tool_choice": "none"} if "input" in body else {}
            assert http.post(path, json={**body, **chosen}).status_code == 200


def test_a_setting_holds_all_calls(tmp_path: Path) -> None:
    """Tools that do not ask for it too; a small model forgets its arguments else."""
    write = functools.partial(write_tokenizer, family=BY_NAME["qwen3"])
    model = make_model(tmp_path / "model", "dense", hidden=32, write_tokenizer=write)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    bias = {str(tokenizer.token_to_id("<tool_call>")): 100}
    body = {"messages": TALK, "tools": tools(strict=False), "logit_bias": bias, **HOT}
    body |= {"enable_thinking": False, "parallel_tool_calls": False}
    settings = {"MODEL_PATH": str(model), "CACHE_SELFTEST": "off"}
    with (
        running_sidecar({**settings, "TOOL_GRAMMAR": "calls"}) as app,
        httpx.Client(base_url=app.url, timeout=60, trust_env=False) as http,
    ):
        answer = http.post("/v1/chat/completions", json=body)
    assert HEADER not in answer.headers
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    schema = {"move": MOVE, "stop": STOP}[call["function"]["name"]]
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-coder", "gemma4"])
def test_what_the_library_does_not_know_is_named_and_a_wrong_type_refused(
    tmp_path: Path, name: str
) -> None:
    """In a format without quotes too, where its own compiler sees no text's schema."""
    write = functools.partial(write_tokenizer, family=BY_NAME[name])
    model = make_model(tmp_path / "model", "dense", hidden=32, write_tokenizer=write)
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    function = {"name": "f", "parameters": odd, "strict": True}
    body = {"messages": TALK, "tools": [{"type": "function", "function": function}]}
    settings = {"MODEL_PATH": str(model), "CACHE_SELFTEST": "off"}
    with (
        running_sidecar(settings) as app,
        httpx.Client(base_url=app.url, timeout=60, trust_env=False) as http,
    ):
        path = "/v1/chat/completions"
        answer = http.post(path, json={**body, "max_tokens": 2})
        assert answer.headers[HEADER] == "tools[].function.strict"
        must = {**body, "tool_choice": "required", "max_tokens": 2}
        answer = http.post(path, json=must)
        assert answer.headers[HEADER] == "tools[].function.strict"
        function["strict"] = "yes"
        refused = http.post(path, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tools[0].function.strict"
