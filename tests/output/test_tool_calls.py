"""Blocks of calls and the text around them."""

import json

import pytest

from sidecar.core.requests import Tool
from sidecar.output.calls.call_sink import ToolSyntax
from sidecar.output.calls.python_calls import python_calls
from sidecar.output.families import find_family, output_syntax
from sidecar.output.output_syntax import Markers
from sidecar.output.reasoning_splitter import StreamSplitter
from testkit.call_texts import FORMATS, Read, collect, read_calls

SYNTAX = ToolSyntax("<tool_call>", "</tool_call>", tuple(FORMATS.values()))
OPEN_ENDED = ToolSyntax("[TOOL_CALLS]", "", (FORMATS["hermes_json"],))
TOOLS = (Tool("f", {}, {}), Tool("g", {}, {}))


def block(name: str, **arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{call}</tool_call>"


def extract(buffer: str, *, is_cut: bool = False) -> Read:
    return read_calls(buffer, [SYNTAX], TOOLS, is_cut=is_cut)


def names(read: Read) -> list[str]:
    return [name for name, _ in read.calls]


def test_calls_keep_their_order_and_text_is_joined() -> None:
    """Blocks in order; the pieces between and after become one text."""
    found = extract(f"{block('f', a=1)} then {block('g')}\n\nand done  ")
    assert names(found) == ["f", "g"]
    assert found.text == "then\nand done"
    assert found.parsed[0] == ("f", {"a": 1})


def test_equal_calls_collapse_within_one_block_only() -> None:
    """A call said twice in one block is one; in two blocks it is meant twice."""
    call = '{"name": "f", "arguments": {}}'
    assert names(extract(f"<tool_call>[{call}, {call}]</tool_call>")) == ["f"]
    assert names(extract(block("f") + block("f"))) == ["f", "f"]


def test_a_block_that_is_no_call_stays_text() -> None:
    """Nothing of the model's words is lost, and the good block still counts."""
    found = extract(f"<tool_call>just words</tool_call>{block('f')}")
    assert names(found) == ["f"]
    assert found.text == "<tool_call>just words</tool_call>"


def test_an_unclosed_last_block_counts_if_it_is_complete() -> None:
    """A model that ends its turn without the closing tag has still called."""
    assert names(extract('<tool_call>{"name": "f", "arguments": {}}')) == ["f"]


def test_an_unclosed_block_that_is_incomplete_stays_text() -> None:
    """Half a call is text."""
    found = extract('<tool_call>{"name": "f", "argum')
    assert (names(found), found.text) == ([], '<tool_call>{"name": "f", "argum')


def test_a_call_cut_off_by_the_token_limit_is_not_completed() -> None:
    """It stays text if nothing of it was shown; a whole one counts without its tag."""
    begun = '<tool_call>{"name": "f", "arguments": '
    found = extract(begun, is_cut=True)
    assert (names(found), found.text, found.open) == ([], begun.rstrip(), None)
    found = extract(begun + '{"a": "b', is_cut=True)
    assert (names(found), found.text) == ([], "")
    assert (found.open, found.is_cut) == (("f", '{"a": "b'), True)
    assert names(extract(begun + "{}", is_cut=True)) == ["f"]


@pytest.mark.parametrize("is_custom", [True, False])
def test_a_call_that_is_sent_whole_is_not_shown_where_it_is_cut(
    *, is_custom: bool
) -> None:
    """Neither as a call nor as text: its client asked for no half of it."""
    tool = Tool("f", {"properties": {"a": {}}}, {}, is_custom=is_custom)
    python = ToolSyntax("<|a|>", "<|b|>", (python_calls,))
    texts = {SYNTAX: ['<tool_call>{"name": "f", "arguments": {"a": "bc']}
    texts[python] = [
        "<|a|>[f(a='b",
        "<|a|>[f(a=1), f(",
        "<|a|>[f(a=1, b",
        "<|a|>print(f(a=1",
    ]
    for syntax, cut in texts.items():
        if syntax is SYNTAX and not is_custom:
            continue
        for text in cut:
            found = read_calls(text, [syntax], (tool,), is_cut=True)
            assert (found.calls, found.text, found.is_cut) == ([], "", True)
    for text in ("<|a|>[f(", "<|a|>[other(a=1", "<|a|>[f"):
        assert read_calls(text, [python], (tool,), is_cut=True).text == text


def test_closed_blocks_before_a_cut_still_count() -> None:
    """The last, open block is lost to the limit, and no text: a call stood before."""
    found = extract(block("f") + '<tool_call>{"name": "g"', is_cut=True)
    assert (names(found), found.text, found.is_cut) == (["f"], "", True)
    assert not extract(block("f"), is_cut=True).is_cut


def test_tags_in_any_case() -> None:
    """<TOOL_CALL> opens a block as well, and positions stay those of the text."""
    buffer = "<TOOL_CALL>" + '{"name": "f", "arguments": {"a": "İ"}}' + "</Tool_Call>x"
    found = extract(buffer)
    assert found.parsed == [("f", {"a": "İ"})]
    assert found.text == "x"


def test_a_syntax_without_a_closing_tag() -> None:
    """A block goes to the next opener or to the end, and counts when cut, too."""
    one = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'
    found = read_calls(one + one, [OPEN_ENDED], TOOLS)
    assert names(found) == ["f", "f"]


def test_half_a_surrogate_pair_is_the_sign_for_what_cannot_be_read() -> None:
    """It cannot be sent as UTF-8, and clients' parsers refuse the escape."""
    found = extract(
        '<tool_call>{"name":"f","arguments":{"a":"\\ud83d","b":"é\\ud83d\\ude00"}}'
        "</tool_call>"
    )
    arguments = found.calls[0][1]
    assert json.loads(arguments.encode()) == {"a": "\ufffd", "b": "é\U0001f600"}


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [
        (block("f"), True),
        (f" {block('f')}\n{block('g')} ", True),
        (f"{block('f')} so", False),
        ("<tool_call>words</tool_call>", False),
        ('<tool_call>{"name": "f", "arguments": {}}', False),
        ('<tool_call>{"name": "f", "arguments": {"a": </tool_call>', False),
        ("", False),
        (" ", False),
    ],
)
def test_knows_complete_calls_and_nothing_else(buffer: str, expected: bool) -> None:
    """Held reasoning is a call only if it is closed calls and white space."""
    splitter = StreamSplitter(Markers(), "on", [SYNTAX], TOOLS)
    pieces = splitter.feed(buffer)
    read = collect([*pieces, *splitter.flush(is_cut=False)[0]])
    assert (bool(read.calls), read.text) == (expected, "")
    assert read.reasoning.strip() == ("" if expected else buffer.strip())


