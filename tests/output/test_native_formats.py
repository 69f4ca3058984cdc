"""What the models of each family write is read back: thinking, text and calls."""

import functools
import json
import random
from collections.abc import Sequence

import pytest

from sidecar.core.requests import Tool, ToolCall
from sidecar.output.families import OutputSyntax, find_family, output_syntax
from sidecar.output.native_formats import (
    bare_json,
    channels,
    deepseek,
    deepseek_dsml,
    mistral,
)
from sidecar.output.tool_calls import extract_calls, is_complete_call
from sidecar.output.tool_formats import FormatParser
from testkit.chats import Said
from testkit.real_talk import read, write
from testkit.real_templates import BY_NAME, FAMILIES, tokenizer_of_family

PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "lines": {"type": "array"},
    },
}
TOOLS = tuple(
    Tool(
        n,
        PARAMETERS,
        {"type": "function", "function": {"name": n, "parameters": PARAMETERS}},
    )
    for n in ("read", "write")
)
TWO = (read(path="a b.py", lines=[1, 2]), write(path="d", text='x = "1"\n  y}</a>]'))
SAID = [
    Said("I look.", "Hm. Well.", TWO[:1]),
    Said("", "Hm.", TWO),
    Said("Two {lines}:\n\nDone.", "Hm.\nWell."),
    Said('It is {"name": "x"}, I think.', ""),
    Said("", "", TWO[1:]),
]


def syntax_of(name: str) -> OutputSyntax:
    """As the loader chooses it."""
    tokenizer = tokenizer_of_family(name)
    library = (tokenizer.tool_call_start, tokenizer.tool_call_end,
               tokenizer.tool_parser)  # fmt: skip
    tags = (tokenizer.think_start, tokenizer.think_end)
    return output_syntax(
        find_family(None, name, name),
        tags if tokenizer.has_thinking else None,
        library if tokenizer.has_tool_calling else None,
        str(tokenizer.chat_template or ""),
        tokenizer.get_vocab(),
    )


def read_back(
    syntax: OutputSyntax, pieces: Sequence[str], *, thinks: bool
) -> tuple[str, str, list[tuple[str, object]]]:
    """Reasoning, text and calls."""
    complete = functools.partial(is_complete_call, syntax=syntax.tools, tools=TOOLS)
    always = "on" if syntax.family.always_reasons else "undecided"
    start = always if thinks else "off"
    splitter = syntax.new_splitter(start, complete, has_tools=True)  # type: ignore[arg-type]
    spans = [span for piece in pieces for span in splitter.feed(piece)]
    last, buffer = splitter.flush()
    spans += last
    found = extract_calls(buffer, syntax.tools, TOOLS, is_cut=False)
    content = "".join(text for kind, text in spans if kind == "content")
    reasoning = "".join(text for kind, text in spans if kind == "reasoning")
    calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
    seam = splitter.held_space if content and found.text else ""
    return reasoning.strip(), content + seam + found.text, calls


@pytest.mark.parametrize("said", SAID, ids=["text", "two", "answer", "json", "call"])
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_what_a_model_writes_is_read_back(name: str, said: Said) -> None:
    """However the text was cut into pieces."""
    family = BY_NAME[name]
    calls = said.calls if family.parallel else said.calls[-1:]
    said = Said(said.text, said.reasoning if family.think else "", calls)
    raw = family.write(said, "")
    expected = [(call.name, json.loads(call.arguments)) for call in calls]
    syntax = syntax_of(name)
    for seed in range(8):
        cuts = sorted(random.Random(seed).sample(range(len(raw) + 1), seed * 2))
        pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        found = read_back(syntax, pieces, thinks=bool(said.reasoning))
        assert found == (said.reasoning, said.text, expected)


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (deepseek, ""),
        (deepseek, "read {}"),
        (deepseek, "<｜tool▁call▁begin｜>read {}<｜tool▁call▁end｜>"),
        (deepseek, "<｜tool▁call▁begin｜>read<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
        (deepseek, "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        (deepseek, "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜> and so"),
        (deepseek_dsml, "words"),
        (deepseek_dsml, '<｜DSML｜invoke name="a">words</｜DSML｜invoke>'),
        (deepseek_dsml, '<｜DSML｜invoke name="a"></｜DSML｜invoke> words'),
        (deepseek_dsml, '<｜DSML｜invoke name="a"><｜DSML｜parameter name="b" '
                        'string="false">x</｜DSML｜parameter></｜DSML｜invoke>'),
        (bare_json, ' "other", "parameters": {}}'),
        (bare_json, ' "read"} is JSON'),
        (bare_json, ' "read"'),
        (mistral, "read[ARGS][1]"),
        (mistral, "read[ARGS]{} and so"),
        (mistral, "read[ARGS]{"),
        (mistral, "words"),
        (channels, "functions.read {}"),
        (channels, "<|message|>{}"),
        (channels, "functions.read<|message|>words"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_refused(parse: FormatParser, body: str) -> None:
    """It stays text."""
    try:
        found = parse(body, TOOLS)
    except ValueError:
        found = []
    assert found == []


@pytest.mark.parametrize(
    ("parse", "body", "expected"),
    [
        (deepseek, "<｜tool▁call▁begin｜>a<｜tool▁sep｜><｜tool▁call▁end｜>",
         [("a", {})]),
        (mistral, "a[CALL_ID]abc123456[ARGS]{}", [("a", {})]),
        (mistral, ' [{"name": "a", "arguments": {"b": 1}, "id": "abc123456"}]',
         [("a", {"b": 1})]),
        (channels, "functions.a<|channel|>commentary json<|message|>{}", [("a", {})]),
        (bare_json, ' "read", "parameters": {"name": "x"}}; ',
         [("read", {"name": "x"})]),
        (bare_json, ' "read"}\n{"name": "write", "arguments": {}}',
         [("read", {}), ("write", {})]),
    ],
)  # fmt: skip
def test_other_spellings_are_read_too(
    parse: FormatParser, body: str, expected: list[tuple[str, object]]
) -> None:
    """As the templates print past calls, or older models write them."""
    assert parse(body, TOOLS) == expected


def test_json_of_the_answer_stays_as_it_was_written() -> None:
    """A model that calls without a marker may also answer with JSON."""
    syntax = syntax_of("llama3.2")
    answer = 'Two:\n{"name": "Ann"}\n\n{"name": "Bob"}, that is all.'
    assert read_back(syntax, [answer], thinks=False) == ("", answer, [])


def test_a_call_of_no_tool_of_ours_is_text() -> None:
    """It says so to who reads it."""
    call = ToolCall("1", "f", "{}")
    raw = BY_NAME["llama3.2"].write(Said("", "", (call,)), "")
    assert read_back(syntax_of("llama3.2"), [raw], thinks=False) == ("", raw, [])
