"""A value without quotes is what its schema lets it be, in formats that have such."""

import json
import time
from typing import Any

import pytest

from sidecar.core.requests import Tool
from sidecar.output.calls.call_sink import ToolSyntax
from sidecar.output.calls.element_calls import minimax_xml, qwen3_coder_xml
from sidecar.output.calls.glm_calls import glm4_native
from sidecar.output.calls.tool_schema import ANY_TYPE, ToolSchema, declared_types
from testkit.call_texts import read_calls

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
WRITTEN = {
    "qwen": (
        qwen3_coder_xml,
        "<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>",
    ),
    "minimax": (
        minimax_xml,
        '<invoke name="f">\n<parameter name="a">{}</parameter>\n</invoke>',
    ),
    "glm": (glm4_native, "f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n"),
}


def read(kind: str, schema: Any, value: str, **root: Any) -> str:
    """The JSON of the argument `a`, whose schema is this."""
    reader, form = WRITTEN[kind]
    parameters = {"type": "object", "properties": {"a": schema}, **root}
    syntax = ToolSyntax("<t>", "</t>", (reader,))
    text = f"<t>{form.replace('{}', value)}</t>"
    found = read_calls(text, [syntax], (Tool("f", parameters, {}),))
    [(name, arguments)] = found.calls
    assert name == "f"
    return arguments


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize(
    ("schema", "text", "said"),
    [
        (OPTIONAL, "1e5", '"1e5"'),
        (OPTIONAL, "12345678901234567890.123", '"12345678901234567890.123"'),
        (OPTIONAL, "123", '"123"'),
        (OPTIONAL, '{"b":  1.10}', '"{\\"b\\":  1.10}"'),
        (OPTIONAL, '"q"', '"\\"q\\""'),
        (OPTIONAL, "true", '"true"'),
        (OPTIONAL, "null", "null"),
        ({"type": ["string", "null"]}, "17", '"17"'),
        ({"type": ["string", "integer"]}, "17", "17"),
        ({"type": ["string", "integer"]}, "a", '"a"'),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", "[1]"),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "1", '"1"'),
        ({"allOf": [{"type": "string"}]}, "1", '"1"'),
        ({"const": "1"}, "1", '"1"'),
        ({"enum": ["1", "2"]}, "2", '"2"'),
        ({"enum": ["1", 2]}, "2", "2"),
        ({"pattern": "^[0-9]+$"}, "2", '"2"'),
        ({"type": "STRING"}, "2", '"2"'),
        ({"$ref": "#/$defs/id"}, "2", '"2"'),
        ({"$ref": "#/$defs/none"}, "2", "2"),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "number"}, "12345678901234567890.123", "12345678901234567890.123"),
        ({"type": "number"}, "1e5", "1e5"),
        ({"type": "integer"}, "9007199254740993", "9007199254740993"),
        ({"type": "integer"}, "many", '"many"'),
        ({}, "2", "2"),
        ({}, '"q"', '"q"'),
        ({"type": []}, "2", "2"),
        ({"anyOf": []}, "2", "2"),
    ],
)
def test_a_value_is_of_a_type_that_its_schema_lets_in(
    kind: str, schema: Any, text: str, said: str
) -> None:
    """What the model wrote for a text is that text, to the letter."""
    found = read(kind, schema, text, **{"$defs": {"id": {"type": "string"}}})
    assert found == f'{{"a": {said}}}'
    json.loads(found)


def test_schemas_that_refer_to_themselves_are_looked_at_once() -> None:
    """A client's schema costs no time that grows with its branches."""
    node: Any = {"anyOf": [{"$ref": "#/$defs/node"}] * 200}
    wide: Any = {"anyOf": [{"type": "string"}]}
    for _ in range(14):
        wide = {"anyOf": [dict(wide) for _ in range(2)]}
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/node"}, "b": wide},
        "$defs": {"node": node},
    }
    started = time.process_time()
    found = declared_types(parameters)
    assert time.process_time() - started < 5
    assert found == {"a": ANY_TYPE, "b": ANY_TYPE}


@pytest.mark.parametrize("parameters", [None, [], {}, {"properties": [1]}])
def test_a_tool_may_declare_nothing(parameters: Any) -> None:
    assert declared_types(parameters) == {}


def test_odd_lists_of_what_is_required_are_passed_over() -> None:
    one = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"anyOf": [{**one, "required": [{}]}, {**one, "required": [["x"]]}]}
    assert declared_types(schema) == {"a": frozenset({"integer"})}


def test_names_and_types_are_left_of_a_schema_that_cannot_be_told() -> None:
    """Behind references too: an argument that is a whole number stays one."""
    inner = {"type": "integer", "multipleOf": 9999991}
    properties = {
        "a": {"$ref": "#/$defs/x"},
        "b": {"type": ["string", "null"]},
        "c": {},
    }
    whole = {"type": "object", "properties": properties, "$defs": {"x": inner}}
    assert ToolSchema(whole).names_and_types == {
        "type": "object",
        "properties": {
            "a": {"type": ["integer"]}, "b": {"type": ["null", "string"]}, "c": {},
        },
    }  # fmt: skip
    assert ToolSchema({"type": "object"}).names_and_types == {"type": "object"}