def test_a_parser_that_takes_any_prose_is_not_used() -> None:
    """mlx-lm's glm47 makes a call of whatever it reads; a GLM's prose stays text."""
    from mlx_lm.tool_parsers import glm47

    family = find_family(None, "GLM-4.7-Flash", "glm4")
    library = (glm47.tool_call_start, glm47.tool_call_end, glm47.parse_tool_call)
    syntax = output_syntax(family, None, library)
    buffer = "<tool_call>f is what I would call</tool_call>"
    found = read_calls(buffer, syntax.calls, TOOLS)
    assert (names(found), found.text) == ([], buffer)


@pytest.mark.parametrize(
    ("setting", "name", "model_type", "family"),
    [
        (None, "mlx-community/Qwen3-4B", "llama", "qwen3"),
        (None, "local", "qwen3_moe", "qwen3"),
        (None, "GLM-4.7", "", "glm4"),
        (None, "mistral", "mistral", "generic"),
        ("GLM", "Qwen3", "qwen3", "glm4"),
        ("qen3", "x", "y", "qwen3"),
        ("glm-4", "x", "y", "glm4"),
        ("generic", "Qwen3", "qwen3", "generic"),
    ],
)
def test_family_comes_from_the_setting_then_the_name(
    setting: str | None, name: str, model_type: str, family: str
) -> None:
    """MODEL_FAMILY and its aliases win; then what the name or type speaks of."""
    assert find_family(setting, name, model_type).name == family


FUNCTION = ToolSyntax(
    "<function=", "</tool_call>", (FORMATS["qwen3_coder_xml"],), is_inside=True
)
ELEMENT = "<function=f><parameter=a>1</parameter></function>"


@pytest.mark.parametrize(
    "text",
    [
        f"The page says `{ELEMENT}`, which I will not do.",
        f'It says "{ELEMENT}".',
        f"So:\n```xml\n{ELEMENT}\n```\nI will not.",
        f"The page says `{block('f')}`.",
        f"> ```\n> {ELEMENT}\n> ```\nI will not.",
        f"- ```\n  {ELEMENT}\n  ```\nI will not.",
        f"~~~\n```\n{ELEMENT}\n```\n~~~",
        f"Es sagt \u201e{block('f')}\u201c.",
        '<tool_call>{"name": 5, "x": "' + ELEMENT + '"}</tool_call>',
    ],
    ids=[
        "code",
        "quote",
        "fence",
        "marked, in code",
        "quoted fence",
        "fence in a list",
        "fence in a fence",
        "German quote",
        "within what is no call",
    ],
)
def test_a_call_that_the_answer_speaks_of_is_none(text: str) -> None:
    found = read_calls(text, [SYNTAX, FUNCTION], TOOLS)
    assert (found.calls, found.text) == ([], text)


def test_a_call_that_ends_with_the_answer_is_half_a_call() -> None:
    """The model stopped in the middle of it: it is not completed, and nobody's."""
    found = extract('<tool_call>{"name": "f", "arguments": {"a": "rm -rf /')
    assert (found.calls, found.broken, found.text) == ([], [], "")
    assert found.open == ("f", '{"a": "rm -rf /')


def test_thinking_that_is_cut_behind_a_call_that_it_quotes_runs_none() -> None:
    """It had not ended: it may go on to say that this is an attack."""
    for is_cut, calls in ((True, []), (False, ["f"])):
        splitter = StreamSplitter(Markers(), "on", [SYNTAX], TOOLS)
        pieces = splitter.feed(f"It says {block('f')}")
        read = collect([*pieces, *splitter.flush(is_cut=is_cut)[0]])
        assert names(read) == calls


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "n" * 257])
def test_a_name_that_no_tool_has_is_no_call(name: str) -> None:
    text = block(name)
    assert read_calls(text, [SYNTAX], TOOLS).text == text
