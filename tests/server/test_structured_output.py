"""An answer is what its request asks it to be: JSON of a schema, a text, a call."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from sidecar.app import App
from sidecar.service.turn import IGNORED as HEADER
from testkit.servers import running_sidecar

Json = dict[str, Any]
TALK: list[Any] = [{"role": "user", "content": "Count the lamps."}]
STRING, NUMBER = {"type": "string"}, {"type": "number"}
SHORT = {"type": "string", "maxLength": 5}
POINT = {"type": "object", "properties": {"x": NUMBER, "y": NUMBER}, "required": ["x"]}
DEFINED = {"$ref": "#/$defs/point"}
SCHEMAS: dict[str, Json] = {
    "texts": {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 20}, "b": SHORT},
        "required": ["a"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "object",
        "properties": {
            "whole": {"type": "integer", "minimum": 3, "maximum": 99},
            "part": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        },
        "required": ["whole", "part"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", 5, None, True, ["a"]]},
    "const": {"const": {"a": [1, 2]}},
    "list": {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 4,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [STRING, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "any of": {"anyOf": [{"type": "integer"}, {"type": "null"}, POINT]},
    "of two types": {"type": ["boolean", "integer"]},
    "defined": {
        "$defs": {"point": POINT},
        "type": "object",
        "properties": {
            "from": {"$ref": "#/$defs/point"},
            "to": {"$ref": "#/$defs/point"},
        },
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "pattern": {
        "type": "object",
        "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}},
        "required": ["id"],
        "additionalProperties": False,
    },
    "date": {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}},
        "required": ["day"],
        "additionalProperties": False,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 3},
                    "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["name", "left"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "maxProperties": 3,
    },
}
MANY_PATTERNS = [{"type": "string", "pattern": f".*a.{{{n}}}b"} for n in range(5)]
HOT = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0}


@pytest.fixture(scope="module")
def served(model_folder: Callable[[str], Path]) -> Iterator[App]:
    """A random model: nothing but the grammar keeps it to anything."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "off"}
    with running_sidecar(settings) as running:
        yield running


@pytest.fixture(scope="module")
def http(served: App) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=300) as client:
        yield client


def chat(http: httpx.Client, **body: Any) -> httpx.Response:
    whole = {"messages": TALK, "max_tokens": 500, "enable_thinking": False, **body}
    return http.post("/v1/chat/completions", json=whole)


