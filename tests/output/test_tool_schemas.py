"""
Schemas as people's libraries write them, in calls of all formats.

What is of a schema is let in by its grammar, and read to the letter; what is not of it
is refused.
"""

import contextlib
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.core.requests import Tool, ToolCall, ToolChoice
from sidecar.output.calls.tool_schema import declared_types
from sidecar.output.grammars.call_grammar import block_grammar, calls_of
from sidecar.output.reasoning_splitter import new_splitter
from testkit.call_texts import collect
from testkit.real_templates import BY_NAME, tokenizer_of_family
from tests.output.test_call_grammar import Model, read

Json = dict[str, Any]
TEXT, WHOLE, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
COLOURS = {"type": "string", "enum": ["red", "blue"]}
ODD = ['a"b', "c\\d", "e\nf", "ü\U0001f600", "1", "null", "  x  "]
LETTERS = [
    "007", "null", "true", '{"a":1}', "  in\n    more\n", "x\n", "\nx", "\n\nx\n\n",
    "a\tb", "", "12345678901234567890", "1e5", "</b>", " ",
]  # fmt: skip
QUOTED = ("gemma4", "lfm2")  # a language of their own
UNQUOTED = ("qwen3-coder", "glm4.6", "minimax-m2", "deepseek-v3.2")
FAMILIES = ("qwen3", "devstral", "kimi-k2", "gpt-oss", *UNQUOTED, *QUOTED)


def of(properties: Json, required: list[str] | None = None, **more: Any) -> Json:
    needed = [*properties] if required is None else required
    return {"type": "object", "properties": properties, "required": needed,
            "additionalProperties": False, **more}  # fmt: skip


def defined(inner: Json, **definitions: Any) -> Json:
    return of(inner, **{"$defs": definitions})


