"""Fields of Google's bodies by either of their names, and what has no effect."""

from typing import Any

import pytest

from litellm_mlx.google_body import in_vain, readable

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
SAID: Json = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


@pytest.mark.parametrize("tools", ["functionDeclarations", "function_declarations"])
@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("parameters", "parameters"),
        ("parametersJsonSchema", "parametersJsonSchema"),
        ("parameters_json_schema", "parametersJsonSchema"),
    ],
)
def test_a_tool_keeps_its_parameters(tools: str, sent: str, read: str) -> None:
    """The Python SDK writes the names that LiteLLM does not know."""
    body = {**SAID, "tools": [{tools: [{"name": "w", sent: SCHEMA}]}]}
    (tool,) = readable(body)["tools"]  # type: ignore[misc]
    assert tool == {"functionDeclarations": [{"name": "w", read: SCHEMA}]}
    assert in_vain(body) == []


@pytest.mark.parametrize("config", ["generationConfig", "generation_config", "config"])
def test_a_configuration_has_either_name(config: str) -> None:
    """All of it in the one that LiteLLM reads."""
    asked = {"max_output_tokens": 7, "stop_sequences": ["x"], "topP": 0.5}
    body = {**SAID, config: asked}
    wanted = {"maxOutputTokens": 7, "stopSequences": ["x"], "topP": 0.5}
    assert readable(body)["config"] == wanted
    assert in_vain(body) == []


def test_a_choice_of_tools_has_either_name() -> None:
    calling = {"mode": "AUTO", "allowed_function_names": ["w"]}
    body = {**SAID, "tool_config": {"function_calling_config": calling}}
    wanted = {"mode": "AUTO", "allowedFunctionNames": ["w"]}
    assert readable(body)["toolConfig"] == {"functionCallingConfig": wanted}


def test_what_a_declaration_says_in_vain_is_named() -> None:
    """A chat has no place for it."""
    one = {"name": "w", "behavior": "BLOCKING", "response_json_schema": {}, "x": None}
    body = {**SAID, "tools": [{"functionDeclarations": [{"name": "v"}, one]}]}
    where = "tools[0].functionDeclarations[1]"
    assert in_vain(body) == [f"{where}.behavior", f"{where}.response_json_schema"]


@pytest.mark.parametrize("tools", [None, 5, [5], [{"functionDeclarations": 5}]])
def test_odd_tools_are_named_by_nobody(tools: object) -> None:
    """They are refused elsewhere, or ask for nothing."""
    assert in_vain({**SAID, "tools": tools}) == []
