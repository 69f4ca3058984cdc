"""
Calls as the models' own templates print them are read back, and let in where calls must
come: a model writes what it was shown.
"""

import json
from typing import Any

import pytest

from sidecar.core.requests import Tool, ToolCall, ToolChoice
from testkit.real_templates import BY_NAME, tokenizer_of_family
from tests.output.test_call_grammar import Model, read

Json = dict[str, Any]
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
NULL, BOOLEAN = {"type": "null"}, {"type": "boolean"}
INNER = {
    "type": "object",
    "properties": {"k": TEXT, "v": BOOLEAN},
    "required": ["k", "v"],
    "additionalProperties": False,
}
VALUES: dict[str, tuple[Json, Any]] = {
    "true": (BOOLEAN, True),
    "false": (BOOLEAN, False),
    "null or a number": ({"anyOf": [WHOLE, NULL]}, None),
    "null or a text": ({"type": ["string", "null"]}, None),
    "a choice of null": ({"enum": ["a", None]}, None),
    "a choice of true": ({"enum": [5, True]}, True),
    "a number": (WHOLE, 5),
    "a fraction": ({"type": "number"}, 1.5),
    "an object": ({"type": "object"}, {"a": True, "b": None, "c": "x"}),
    "a list of texts": ({"type": "array", "items": TEXT}, ["a", "b'c", 'd"e']),
    "a list of odd texts": (
        {"type": "array", "items": TEXT},
        ["10\xa0km", "\x1b[1m", "\u200b", "\t", "\\d", "\U000e0001", "it's \"q\""],
    ),
    "a list of constants": ({"type": "array", "items": BOOLEAN}, [True, False]),
    "a list of objects": (
        {"type": "array", "items": INNER}, [{"k": "ü 'q'", "v": True}],
    ),
    "nothing in it": ({"type": "object"}, {}),
    "a line": (TEXT, "print(1)\n"),
    "an indented line": (TEXT, "\n    return 1"),
    "line breaks": (TEXT, "\n\nx\n\n"),
    "an empty text": (TEXT, ""),
    "blanks": (TEXT, "  x  "),
    "quotes": (TEXT, "a \"q\" 'r' \\ b"),
    "digits": (TEXT, "007"),
    "a word": (TEXT, "True"),
    "a choice": ({"type": "string", "enum": ["a", "b"]}, "b"),
    "tags": (TEXT, "<b>&amp;</b>"),
}  # fmt: skip
# Templates that print calls, and openers that are found in what they print.
OPENERS = {
    "qwen2.5": "<tool_call>", "qwen3": "<tool_call>", "qwen3-coder": "<tool_call>",
    "qwen3.5": "<tool_call>", "qwen3.6": "<tool_call>", "qwen3.8": "<tool_call>",
    "nemotron-3": "<tool_call>", "step-3.5": "<tool_call>",
    "seed-oss": "<seed:tool_call>", "glm4.5": "<tool_call>", "glm4.6": "<tool_call>",
    "glm4.7": "<tool_call>", "minimax-m2": "<minimax:tool_call>",
    "gemma4": "<|tool_call>", "lfm2": "<|tool_call_start|>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜>", "granite-4.0": "<tool_call>",
    "kimi-k2": "<|tool_calls_section_begin|>",
}  # fmt: skip
# Printed as Python has it, and its grammar knows JSON's way alone.
NOT_LET_IN = {
    "seed-oss": (
        "an object", "a list of texts", "a list of constants", "a list of objects",
        "a list of odd texts",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=OPENERS)
def model(request: pytest.FixtureRequest) -> Model:
    tokenizer = tokenizer_of_family(request.param)
    made = Model(request.param, tokenizer, str(tokenizer.chat_template))
    made.family = request.param
    return made


def printed(model: Model, arguments: Json) -> str:
    """The block of one call, as the template prints it in a later prompt."""
    tokenizer = tokenizer_of_family(model.family)
    function = {"name": "look", "arguments": arguments}
    call = {"id": "call12345", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "name": "look", "content": "k"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    own = model.syntax.calls[0]
    begin = text.rindex(own.opener)
    return text[begin : text.index(own.closer, begin) + len(own.closer)]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("are_held", [True, False])
def test_a_call_is_read_as_it_is_printed(
    model: Model, value: str, *, are_held: bool
) -> None:
    schema, said = VALUES[value]
    arguments = {"v": said, "z": "end"}
    whole = {
        "type": "object",
        "properties": {"v": schema, "z": TEXT},
        "required": ["v", "z"],
        "additionalProperties": False,
    }
    tools = (Tool("look", whole, {}),)
    text = printed(model, arguments)
    if are_held:
        grammar = model.grammar(ToolChoice("required"), tools)
        is_let_in = model.texts.takes(grammar, text)
        assert is_let_in != (value in NOT_LET_IN.get(model.family, ())), text
        if not is_let_in:
            return
    found = read(model.syntax, text, tools, are_held=are_held)
    assert found.parsed == [("look", arguments)], text
    assert found.text == ""


def test_the_tests_write_calls_as_templates_print_them(model: Model) -> None:
    """Else they prove what no model was ever shown."""
    arguments = {"a": True, "b": None, "c": [1, "x"], "d": "it's\n", "e": 0.5}
    call = ToolCall("x", "look", json.dumps(arguments))
    written = BY_NAME[model.family].calls([call])
    assert written.strip() == printed(model, arguments)
