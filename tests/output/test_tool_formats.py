"""Each tool-call format: what it reads, and what it refuses."""

import importlib
import pkgutil

import mlx_lm.tool_parsers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.requests import Tool
from sidecar.output.calls.call_sink import Format, ToolSyntax
from sidecar.output.calls.library_calls import from_library
from testkit.call_texts import FORMATS, parse, read_calls


def make_tool(name: str, **types: str) -> Tool:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": "", "parameters": parameters}
    return Tool(name, parameters, {"type": "function", "function": function})


TOOLS = (make_tool("get_weather", city="string", n="integer"), make_tool("now"))
WEATHER = ("get_weather", {"city": "Rome", "n": 2})

# format -> insides of one block that all mean WEATHER
SAME = {
    "hermes_json": [
        '{"name": "get_weather", "arguments": {"city": "Rome", "n": 2}}',
        '\n{"name":"get_weather",\n "arguments":{"city":"Rome","n":2}}\n',
        '{"arguments": {"city": "Rome", "n": 2}, "name": "get_weather"}',
        '{"name": "get_weather", "parameters": {"city": "Rome", "n": 2}}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\", \\"n\\": 2}"}',
        '[{"name": "get_weather", "arguments": {"city": "Rome", "n": 2}}]',
    ],
    "qwen3_coder_xml": [
        "<function=get_weather><parameter=city>Rome</parameter>"
        "<parameter=n>2</parameter></function>",
        "\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=n>\n2\n</parameter>\n</function>\n",
        "<FUNCTION=get_weather><Parameter=city>Rome</Parameter>"
        "<parameter=n>2</PARAMETER></Function>",
    ],
    "glm4_native": [
        "get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
        "<arg_key>n</arg_key><arg_value>2</arg_value>",
        "get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n",
        "get_weather<ARG_KEY>city</ARG_KEY><arg_value>Rome</Arg_Value>"
        "<arg_key>n</arg_key><arg_value>2</arg_value>",
        "get_weather<city>Rome</city><n>2</n>",
        'get_weather<city="Rome"</city><n="2"</n>',
    ],
}
LIBRARY = {
    "function_gemma": "call:get_weather{city:<escape>Rome<escape>,n:2}",
    "gemma4": 'call:get_weather{city:<|"|>Rome<|"|>,n:2}',
    "kimi_k2": "functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome", "n": 2}',
    "longcat": "get_weather<longcat_arg_key>city</longcat_arg_key>"
    "<longcat_arg_value>Rome</longcat_arg_value><longcat_arg_key>n</longcat_arg_key>"
    "<longcat_arg_value>2</longcat_arg_value>",
    "minimax_m2": '<invoke name="get_weather"><parameter name="city">Rome</parameter>'
    '<parameter name="n">2</parameter></invoke>',
    "mistral": 'get_weather[ARGS]{"city": "Rome", "n": 2}',
    "pythonic": '[get_weather(city="Rome", n=2)]',
}
PROSE = "get_weather is the tool to call for the city of Rome"
NOT_CALLS = {
    "prose that names the tool": PROSE,
    "nothing": "",
    "white space": " \n ",
    "cut JSON": '{"name": "get_weather", "arguments": {"city": "Ro',
    "cut XML": "<function=get_weather><parameter=city>Ro",
    "cut native": "get_weather<arg_key>city</arg_key><arg_value>Ro",
    "JSON without a name": '{"arguments": {"city": "Rome"}}',
    "JSON with a number for a name": '{"name": 3, "arguments": {}}',
    "JSON with a list of arguments": '{"name": "get_weather", "arguments": [1]}',
    "JSON and prose": '{"name": "get_weather", "arguments": {}} and more',
    "a number no reader takes": '{"name": "get_weather", "arguments": {"n": NaN}}',
    "an unknown bare word": "somewhere",
    "native with stray text": "get_weather so <arg_key>a</arg_key><arg_value>1"
    "</arg_value>",
    "XML with stray text": "<function=get_weather>so<parameter=n>2</parameter>"
    "</function>",
}


def library_parser(name: str) -> tuple[ToolSyntax, Format]:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    read = from_library(module.parse_tool_call)
    return ToolSyntax(module.tool_call_start, module.tool_call_end, (read,)), read


def library_names() -> list[str]:
    return [m.name for m in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)]


@pytest.mark.parametrize(
    ("name", "body"), [(name, body) for name in SAME for body in SAME[name]]
)
def test_format_reads_its_call(name: str, body: str) -> None:
    """Each spelling of the format gives the same name and typed arguments."""
    assert parse(FORMATS[name], body, TOOLS) == [WEATHER]


