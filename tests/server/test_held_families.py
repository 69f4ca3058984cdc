"""Forms and calls that must come, by random models with real templates."""

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from sidecar.service.turn import IGNORED as HEADER
from testkit.real_templates import BY_NAME, Family, write_tokenizer
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model

Json = dict[str, Any]
Ask = Callable[..., httpx.Response]
FAMILIES = (
    "gpt-oss", "gemma4", "deepseek-v3.1", "deepseek-v3.2", "kimi-k2", "minimax-m2",
    "lfm2", "mistral-nemo", "devstral", "llama3.1", "qwen3", "nemotron-nano-v2",
)  # fmt: skip
THINKING = ("minimax-m2", "nemotron-nano-v2")  # always
MOVE: Json = {
    "type": "object",
    "properties": {
        "to": {"enum": ["left", "right"]},
        "from": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["to", "from"],
    "additionalProperties": False,
}
STOP: Json = {"type": "object", "properties": {}, "additionalProperties": False}
PERSON: Json = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "stop-it"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("move", MOVE), ("stop-it", STOP))
]
ASKED: Json = {
    "messages": [{"role": "user", "content": "Count the lamps."}],
    "tools": TOOLS,
    "max_tokens": 120,
    "enable_thinking": False,
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return BY_NAME[request.param]


@pytest.fixture
def asked(family: Family, tmp_path: Path) -> Iterator[Ask]:
    """A chat with a random model in the tokens of a family."""
    write = functools.partial(write_tokenizer, family=family)
    model = make_model(tmp_path / "model", "dense", hidden=32, write_tokenizer=write)
    settings = {"MODEL_PATH": str(model), "CACHE_SELFTEST": "off"}
    budget = {"thinking_budget": 4} if family.name in THINKING else {}
    with (
        running_sidecar(settings) as app,
        httpx.Client(base_url=app.url, timeout=300, trust_env=False) as client,
    ):
        yield functools.partial(ask, client, **budget)


def ask(http: httpx.Client, **body: Any) -> httpx.Response:
    answer = http.post("/v1/chat/completions", json={**ASKED, **body})
    assert answer.status_code == 200, answer.text
    return answer


def calls(choice: Json) -> list[tuple[str, Json]]:
    functions = [c["function"] for c in choice["message"].get("tool_calls") or ()]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


def test_a_call_must_come_or_a_form_or_a_call_in_its_place(
    asked: Ask, family: Family
) -> None:
    """What ends is what was asked for; nothing of it stands in the prompt."""
    has_short_ids = family.name == "mistral-nemo"  # as Mistral's own API wants them
    plain = asked(max_tokens=1).json()["usage"]["prompt_tokens"]
    schemas = {"move": MOVE, "stop-it": STOP}
    for number in range(6):
        answer = asked(tool_choice="required", seed=number)
        assert HEADER not in answer.headers
        assert answer.json()["usage"]["prompt_tokens"] == plain
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] != "length":
            assert choice["finish_reason"] == "tool_calls"
            assert calls(choice)
            assert not choice["message"]["content"]
        for name, arguments in calls(choice):
            jsonschema.validate(arguments, schemas[name])
        for call in choice["message"].get("tool_calls") or ():
            assert (re.fullmatch("[A-Za-z0-9]{9}", call["id"]) is not None) is (
                has_short_ids
            )
    named = {"type": "function", "function": {"name": "move"}}
    ended = 0
    for number in range(6):
        choice = asked(tool_choice=named, seed=number).json()["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            ended += 1
            [(name, arguments)] = calls(choice)
            assert name == "move"
            jsonschema.validate(arguments, MOVE)
    assert ended
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    texts = 0
    for number in range(8):
        choice = asked(response_format=form, seed=number).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            texts += 1
            jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
        for name, arguments in calls(choice):
            jsonschema.validate(arguments, schemas[name])
    assert texts
