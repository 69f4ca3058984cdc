"""What the models of each family write is read back: thinking, text and calls."""

import json
import random
from collections.abc import Sequence

import pytest

from sidecar.core.requests import Tool, ToolCall
from sidecar.output.calls.call_sink import Format
from sidecar.output.calls.element_calls import deepseek_dsml
from sidecar.output.calls.json_calls import bare_json, hermes_json
from sidecar.output.calls.marked_calls import channels, deepseek, mistral
from sidecar.output.families import find_family, output_syntax
from sidecar.output.output_syntax import OutputSyntax
from sidecar.output.reasoning_splitter import new_splitter
from testkit.call_texts import collect, parse
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
    always = "on" if syntax.family.always_reasons else "undecided"
    start = always if thinks else "off"
    splitter = new_splitter(syntax, start, TOOLS)  # type: ignore[arg-type]
    found = [piece for text in pieces for piece in splitter.feed(text)]
    read = collect([*found, *splitter.flush(is_cut=False)[0]])
    assert (read.broken, read.open) == ([], None)
    return read.reasoning.strip(), read.text, read.parsed


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
    ("read", "body"),
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
        (bare_json, '{"name": "other", "parameters": {}}'),
        (bare_json, '{"name": "read"} is JSON'),
        (bare_json, '{"name": "read"'),
        (mistral, "read[ARGS][1]"),
        (mistral, "read[ARGS]{} and so"),
        (mistral, "read[ARGS]{"),
        (mistral, "words"),
        (channels, "functions.read {}"),
        (channels, "<|message|>{}"),
        (channels, "functions.read<|message|>words"),
    ],
)  # fmt: skip
def test_what_is_no_call_is_refused(read: Format, body: str) -> None:
    """It stays text."""
    with pytest.raises(ValueError, match="no call"):
        parse(read, body, TOOLS)


@pytest.mark.parametrize(
    ("read", "body", "expected"),
    [
        (deepseek, "<｜tool▁call▁begin｜>a<｜tool▁sep｜><｜tool▁call▁end｜>",
         [("a", {})]),
        (mistral, "a[CALL_ID]abc123456[ARGS]{}", [("a", {})]),
        (hermes_json, ' [{"name": "a", "arguments": {"b": 1}, "id": "abc123456"}]',
         [("a", {"b": 1})]),
        (deepseek_dsml, '<｜DSML｜invoke name="a"><｜DSML｜parameter name="b" '
                        'string="false">x</｜DSML｜parameter></｜DSML｜invoke>',
         [("a", {"b": "x"})]),
        (channels, "functions.a<|channel|>commentary json<|message|>{}", [("a", {})]),
        (bare_json, '{"name": "read", "parameters": {"name": "x"}}; ',
         [("read", {"name": "x"})]),
        (bare_json, '{"name": "read"}\n{"name": "write", "arguments": {}}',
         [("read", {}), ("write", {})]),
    ],
)  # fmt: skip
def test_other_spellings_are_read_too(
    read: Format, body: str, expected: list[tuple[str, object]]
) -> None:
    """As the templates print past calls, or older models write them."""
    assert parse(read, body, TOOLS) == expected


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