@pytest.mark.parametrize("name", LIBRARY)
def test_a_parser_of_mlx_lm_reads_its_call(name: str) -> None:
    """Formats that mlx-lm ships come out as the same parsed call."""
    _, read = library_parser(name)
    assert parse(read, LIBRARY[name], TOOLS) == [WEATHER]


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("case", NOT_CALLS)
def test_format_refuses_what_is_no_call(name: str, case: str) -> None:
    """Prose, empty, cut and malformed blocks are a ValueError, never a call."""
    with pytest.raises(ValueError, match=r"\S"):
        parse(FORMATS[name], NOT_CALLS[case], TOOLS)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("other", SAME)
def test_format_refuses_another_formats_inside(name: str, other: str) -> None:
    """No format reads a block of another one, so the order of trial is no matter."""
    if name == other:
        return
    for body in SAME[other]:
        with pytest.raises(ValueError, match=r"\S"):
            parse(FORMATS[name], body, TOOLS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("007", "007"),
        ("true", "true"),
        ("\nline\n", "line"),
        ("\n\nline\n\n", "\nline\n"),
        ('{"a": 1}', '{"a": 1}'),
        ("", ""),
    ],
)
def test_a_declared_string_stays_text(text: str, expected: str) -> None:
    """A string parameter is not read as JSON; one newline at each end goes."""
    body = f"<function=get_weather><parameter=city>{text}</parameter></function>"
    assert parse(FORMATS["qwen3_coder_xml"], body, TOOLS)[0][1] == {"city": expected}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", 2),
        ("2.5", 2.5),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ('{"a": "b"}', {"a": "b"}),
        ("Rome", "Rome"),
        ('"Rome"', "Rome"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        ("1e999", "1e999"),
    ],
)
def test_other_values_are_json_or_text(text: str, expected: object) -> None:
    """What is not declared a string is JSON if it parses as such, else text."""
    body = f"unlisted<arg_key>x</arg_key><arg_value>{text}</arg_value>"
    assert parse(FORMATS["glm4_native"], body, TOOLS)[0][1] == {"x": expected}


def test_several_functions_in_one_block_keep_their_order() -> None:
    """Two elements of one block are two calls, in order."""
    body = (
        "<function=now></function>\n"
        "<function=get_weather><parameter=n>2</parameter></function>"
    )
    calls = parse(FORMATS["qwen3_coder_xml"], body, TOOLS)
    assert calls == [("now", {}), ("get_weather", {"n": 2})]


def test_a_call_without_arguments() -> None:
    """Empty arguments are an empty object in every format."""
    assert parse(FORMATS["hermes_json"], '{"name": "now"}', TOOLS) == [("now", {})]
    body = '{"name": "now", "arguments": null}'
    assert parse(FORMATS["hermes_json"], body, TOOLS) == [("now", {})]
    assert parse(FORMATS["glm4_native"], "now", TOOLS) == [("now", {})]


def test_raw_newlines_in_json_strings_are_read() -> None:
    """Models write line breaks into JSON strings; the call is whole all the same."""
    body = '{"name": "now", "arguments": {"text": "a\nb"}}'
    assert parse(FORMATS["hermes_json"], body, TOOLS)[0][1] == {"text": "a\nb"}


SCRAPS = [
    "get_weather", "<function=", "</function>", "<parameter=", "</parameter>", ">", "<",
    "city", "=", '"Rome"', "{", "}", "[", "]", "(", ")", ":", ",", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "call:", "<escape>", "\n", " ",
    "1e999", "[ARGS]", '<invoke name="', "</invoke>", "{1, 2}", "b'x'",
    "functions.get_weather:0",
    "<|tool_call_argument_begin|>", "\\ud800", "[[[[[[", "'", "-", "NaN", '"name"',
]  # fmt: skip


@given(st.lists(st.sampled_from(SCRAPS), max_size=12).map("".join))
def test_no_text_makes_a_parser_raise_or_speak_no_json(body: str) -> None:
    """Whatever stands in a block, each parser gives calls or leaves it as text."""
    for name in library_names():
        syntax, _ = library_parser(name)
        buffer = syntax.opener + body + syntax.closer
        for called, arguments in read_calls(buffer, [syntax], TOOLS).calls:
            assert called.encode()
            assert arguments.encode()
            assert "NaN" not in arguments or '"' in arguments