def schema_format(schema: Json, *, strict: bool = True) -> Json:
    named = {"name": "answer", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_whole_answer_is_json_of_its_schema(http: httpx.Client, name: str) -> None:
    schema, ended = SCHEMAS[name], 0
    for seed in range(8):
        asked = schema_format(schema)
        choice = chat(http, **asked, **HOT, seed=seed).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            ended += 1
            value = json.loads(choice["message"]["content"])
            jsonschema.validate(value, schema)
        else:
            assert choice["finish_reason"] == "length"
    assert ended >= 4


def test_each_wire_format_asks_for_it_in_its_own_way(http: httpx.Client) -> None:
    schema = SCHEMAS["numbers"]
    asked = {"type": "json_schema", "name": "answer", "schema": schema}
    body = {"input": "hi", "text": {"format": asked}, "enable_thinking": False}
    response = http.post("/v1/responses", json={**body, **HOT}).json()
    texts = [part["text"] for part in response["output"][-1]["content"]]
    asked = {"type": "json_schema", "schema": schema}
    body = {"messages": TALK, "max_tokens": 500, "output_config": {"format": asked}}
    body["thinking"] = {"type": "disabled"}
    message = http.post("/v1/messages", json={**body, **HOT}).json()
    texts += [part["text"] for part in message["content"]]
    texts += [
        chat(http, **HOT, **more).json()["choices"][0]["message"]["content"]
        for more in ({"guided_json": schema}, {"guided_json": json.dumps(schema)},
                     {"structured_outputs": {"json": schema}})
    ]  # fmt: skip
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert len(texts) == 5


def test_a_streamed_answer_is_the_same(http: httpx.Client) -> None:
    asked = {**schema_format(SCHEMAS["numbers"]), **HOT, "seed": 3}
    whole = chat(http, **asked).json()["choices"][0]["message"]["content"]
    streamed = chat(http, **asked, stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if "{" in line]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole


def content(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def test_choices_and_patterns(http: httpx.Client) -> None:
    choices = ["yes", 'no, "never"']
    for seed in range(6):
        more = {**HOT, "seed": seed}
        assert content(chat(http, guided_choice=choices, **more)) in choices
        within = {"choice": choices}
        assert content(chat(http, structured_outputs=within, **more)) in choices
        text = content(chat(http, guided_regex=r"\d{3}/\w[a-c\d]\s\S", **more))
        pattern = r"\d{3}/\w[a-c\d]\s?\S?"  # white space at its end is not shown
        assert re.fullmatch(pattern, text, re.ASCII)


LARK = """
start: call (";" call)?
call: NAME "(" /[0-9]/ ")"
NAME: "left" | "right"
"""


@pytest.mark.parametrize("thinks", [False, True])
def test_an_answer_is_of_a_grammar(http: httpx.Client, *, thinks: bool) -> None:
    """Under both names of the field, behind thinking, and beside tools to call."""
    tool = {"type": "function", "function": {"name": "look"}}
    call = r"(left|right)\([0-9]\)"
    num_whole = 0
    for seed in range(6):
        more = {**HOT, "seed": seed, "max_tokens": 80, "enable_thinking": thinks}
        for asked in (
            {"guided_grammar": LARK},
            {"structured_outputs": {"grammar": LARK}},
            {"guided_grammar": LARK, "tools": [tool]},
        ):
            (choice,) = chat(http, **asked, **more).json()["choices"]
            text = choice["message"]["content"]
            if "tools" in asked and (text or "<tool_call>").startswith("<tool_call>"):
                continue  # a call, or one that is none
            if choice["finish_reason"] == "stop":
                assert re.fullmatch(f"{call}(;{call})?", text)
                num_whole += 1
    assert num_whole >= 6


def test_thinking_is_free_and_the_answer_is_not(http: httpx.Client) -> None:
    """On: the prompt's tag is open, or the model opens it; nothing of it is JSON."""
    asked = {**schema_format(SCHEMAS["numbers"]), **HOT, "enable_thinking": True}
    for seed in range(6):
        choice = chat(http, **asked, seed=seed, max_tokens=60).json()["choices"][0]
        content = choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(content), SCHEMAS["numbers"])


def test_several_answers_are_held_each(http: httpx.Client) -> None:
    asked = {**schema_format(SCHEMAS["numbers"]), **HOT, "n": 4}
    answers = chat(http, **asked).json()["choices"]
    texts = [answer["message"]["content"] for answer in answers]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS["numbers"])
    assert len(set(texts)) > 1


