"""What is written of a call in a model's own way is read back as that call."""

import json
import random
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from sidecar.core.requests import Tool, ToolChoice
from sidecar.output.grammars.call_grammar import call_grammar, calls_of
from sidecar.output.output_syntax import Markers
from sidecar.output.reasoning_splitter import StreamSplitter
from sidecar.output.tool_syntax import TOOL_PARSERS
from sidecar.output.written_calls import writer_of
from testkit.call_texts import collect
from testkit.chat_templates import BUILTIN
from testkit.grammar_texts import GrammarTexts

TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": TEXT,
        "content": TEXT,
        "times": {"type": "integer"},
        "deep": {"type": "boolean"},
        "more": {"type": "object"},
        "list": {"type": "array"},
        "none": {"type": "null"},
    },
}
TOOLS = (Tool("write", SCHEMA, {}),)
CONTENTS = [
    "print(1)\n", "\n  x\n", "", "a \"q\" 'r' \\n \\", "<b>&</b> {\"a\": [1]}",
    "ü 名 😀",
    "</tool_call> <tool_call>", "[TOOL_CALLS] call:write{}", "007", "null", "True",
    "```json\n{}\n```",
]  # fmt: skip
REST: dict[str, Any] = {
    "times": 5, "deep": True, "more": {"a": [1, "x", None], "b-c": "</parameter>"},
    "list": ["a", {"k": False}], "none": None,
}  # fmt: skip


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_call_is_read_as_it_was_written(parser: str, content: str) -> None:
    """However the text is cut."""
    syntaxes = TOOL_PARSERS[parser]
    said = {"path": "a.py", "content": content, **REST}
    write = writer_of(syntaxes)
    assert write is not None
    text = write("write", said)
    chance = random.Random(1)
    for count in (1, 2, *range(3, 40, 4), len(text)):
        places = sorted(chance.sample(range(len(text) + 1), min(count, len(text)) - 1))
        ends = zip([0, *places], [*places, len(text)], strict=True)
        markers = Markers("<no thinking>", "</no thinking>")
        splitter = StreamSplitter(markers, "off", syntaxes, TOOLS)
        pieces = [p for a, b in ends for p in splitter.feed(text[a:b])]
        found = collect([*pieces, *splitter.flush(is_cut=False)[0]])
        assert found.parsed == [("write", said)], text
        assert found.text == ""


# Names that would end their own tag, or begin another argument.
NAMES = [
    "a b", "a-b", "k$", "from", "@t", "ключ", "名", "", "a:1,content", "content\n",
    "a=1, path", 'path="x", content', "a>\nx</parameter>\n<parameter=content",
    'a">x</parameter>\n<parameter name="content',
    "x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>content",
]  # fmt: skip


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_offered", [True, False])
def test_no_name_of_an_argument_makes_it_another_call(
    parser: str, name: str, is_offered: bool
) -> None:
    """GLM's elements have no other way to write such a name than with escapes."""
    said = {name: "x", "path": "a.py"}
    write = writer_of(TOOL_PARSERS[parser])
    assert write is not None
    markers = Markers("<no thinking>", "</no thinking>")
    tools = TOOLS if is_offered else (Tool("write", {}, {}),)
    splitter = StreamSplitter(markers, "off", TOOL_PARSERS[parser], tools)
    pieces = splitter.feed(write("write", said))
    found = collect([*pieces, *splitter.flush(is_cut=False)[0]])
    if parser == "glm4_native" and found.parsed != [("write", said)]:
        escaped = json.dumps(name).replace("<", "\\u003c").replace(">", "\\u003e")
        assert found.parsed == [("write", {escaped: "x", "path": "a.py"})]
    else:
        assert found.parsed == [("write", said)]
    assert found.text == ""


# Gemma 4's quotes are tokens, which this vocabulary does not have.
@pytest.mark.parametrize("parser", [one for one in TOOL_PARSERS if one != "gemma4"])
def test_a_grammar_lets_in_what_is_written(parser: str) -> None:
    """It stands in prompts as an example: a model that must call follows that."""
    syntax, write = TOOL_PARSERS[parser][0], writer_of(TOOL_PARSERS[parser])
    assert write is not None
    properties = {"at": TEXT, "times": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["at", "times"]}
    tools = (Tool("look", schema, {}),)
    tokenizer = load_tokenizer(BUILTIN)
    calls = calls_of(ToolChoice("required"), tools, syntax, tokenizer.get_vocab())
    grammar = call_grammar(calls, syntax, tokenizer.get_vocab())
    text = write("look", {"at": "x y", "times": 5})
    assert GrammarTexts(tokenizer).takes(grammar, text), text