POINT = of({"x": WHOLE})
NODE = of({"v": WHOLE, "kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}}})
TREE = of({"v": WHOLE, "kids": {"type": "array", "items": {"$ref": "#"}}})
# A schema, arguments that are of it, and some that are not.
CASES: dict[str, tuple[Json, list[Json], list[Json]]] = {
    "plain": (
        of({"a": TEXT, "n": WHOLE}), [{"a": "x", "n": 5}],
        [{"a": "x", "n": "y"}, {"a": "x"}],
    ),
    "no type": (
        {"properties": {"n": WHOLE}, "required": ["n"]}, [{"n": 5}], [{"n": "y"}, {}],
    ),
    "a list of types": (
        {**of({"n": WHOLE}), "type": ["object"]}, [{"n": 5}], [{"n": "y"}],
    ),
    "a reference at the root": (
        {"$ref": "#/$defs/A", "$defs": {"A": POINT}}, [{"x": 5}], [{"x": "y"}, {}],
    ),
    "an enum behind a reference": (
        defined({"c": {"$ref": "#/$defs/C"}}, C=COLOURS),
        [{"c": "red"}], [{"c": "green"}],
    ),
    "an enum in allOf": (
        of({"c": {"allOf": [{"$ref": "#/definitions/C"}]}}, definitions={"C": COLOURS}),
        [{"c": "red"}], [{"c": "green"}],
    ),
    "an enum or null": (
        of({"c": {"anyOf": [COLOURS, NULL]}}),
        [{"c": "red"}, {"c": None}], [{"c": "green"}],
    ),
    "null in an enum": (
        of({"c": {"type": ["string", "null"], "enum": ["red", None]}}),
        [{"c": "red"}, {"c": None}], [{"c": "green"}],
    ),
    "const": (of({"c": {"const": "red"}}), [{"c": "red"}], [{"c": "green"}]),
    "numbers of an enum": (of({"c": {"enum": [1, 2]}}), [{"c": 1}], [{"c": 3}]),
    "an enum of both": (
        of({"c": {"enum": [1, "a"]}}), [{"c": 1}, {"c": "a"}], [{"c": "zz"}],
    ),
    "odd texts of an enum": (
        of({"c": {"type": "string", "enum": ODD}}), [{"c": one} for one in ODD],
        [{"c": "q"}],
    ),
    "an object behind a reference": (
        defined({"p": {"$ref": "#/$defs/P"}}, P=POINT),
        [{"p": {"x": 5}}], [{"p": {"x": "q"}}, {"p": {}}, {"p": 5}],
    ),
    "a chain of references": (
        defined({"p": {"$ref": "#/$defs/P"}}, P=of({"x": {"$ref": "#/$defs/Q"}}),
                Q=WHOLE),
        [{"p": {"x": 5}}], [{"p": {"x": "q"}}],
    ),
    "an object or null": (
        defined({"p": {"anyOf": [{"$ref": "#/$defs/P"}, NULL]}}, P=POINT),
        [{"p": {"x": 5}}, {"p": None}], [{"p": {"x": "q"}}, {"p": 5}],
    ),
    "a reference to a property": (
        of({"a": POINT, "b": {"$ref": "#/properties/a"}}),
        [{"a": {"x": 1}, "b": {"x": 2}}], [{"a": {"x": 1}, "b": {"x": "q"}}],
    ),
    "itself": (
        TREE, [{"v": 1, "kids": []}, {"v": 1, "kids": [{"v": 2, "kids": []}]}],
        [{"v": 1, "kids": [[]]}, {"v": 1, "kids": [5]}],
    ),
    "a tree": (
        defined({"t": {"$ref": "#/$defs/Node"}}, Node=NODE),
        [{"t": {"v": 1, "kids": [{"v": 2, "kids": []}]}}],
        [{"t": {"v": 1, "kids": [5]}}],
    ),
    "values of any key": (
        of({"d": {"type": "object", "additionalProperties": WHOLE}}),
        [{"d": {}}, *({"d": {key: 1}} for key in (
            "q", "New York", "München", "2024-01-01", "a.b", "a/b", "名", "x@y.z",
            "$ref", "(a)", "50%", "C++", "#1",
        ))],
        [{"d": {"q": "x"}}],
    ),
    "a choice or a list": (
        of({"v": {"anyOf": [{"const": "all"}, {"type": "array", "items": TEXT}]}}),
        [{"v": one} for one in ("all", ["a", "b"], [])], [{"v": "none"}, {"v": 5}],
    ),
    "no members": (of({"d": of({})}), [{"d": {}}], [{"d": {"q": 1}}]),
    "a list of an enum": (
        defined({"l": {"type": "array", "items": {"$ref": "#/$defs/C"}}}, C=COLOURS),
        [{"l": ["red", "blue"]}, {"l": []}], [{"l": ["green"]}, {"l": "red"}],
    ),
    "a tuple": (
        of({"l": {"type": "array", "prefixItems": [WHOLE, TEXT], "minItems": 2,
                  "maxItems": 2}}),
        [{"l": [1, "a"]}], [{"l": ["a", 1]}],
    ),
    "a number or a text": (
        of({"v": {"anyOf": [WHOLE, TEXT]}}),
        [{"v": 5}, {"v": "five"}, {"v": "3.10"}, {"v": "1e3"}], [],
    ),
    "a text or null": (
        of({"v": {"anyOf": [TEXT, NULL]}}),
        [{"v": one} for one in (None, "x", "12", "1.5", "true", "[1]", "x\n")], [],
    ),
    "a union with a mark": (
        of({"o": {"anyOf": [of({"t": {"const": "a"}, "x": WHOLE}),
                            of({"t": {"const": "b"}, "y": TEXT})]}}),
        [{"o": {"t": "a", "x": 1}}, {"o": {"t": "b", "y": "q"}}],
        [{"o": {"t": "a", "y": "q"}}],
    ),
    "a long number": (of({"v": WHOLE}), [{"v": 123456789012345678901234567890}], []),
    "odd names": (
        of({"first name": TEXT, "a.b": TEXT, "go-on": TEXT, "from": WHOLE, "$f": TEXT,
            "größe": WHOLE}),
        [{"first name": "x", "a.b": "y", "go-on": "z", "from": 1, "$f": "w",
          "größe": 2}],
        [],
    ),
    "one that is not listed": (
        {"type": "object", "properties": {"a": WHOLE}, "required": ["a", "b"]},
        [{"a": 1, "b": 2}], [{"a": 1}],
    ),
    "what stands beside a union": (
        {"type": "object", "properties": {"action": COLOURS}, "required": ["action"],
         "oneOf": [{"properties": {"a": WHOLE}}, {"properties": {"b": WHOLE}}]},
        [{"action": "red", "a": 1}, {"action": "blue", "b": 2}, {"action": "red"}],
        [{"action": "green"}, {"a": 1}],
    ),
    "one of two must be there": (
        of({"p": {**of({"a": WHOLE, "b": TEXT}, []),
                  "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}),
        [{"p": {"a": 1}}, {"p": {"b": "x"}}], [{"p": {}}, {"p": 5}],
    ),
    "all of two": (
        of({"c": {"allOf": [COLOURS, {"description": "A colour."}]},
            "n": {"allOf": [TEXT, {"description": "A text."}]}}),
        [{"c": "red", "n": "90210"}], [{"c": "green", "n": "x"}],
    ),
    "all of two references": (
        {"allOf": [{"$ref": "#/$defs/Base"}, {"$ref": "#/$defs/Extra"}], "$defs": {
            "Base": {"type": "object", "properties": {"id": TEXT}, "required": ["id"]},
            "Extra": {"type": "object", "properties": {"note": TEXT},
                      "required": ["note"]}}},
        [{"id": "7", "note": "12"}], [{"id": "7"}],
    ),
    "a type beside a union": (
        of({"v": {"type": ["string", "null"],
                  "anyOf": [{"type": "string", "enum": ["a"]}, NULL]}}),
        [{"v": "a"}, {"v": None}], [{"v": "zz"}],
    ),
    "a mark beside a union": (
        of({"o": {"type": "object", "properties": {"kind": TEXT},
                  "required": ["kind"],
                  "oneOf": [{"properties": {"kind": {"const": "x"}}}]}}),
        [{"o": {"kind": "x"}}], [{"o": {"kind": "zz"}}],
    ),
    "a reference through a list": (
        of({"a": {"anyOf": [TEXT, NULL]}, "b": {"$ref": "#/properties/a/anyOf/0"}}),
        [{"a": "x", "b": "90210"}], [],
    ),
    "strings to the letter": (of({"s": TEXT}), [{"s": one} for one in LETTERS], []),
}  # fmt: skip
NAMES = ("a-b", "a.b", "from", "1a", "print", "_", "mcp__x-y__z", "a/b")


def _gemma(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_gemma(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_gemma, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def _python(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _glm(name: str, arguments: Json) -> str:
    parts = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        "</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{parts}</tool_call>"


def _listed(name: str, arguments: Json) -> str:
    inside = ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({inside})]<|tool_call_end|>"


WRITERS: dict[str, Callable[[str, Json], str]] = {
    "gemma4": lambda name, said: f"<|tool_call>call:{name}{_gemma(said)}<tool_call|>",
    "lfm2": _listed,
    "glm4.6": _glm,
    "gpt-oss": lambda name, said: (
        "<|channel|>commentary to=functions."
        f"{name} <|constrain|>json<|message|>{json.dumps(said, ensure_ascii=False)}"
    ),
}


def write(family: str, name: str, arguments: Json) -> str:
    """A call as a model of the family writes it."""
    if family in WRITERS:
        return WRITERS[family](name, arguments)
    call = ToolCall("x", name, json.dumps(arguments, ensure_ascii=False))
    return BY_NAME[family].calls([call])


def _of_family(family: str) -> Model:
    tokenizer = tokenizer_of_family(family)
    made = Model(family, tokenizer, str(tokenizer.chat_template))
    made.family = family
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Model:
    return _of_family(request.param)


@pytest.mark.parametrize("case", CASES)
def test_what_is_of_a_schema_is_let_in_and_read_to_the_letter(
    model: Model, case: str
) -> None:
    schema, good, bad = CASES[case]
    tools = (Tool("look", schema, {}),)
    grammar = model.grammar(ToolChoice("required"), tools)
    for arguments in good:
        text = write(model.family, "look", arguments)
        assert model.texts.takes(grammar, text), text
        found = read(model.syntax, text, tools)
        assert found.parsed == [("look", arguments)]
        assert found.text == ""
    for arguments in bad:
        text = write(model.family, "look", arguments)
        assert not model.texts.takes(grammar, text), text


@pytest.mark.parametrize("name", NAMES)
def test_tools_of_odd_names_are_called(model: Model, name: str) -> None:
    tools = (Tool(name, of({"v": WHOLE}), {}), Tool("a", of({"v": WHOLE}), {}))
    text = write(model.family, name, {"v": 1})
    assert model.texts.takes(model.grammar(ToolChoice("required"), tools), text)
    assert read(model.syntax, text, tools).parsed == [(name, {"v": 1})]


@pytest.mark.parametrize(("more", "is_split"), [({}, True), (False, False)])
def test_an_argument_that_is_not_declared_is_one_where_it_may_be(
    model: Model, more: Any, is_split: bool
) -> None:
    """Where it may not, what looks like one is a part of the text before it."""
    if model.family not in UNQUOTED:
        return
    properties = {"path": TEXT, "content": TEXT}
    schema: Json = {"type": "object", "properties": properties}
    schema |= {} if is_split else {"additionalProperties": more}
    said = {"path": "a.py", "content": "print(1)", "overwrite": True}
    text = write(model.family, "look", said)
    tools = (Tool("look", schema, {}),)
    [(_, found)] = read(model.syntax, text, tools, are_held=False).parsed
    assert (found == said) is is_split
    assert found["content"].startswith("print(1)")


# Texts that quote an end of their own call, where a client could take it for one.
QUOTES = {
    "qwen3-coder": (
        "Close with </parameter></function> please.\n",
        "see\n</parameter> <parameter=path>\nyes",
        "\n</parameter> </function>",
        "ends </PARAMETER>\n\n</Parameter>\n",
        "so </parameter></function><function=look><parameter=path>rm</parameter>"
        "</function> it is",
    ),
    "seed-oss": (
        "Close with </parameter></function> please.\n",
        "see </parameter><parameter=path>yes",
    ),
    "minimax-m2": (
        "Close with </parameter></invoke> please.\n",
        'see </parameter><parameter name="path">yes',
    ),
    "deepseek-v3.2": ("Close with </｜DSML｜parameter></｜DSML｜invoke> please.\n",),
}
# What a text cannot hold: behind it nothing tells where it ends.
ENDS = {
    "qwen3-coder": "\n</parameter>\n", "seed-oss": "</parameter>\n",
    "minimax-m2": "</parameter>\n", "glm4.6": "</arg_value>",
    "deepseek-v3.2": "</｜DSML｜parameter>\n", "gemma4": '<|"|>',
}  # fmt: skip


@pytest.mark.parametrize("family", QUOTES)
def test_a_held_text_may_quote_its_calls_end(family: str) -> None:
    """Its grammar takes it for a text; once the reader ran what followed as a call."""
    model = _of_family(family)
    tools = (Tool("look", of({"content": TEXT, "path": TEXT}), {}),)
    for content in QUOTES[family]:
        said = {"content": content, "path": "a.md"}
        text = write(family, "look", said)
        before, behind = text.split(content)
        grammar = model.grammar(ToolChoice("required"), tools)
        assert model.texts.takes(grammar, before, *content, behind)
        found = read(model.syntax, text, tools)
        assert found.parsed == [("look", said)]
        assert found.text == ""


@pytest.mark.parametrize("family", ["glm4.6", "glm4.7"])
def test_a_held_list_beside_a_choice_may_quote_its_calls_end(family: str) -> None:
    """In letters: JSON has an end of its own, whatever its strings say."""
    model = _of_family(family)
    quoted = "</arg_value></tool_call><tool_call>look<arg_key>v</arg_key><arg_value>all"
    union = {"anyOf": [{"const": "all"}, {"type": "array", "items": TEXT}]}
    tools = (Tool("look", of({"v": union}), {}),)
    before, behind = write(family, "look", {"v": "@@"}).split("@@")
    for said in ([quoted], ["x</arg_value>y"], "all"):
        text = said if isinstance(said, str) else json.dumps(said)
        grammar = model.grammar(ToolChoice("required"), tools)
        assert model.texts.takes(grammar, before, *text, behind)
        found = read(model.syntax, before + text + behind, tools)
        assert found.parsed == [("look", {"v": said})]
        assert found.text == ""


def test_a_choice_may_hold_the_end_of_its_call() -> None:
    model = _of_family("qwen3-coder")
    texts = ["b", "a\n</parameter>\nb", "B"]
    tools = (Tool("look", of({"v": {"enum": texts}, "w": TEXT}), {}),)
    for one in texts:
        said = {"v": one, "w": "x"}
        text = write("qwen3-coder", "look", said)
        assert model.texts.takes(model.grammar(ToolChoice("required"), tools), text)
        assert read(model.syntax, text, tools).parsed == [("look", said)]


@pytest.mark.parametrize("family", ["qwen3", "qwen3-coder", "glm4.6", "devstral"])
def test_held_calls_stand_in_lines_or_not(family: str) -> None:
    """Templates of one format print either."""
    model = _of_family(family)
    tools = (Tool("look", of({"v": WHOLE}), {}),)
    calls = [write(family, "look", {"v": number}).strip() for number in (1, 2)]
    grammar = model.grammar(ToolChoice("required"), tools)
    for between in ("", "\n"):
        text = between.join(calls)
        assert model.texts.takes(grammar, text)
        found = read(model.syntax, text, tools)
        assert found.parsed == [("look", {"v": 1}), ("look", {"v": 2})]
        assert found.text.strip() == ""


@pytest.mark.parametrize("family", ENDS)
def test_no_held_text_has_its_own_end_in_it(family: str) -> None:
    """Not in letters either, where the end is a token: its reader sees the text."""
    model = _of_family(family)
    tools = (Tool("look", of({"content": TEXT}), {}),)
    grammar = model.grammar(ToolChoice("required"), tools)
    before, behind = write(family, "look", {"content": "@@"}).split("@@")
    for content in ("see", "see " + ENDS[family][:-2]):
        assert model.texts.takes(grammar, before, *content, behind), content
    content = f"see {ENDS[family]} then"
    assert not model.texts.takes(grammar, before, *content, behind)


def test_a_call_that_lost_its_opener_is_read_as_a_free_one() -> None:
    """A strict tool's grammar begins at the opener: such a call it does not hold."""
    model = _of_family("qwen3-coder")
    tools = (Tool("look", of({"content": TEXT, "path": TEXT}), {}),)
    text = (
        "<function=look><parameter=content>x</parameter><parameter=path>y</parameter>"
        "</function>"
    )
    splitter = new_splitter(model.syntax, "off", tools, are_calls_held=True)
    pieces = [piece for char in text for piece in splitter.feed(char)]
    found = collect([*pieces, *splitter.flush(is_cut=False)[0]])
    assert found.parsed == [("look", {"content": "x", "path": "y"})]


QUOTED_ELEMENTS = {
    "qwen3-coder": "Use </parameter> <parameter=x> here.\n",
    "minimax-m2": 'Use </parameter> <parameter name="x"> here.\n',
    "glm4.6": "Use </arg_value> <li> here </arg_value></li>\n",
    "glm4.7": "<li><arg_value>x</arg_value></li> and </arg_value>",
}


@pytest.mark.parametrize("family", QUOTED_ELEMENTS)
def test_an_element_that_a_text_quotes_is_a_part_of_it(family: str) -> None:
    """In a line of prose, and where that argument was given already."""
    model = _of_family(family)
    schema = {"type": "object", "properties": {"path": TEXT, "content": TEXT}}
    tools = (Tool("look", schema, {}),)
    prose = QUOTED_ELEMENTS[family]
    twice = prose.replace("=x>", "=path>").replace('"x"', '"path"')
    given = "a</arg_value>\n<arg_key>path</arg_key>\n<arg_value>q"
    for content in (prose, twice, *((given,) if family == "glm4.6" else ())):
        said = {"path": "a.md", "content": content}
        found = read(model.syntax, write(family, "look", said), tools, are_held=False)
        assert found.parsed == [("look", said)]


def test_of_glm_an_argument_that_may_not_be_is_text() -> None:
    """Where additionalProperties is false, and its own tags are quoted."""
    model = _of_family("glm4.6")
    content = "a</arg_value>\n<arg_key>zzz</arg_key>\n<arg_value>q"
    said = {"content": content, "path": "a.md"}
    text = write("glm4.6", "look", said)
    tools = (Tool("look", of({"content": TEXT, "path": TEXT}), {}),)
    assert read(model.syntax, text, tools, are_held=False).parsed == [("look", said)]


def _nested(kinds: list[str]) -> Json:
    schema: Json = {"type": kinds}
    for _ in range(8):
        schema = {"type": kinds, "items": schema, "properties": {"a": schema}}
    return of({"v": schema})


def _shared(count: int) -> Json:
    """Many arguments that refer to one long definition."""
    texts = {"enum": [f"text {n}" for n in range(20_000)]}
    each = {"anyOf": [{"$ref": "#/$defs/E"}, WHOLE]}
    return of({f"a{n}": each for n in range(count)}, **{"$defs": {"E": texts}})


def _types_and_members() -> Json:
    members = {f"x{n}": 0 for n in range(3_000)}
    return of({"at": {"type": [""] * 3_000 + ["string", "null"], **members}})


def _wide_references() -> Json:
    """Many arguments, each one of many references to something wide."""
    wide = {"type": "string", **{f"x{n}": 0 for n in range(5_000)}}
    union = {"anyOf": [{"$ref": "#/$defs/B"}] * 1_000}
    arguments = {f"p{n}": {"$ref": "#/$defs/A"} for n in range(20)}
    return of(arguments, **{"$defs": {"A": union, "B": wide}})


def _types_and_choices() -> Json:
    choices = [f"text {n}" for n in range(1_500)]
    one = {"type": ["string", "null"] * 500, "enum": choices}
    return of({"a": one, "b": {"anyOf": [dict(one) for _ in range(300)]}})


def _parts_of_parts() -> Json:
    """Each level refers to the next one again and again, and the last says nothing."""
    levels: Json = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 40} for n in range(9)
    }
    return of({"a": {"$ref": "#/$defs/d0"}}, **{"$defs": {**levels, "d9": {}}})


def _many_definitions() -> Json:
    """Parts that bring definitions of their own, merged again and again."""
    part = {"type": "object", "$defs": {f"x{n}": {} for n in range(20_000)}}
    each = {"allOf": [{"$ref": "#/$defs/P"}] * 64}
    return of({f"a{n}": each for n in range(60)}, **{"$defs": {"P": part}})


def _empty_members() -> Json:
    union = {"anyOf": [{}] * 1_000}
    each = {"$ref": "#/$defs/U"}
    return of({f"a{n}": each for n in range(500)}, **{"$defs": {"U": union}})


def _spelled_references() -> Json:
    """One list of references to itself, of which no two are spelled alike."""
    names = ["".join(f"%{ord(c):02{x}}" for c in "ab") for x in "xX"]
    digits = ["a", "%61"]
    paths = ["/".join(digits[n >> b & 1] for b in range(11)) for n in range(2_000)]
    inner: Json = {"anyOf": [{"$ref": f"#/$defs/{path}"} for path in [*names, *paths]]}
    inner["type"] = "array"
    inner["prefixItems"] = [{"$ref": f"#/$defs/{path}"} for path in paths]
    nested: Any = inner
    for _ in range(11):
        nested = {"a": nested}
    return of({"v": {"$ref": "#/$defs/" + paths[0]}}, **{"$defs": nested})


def _own_parts() -> Json:
    """A part of a value refines what another says of it: it is new each time."""
    node = {"$ref": "#/$defs/Node"}
    base = {"type": "object", "properties": {"up": {"type": "object"}, "n": WHOLE}}
    more = {"type": "object", "properties": {"up": node, "side": node}}
    defs = {"Base": base, "Node": {"allOf": [{"$ref": "#/$defs/Base"}, more]}}
    return of({"a": node}, **{"$defs": defs})


def _long_chain() -> Json:
    chain = {f"d{n}": of({"a": {"$ref": f"#/$defs/d{n + 1}"}}) for n in range(3_000)}
    return of({"a": {"$ref": "#/$defs/d0"}}, **{"$defs": {**chain, "d3000": WHOLE}})


@pytest.mark.parametrize(
    "schema",
    [
        _spelled_references(),
        _own_parts(),
        _long_chain(),
        _parts_of_parts(),
        _empty_members(),
        _many_definitions(),
        _nested(["array", "object", "string"] * 20),
        _shared(2_000),
        _types_and_members(),
        _wide_references(),
        _types_and_choices(),
    ],
    ids=[
        "spelled references",
        "own parts",
        "chain",
        "parts",
        "empty",
        "definitions",
        "types in types",
        "one definition",
        "members",
        "references",
        "choices",
    ],
)
def test_no_schema_makes_a_grammar_that_is_many_times_longer(
    model: Model, schema: Json
) -> None:
    """It is built where nothing ends it, before it is tried."""
    tools = (Tool("look", schema, {}),)
    most = 4 * len(json.dumps(schema)) + (1 << 18)
    own, vocab = model.syntax.calls[0], model.vocab
    tracemalloc.start()
    try:
        started = time.process_time()
        declared_types(schema)
        with contextlib.suppress(ValueError):  # too long: told by names and types
            calls = calls_of(ToolChoice("required"), tools, own, vocab)
            assert sum(map(len, calls.rules)) < most
            if own.opener in vocab:
                assert len(block_grammar(tools, own, vocab)) < most
        assert time.process_time() - started < 20
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