def test_what_cannot_be_kept_to_is_refused_or_named(http: httpx.Client) -> None:
    schema = {"type": "object", "not": {"required": ["a"]}}
    refused = chat(http, **schema_format(schema))
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "unsupported_schema")
    assert error["param"] == "response_format.json_schema.schema"
    assert "not" in error["message"]
    assert len(error["message"]) < 400
    kept = chat(http, **schema_format(schema, strict=False), max_tokens=5)
    assert kept.status_code == 200
    assert kept.headers[HEADER] == "response_format.json_schema.schema"
    assert HEADER not in chat(http, **schema_format({"type": "object"})).headers


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_choice": ["a", 5]}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": "a" * 5000}, "guided_regex"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(?=a)a"}, "guided_regex"),
        ({"guided_regex": r"[\W]"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"a": "x" * 300_000}}, "guided_json"),
        ({"guided_json": {"type": "object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {"$ref": "https://example.com/a"}}, "guided_json"),
        ({"guided_json": {"items": {"allOf": MANY_PATTERNS}}}, "guided_json"),
        ({"guided_json": {"type": "integer", "multipleOf": 9999991}}, "guided_json"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"guided_regex": "(a{3000}){3022}"}, "guided_regex"),
        ({"guided_grammar": "x" * 40_000}, "guided_grammar"),
        ({"guided_grammar": "what is this"}, "guided_grammar"),
        ({"guided_grammar": 'start: "a'}, "guided_grammar"),
        ({"guided_grammar": "start: start"}, "guided_grammar"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        ({"guided_grammar": "start: " + "(" * 5000}, "guided_grammar"),
        ({"guided_grammar": 'start: "a"\n}\nanswer: "b"'}, "guided_grammar"),
        ({"guided_grammar": "start: <|no_such_token|>"}, "guided_grammar"),
        ({"guided_grammar": "start: <[9999999]>"}, "guided_grammar"),
        ({"guided_grammar": "start: /(a{3000}){3022}/"}, "guided_grammar"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar"),
    ],
)
def test_a_bad_form_names_its_field(
    http: httpx.Client, asked: Json, param: str
) -> None:
    answer = chat(http, **asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_neighbours_of_one_batch_say_what_they_say_alone(
    served: App, http: httpx.Client
) -> None:
    """Greedy, at once: rows with and without a grammar share their steps."""
    free = [{"messages": [{"role": "user", "content": f"lamp {n}"}]} for n in range(3)]
    bodies = [{**body, "temperature": 0, "max_tokens": 40} for body in free]
    alone = [chat(http, **body).json()["choices"] for body in bodies]
    held = {**schema_format(SCHEMAS["list"]), "temperature": 0}
    held_alone = chat(http, **held).json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        together = [pool.submit(chat, http, **body) for body in (*bodies, held, held)]
        found = [future.result().json()["choices"] for future in together]
    assert found == [*alone, held_alone, held_alone]


def test_a_form_that_cannot_be_kept_to_the_end_is_the_requests_fault(
    http: httpx.Client,
) -> None:
    """Not the engine's: a router would send its prompt to another model."""
    dear = {"type": "string", "pattern": "^(a|aa|aaa|aaaa){2000}$"}
    late = {"type": "object", "properties": {"a": {"const": "x" * 150}, "b": dear},
            "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    answer = chat(http, **schema_format(late), max_tokens=400)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "unsupported_schema"
    assert "held to its form" in error["message"]


@pytest.fixture(scope="module")
def thinker() -> Iterator[httpx.Client]:
    """The built-in model, which thinks before it answers."""
    with (
        running_sidecar({"CACHE_SELFTEST": "off"}) as running,
        httpx.Client(base_url=running.url, timeout=300) as client,
    ):
        yield client


@pytest.mark.parametrize("budget", [1, 4])
def test_thinking_takes_no_more_than_its_budget(
    thinker: httpx.Client, budget: int
) -> None:
    """Then its tag is written, and the answer follows; on each route."""
    body = {"messages": TALK, "max_tokens": 60}
    asked = {**body, "thinking": {"type": "enabled", "budget_tokens": budget}}
    free = thinker.post("/v1/chat/completions", json=body).json()
    held = thinker.post("/v1/chat/completions", json=asked).json()
    counts = [
        answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        for answer in (free, held)
    ]
    assert counts[0] > budget + 4
    assert counts[1] <= budget + 3  # and its tags
    assert held["choices"][0]["message"]["content"]
    message = thinker.post("/v1/messages", json=asked).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    refused = thinker.post("/v1/chat/completions", json={**body, "thinking_budget": -1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "thinking_budget"


def tool(name: str, properties: Json, required: list[str]) -> Json:
    schema = {"type": "object", "properties": properties, "required": required}
    schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool("look", {"at": SHORT, "times": {"type": "integer", "maximum": 9}}, ["at"]),
    tool("stop", {}, []),
    tool(
        "move",
        {"to": {"enum": ["left", "right"]}, "far": {"type": "integer"}},
        ["to", "far"],
    ),
]
PARAMETERS = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}


def calls(answer: httpx.Response) -> list[tuple[str, Json]]:
    """Names and arguments of its calls."""
    choice = answer.json()["choices"][0]
    found = choice["message"].get("tool_calls") or []
    assert choice["finish_reason"] == ("tool_calls" if found else "length")
    functions = [call["function"] for call in found]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


def test_a_required_call_is_one_of_a_tool_and_keeps_to_its_schema(
    http: httpx.Client,
) -> None:
    names = set()
    for seed in range(12):
        more = {**HOT, "seed": seed, "max_tokens": 300}
        for name, arguments in calls(
            chat(http, tools=TOOLS, tool_choice="required", **more)
        ):
            names.add(name)
            jsonschema.validate(arguments, PARAMETERS[name])
        named = {"type": "function", "function": {"name": "move"}}
        found = calls(chat(http, tools=TOOLS, tool_choice=named, **more))
        assert [name for name, _ in found] == ["move"]
        jsonschema.validate(found[0][1], PARAMETERS["move"])
    assert len(names) > 1


def test_a_tool_is_chosen_or_the_form_is_kept(http: httpx.Client) -> None:
    """Tools offered beside a schema: a call may come in place of the answer."""
    for seed in range(8):
        asked = {**schema_format(SCHEMAS["numbers"]), "tools": TOOLS}
        message = chat(http, **asked, **HOT, seed=seed).json()["choices"][0]["message"]
        text = message["content"] or ""
        if not message.get("tool_calls") and "<tool_call>" not in text:
            jsonschema.validate(json.loads(text), SCHEMAS["numbers"])


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        ({"type": "string"}, None),
        ({"not": {"type": "string"}}, "tools[].function.strict"),
        ({"type": "integer", "multipleOf": 9999991}, "tools"),
    ],
)
def test_what_a_call_in_place_of_a_form_is_not_held_to_is_named(
    http: httpx.Client, odd: Json, named: str | None
) -> None:
    """It was, where a call was required, and beside a schema it was not."""
    asked = schema_format(SCHEMAS["numbers"])
    strict = tool("f", {"a": odd}, ["a"])
    strict["function"]["strict"] = True
    tools = [*TOOLS, strict]
    answer = chat(http, **asked, tools=tools, max_tokens=3)
    assert answer.headers.get(HEADER) == named
    required = chat(http, tools=tools, tool_choice="required", max_tokens=3)
    assert required.headers.get(HEADER) == named


def test_a_form_beside_a_call_that_must_come_is_named(http: httpx.Client) -> None:
    """By the field that asks for it."""
    asked = {"tools": TOOLS, "tool_choice": "required", "guided_choice": ["a"]}
    answer = chat(http, **asked, max_tokens=3)
    assert answer.headers[HEADER] == "guided_choice"


def test_a_call_that_must_come_costs_no_reuse(http: httpx.Client) -> None:
    """Nothing of it stands in the prompt: with it and without it is the same one."""
    tools = [tool("look", {"at": SHORT}, ["at"]), tool("go", {}, [])]
    words = "word " * 200
    body = {"messages": [{"role": "user", "content": words}], "tools": tools}
    chat(http, **body)
    for choice in (
        "auto",
        "required",
        {"type": "function", "function": {"name": "go"}},
    ):
        usage = chat(http, **body, tool_choice=choice).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= usage["prompt_tokens"] - 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"tool_choice": "required", "tools": []}),
        ("chat/completions", {"tool_choice": "required"}),
        ("messages", {"tool_choice": {"type": "any"}}),
        ("responses", {"tool_choice": "required"}),
    ],
)
def test_a_call_of_no_tool_is_named(served: App, path: str, body: Json) -> None:
    """There is none to call; what else is asked for is done."""
    talk = {"input": "hi"} if path == "responses" else {"messages": TALK}
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    asked = {"model": "local", limit: 8, **talk, **body}
    answer = httpx.post(f"{served.url}/v1/{path}", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "tool_choice" in answer.headers[HEADER]
    if path == "chat/completions":
        asked["guided_choice"] = ["red"]
        answer = httpx.post(f"{served.url}/v1/{path}", json=asked, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == "red"
