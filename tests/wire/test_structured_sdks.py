"""SDKs that ask for a form, through the real proxy: what they parse is of the form."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from testkit.proxy import Proxy


class Lamp(BaseModel):
    """What is asked for; nothing about the built-in model makes it likely."""

    colour: Literal["red", "green"]
    number: int = Field(ge=1, le=9)


MESSAGES = [{"role": "user", "content": "hi"}]
LOOK = {"type": "object", "properties": {"at": {"enum": ["left", "right"]}},
        "required": ["at"], "additionalProperties": False}  # fmt: skip


def test_openai_parses_a_chat_into_a_model(proxy: Proxy) -> None:
    answer = proxy.openai.chat.completions.parse(
        model="builtin", messages=MESSAGES, response_format=Lamp, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, Lamp)
    with proxy.openai.chat.completions.stream(
        model="builtin", messages=MESSAGES, response_format=Lamp, max_tokens=300
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Lamp)


def test_openai_parses_a_response_into_a_model(proxy: Proxy) -> None:
    answer = proxy.openai.responses.parse(
        model="builtin", input="hi", text_format=Lamp, max_output_tokens=300
    )
    assert isinstance(answer.output_parsed, Lamp)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_anthropic_is_answered_in_json(proxy: Proxy, field: str) -> None:
    """Under both names of the field, with a long schema."""
    schema = {**Lamp.model_json_schema(), "description": "x" * 20_000}
    form: dict[str, Any] = {"type": "json_schema", "schema": schema}
    form = {"format": form} if field == "output_config" else form
    answer = proxy.anthropic.messages.create(
        model="builtin", messages=MESSAGES, max_tokens=300, extra_body={field: form}
    )
    assert Lamp.model_validate_json(answer.content[-1].text)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_tool_must_be_called(proxy: Proxy, choice: str) -> None:
    function = {"name": "look", "description": "Look.", "parameters": LOOK}
    tools = [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "look"}}
    asked = "required" if choice == "required" else named
    answer = proxy.openai.chat.completions.create(
        model="builtin", messages=MESSAGES, tools=tools, tool_choice=asked
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    calls = answer.message.tool_calls
    assert calls[0].function.name == "look"
    given = (
        {"type": "any"} if choice == "required" else {"type": "tool", "name": "look"}
    )
    message = proxy.anthropic.messages.create(
        model="builtin",
        messages=MESSAGES,
        max_tokens=300,
        tools=[{"name": "look", "description": "Look.", "input_schema": LOOK}],
        tool_choice=given,
    )
    used = [block for block in message.content if block.type == "tool_use"]
    assert used[0].input["at"] in ("left", "right")


def test_a_schema_that_cannot_be_kept_to_is_a_400(proxy: Proxy) -> None:
    schema = {"type": "object", "not": {"required": ["a"]}}
    named = {"name": "odd", "schema": schema, "strict": True}
    form = {"type": "json_schema", "json_schema": named}
    body = {"model": "builtin", "messages": MESSAGES, "response_format": form}
    answer = proxy.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert "unsupported_schema" in answer.text
    assert "response_format.json_schema.schema" in answer.text
