"""What a model writes may be a stranger's doing as well: read once, and never fatal."""

import json

import orjson
import pytest

from sidecar.core.json_bytes import MAX_LEVELS, check_depth, load_json
from sidecar.core.requests import Tool, ToolCall
from sidecar.dialects.anthropic_messages.answer import parse_input, tool_use
from sidecar.output.calls import offered_tools
from sidecar.output.calls.call_sink import Format, ToolSyntax
from sidecar.output.calls.element_calls import deepseek_dsml, qwen3_coder_xml
from sidecar.output.calls.gemma_calls import gemma
from sidecar.output.calls.glm_calls import glm4_native
from sidecar.output.calls.json_calls import bare_json, hermes_json
from sidecar.output.calls.marked_calls import deepseek, mistral
from sidecar.output.calls.python_calls import python_calls
from sidecar.output.calls.tool_schema import ToolSchema
from sidecar.output.channel_splitter import ChannelSplitter
from sidecar.output.output_syntax import Markers
from sidecar.output.reasoning_splitter import StreamSplitter
from sidecar.output.tool_syntax import CHANNEL_SYNTAX
from testkit.call_texts import collect, read_calls, split_calls
from testkit.growth import grows_linearly

TOOL = Tool("look", {"type": "object", "properties": {}}, {})
SIZE = 15_000
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_CALL = '{"name": "look", "arguments": {}}'
DEAR: list[tuple[str, Format, str, str]] = [
    ("", qwen3_coder_xml, "<function=a>", ""),
    ("<function=a>", qwen3_coder_xml, "<parameter=b>", "</function>"),
    ("look", glm4_native, "<arg_key>", ""),
    ("look", glm4_native, "<arg_key>a</arg_key>", ""),
    ("look", glm4_native, "<a>", ""),
    ("look", glm4_native, '<a="', ""),
    ("", hermes_json, _CALL, ""),
    ("", hermes_json, "{} ", ""),
    ("", deepseek, "<｜tool▁call▁begin｜>", ""),
    ("<｜tool▁call▁begin｜>a<｜tool▁sep｜>", deepseek, " ", "<｜tool▁call▁end｜>"),
    ("", deepseek_dsml, '<｜DSML｜invoke name="a">', ""),
    ("", bare_json, _CALL + ";", ""),
    ("", hermes_json, '{"name": "look", "arguments": {"a": ', ""),
    ('{"name": "look", "arguments": {"a": "', hermes_json, "x", ""),
    ('{"arguments": {"a": "', hermes_json, "x", '"}, "name": "look"}'),
    ("<function=look><parameter=b>", qwen3_coder_xml, "</parameter> ", ""),
    ("<function=look><parameter=b>", qwen3_coder_xml, "</parameter><parameter=", ""),
    ("look<arg_key>a</arg_key><arg_value>", glm4_native, "</arg_value> ", ""),
    ("", mistral, "look[ARGS]{}", ""),
    ("", gemma, "call:look{}", ""),
    ("call:look{a:", gemma, "{b:", ""),
    ("", python_calls, "look()", ""),
    ("look(a='", python_calls, "x", "')"),
    ("look(", python_calls, "(", ""),
]


@pytest.mark.parametrize(("head", "parse", "unit", "tail"), DEAR)
def test_a_call_block_is_read_once(
    head: str, parse: Format, unit: str, tail: str
) -> None:
    """Four times the text takes far less than sixteen times the thread's own time."""
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (parse,))

    def work(text: str) -> None:
        buffer = f"<tool_call>{text}</tool_call>"
        pieces = [buffer[at : at + 4] for at in range(0, len(buffer), 4)]
        split_calls(pieces, [syntax], (TOOL,))

    def make(size: int) -> str:
        return head + unit * (size // len(unit)) + tail

    assert grows_linearly(work, make, SIZE)


@pytest.mark.parametrize("depth", [MAX_LEVELS + 1, 300, 990, 5000, 100_000])
def test_a_call_nested_beyond_reason_is_text(depth: int) -> None:
    """It could not be sent: orjson prints 254 levels, and templates fewer."""
    nested = "[" * depth + "]" * depth
    body = f'{{"name": "look", "arguments": {{"a": {nested}}}}}'
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (hermes_json,))
    buffer = f"<tool_call>{body}</tool_call>"
    found = split_calls([buffer], [syntax], (TOOL,))
    assert (found.calls, found.text) == ([], "")
    assert len(found.broken) == 1  # its beginning had been shown


def test_a_call_nested_as_tools_want_it_is_a_call() -> None:
    """And what is made of it can be printed."""
    nested = "[" * (MAX_LEVELS - 5) + "]" * (MAX_LEVELS - 5)
    body = f'{{"name": "look", "arguments": {{"a": {nested}}}}}'
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (hermes_json,))
    buffer = f"<tool_call>{body}</tool_call>"
    ((name, arguments),) = read_calls(buffer, [syntax], (TOOL,)).calls
    call = ToolCall("c", name, arguments)
    assert orjson.dumps(tool_use(call, parse_input(call.arguments)))


def test_calls_that_say_the_same_are_one() -> None:
    """In the order in which each was said first."""
    said = [{"a": 1}, {"b": 2}, {"a": 1}, {"c": 3}, {"b": 2}]
    bodies = [json.dumps({"name": "look", "arguments": each}) for each in said]
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (hermes_json,))
    buffer = f"<tool_call>{' '.join(bodies)}</tool_call>"
    calls = read_calls(buffer, [syntax], (TOOL,)).parsed
    assert [arguments for _, arguments in calls] == [said[i] for i in (0, 1, 3)]


@pytest.mark.parametrize("depth", [MAX_LEVELS + 1, 300, 990, 100_000])
def test_a_block_of_a_call_nested_beyond_reason_holds_its_text(depth: int) -> None:
    """A tool_use block needs an object, and one that can be printed."""
    text = '{"a": ' + "[" * depth + "]" * depth + "}"
    block = tool_use(ToolCall("c", "look", text), parse_input(text))
    assert block["input"] == {"raw": text}
    assert orjson.dumps(block)


def test_depth_counts_lists_and_objects() -> None:
    """A wide value is not a deep one."""
    check_depth([[{"a": [1]}] * 1000] * 100)
    with pytest.raises(ValueError, match="deep"):
        load_json("[" * (MAX_LEVELS + 2) + "]" * (MAX_LEVELS + 2))
    assert load_json("[[1]]") == [[1]]


def test_a_call_held_back_within_thinking_is_not_read_again_with_each_piece() -> None:
    """What is held is searched once, and given back whole."""
    text = "<tool_call>" + "x" * 5000
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (hermes_json,))
    splitter = StreamSplitter(Markers(), "on", [syntax], (TOOL,))
    for at in range(0, len(text), 3):
        assert splitter.feed(text[at : at + 3]) == []
        assert len(splitter._buffer) < 20
    assert splitter.feed("</think>Yes") == [("reasoning", text), ("content", "Yes")]


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_header_without_an_end_is_content(size: int) -> None:
    """However it is cut; and it is not searched anew with each piece."""
    text = "<|channel|>" + "x" * 20_000
    splitter = ChannelSplitter(CHANNEL_SYNTAX, (TOOL,))
    spans = []
    for at in range(0, len(text), size):
        spans += splitter.feed(text[at : at + size])
    read = collect([*spans, *splitter.flush(is_cut=False)[0]])
    assert (read.reasoning, read.text) == ("", text)


RAISING = {
    "overflow": ("python", f"look(a=0x{'f' * 300}+1j)"),
    "digits": ("python", f"look(a={{0x{'f' * 3600}}})"),
    "product": ("python", f"look(a=1*0x{'f' * 3600})"),
    "nested functions": ("json", '{"function":' * 1100),
    "nested lists": ("python", f"look(a={'[' * 900}{']' * 900})"),
}


@pytest.mark.parametrize("case", RAISING)
def test_no_text_of_a_model_makes_a_reader_raise(case: str) -> None:
    """It is text: an error would send the prompt to another model."""
    kind, body = RAISING[case]
    reads = {"python": python_calls, "json": hermes_json}[kind]
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (reads,))
    found = split_calls([f"<tool_call>{body}</tool_call>"], [syntax], (TOOL,))
    assert found.calls in ([], found.calls[:1])
    assert found.open is None


@pytest.mark.parametrize("unit", ["<tool_call>look(", '<tool_call>look("""'])
def test_openers_that_nothing_closes_are_read_once(unit: str) -> None:
    """Each of them would read all of the rest again."""
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (python_calls,))

    def work(text: str) -> None:
        pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
        split_calls(pieces, [syntax], (TOOL,))

    assert grows_linearly(work, lambda size: unit * (size // len(unit)), SIZE)


def test_schemas_are_read_once_for_all_python_calls_of_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger's schema takes milliseconds: an answer of calls took a minute."""
    read: list[object] = []

    def counted(schema: dict[str, object]) -> ToolSchema:
        read.append(schema)
        return ToolSchema(schema)

    monkeypatch.setattr(offered_tools, "ToolSchema", counted)
    schema = {"properties": {"a-b": {}}}
    tools = tuple(Tool(f"look-{at}", schema, {}) for at in range(9))
    text = "".join(f'<tool_call>look-{at}(a-b="x")</tool_call>' for at in range(9))
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (python_calls,))
    found = split_calls([text], [syntax], tools)
    assert found.parsed == [(f"look-{at}", {"a-b": "x"}) for at in range(9)]
    assert len(read) == len(tools)


def test_odd_names_cost_no_more_the_more_there_are() -> None:
    """Each of 2,000 was looked for at each place, by one regular expression."""
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (python_calls,))

    def work(count: int) -> None:
        schema = {"properties": {f"a-{at}": {} for at in range(count)}}
        tools = (Tool("look-1", schema, {}),)
        call = f"look-1(a-0=[{','.join(['x'] * 20 * count)}])"
        found = split_calls([f"<tool_call>{call}</tool_call>"], [syntax], tools)
        assert len(found.calls) == 1

    assert grows_linearly(work, lambda size: size, 300)


@pytest.mark.parametrize("name", [" ", "\n", "a b", "," * 1000 + "x", "a-b", "a  b"])
def test_white_space_is_read_once_whatever_names_there_are(name: str) -> None:
    """A name that is a blank was tried at each, and read all behind it."""
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (python_calls,))
    tools = (Tool("look", {"properties": {"a": {}, name: {}}}, {}),)

    def work(text: str) -> None:
        split_calls([text], [syntax], tools)

    def make(size: int) -> str:
        return f"<tool_call>look(a={' ' * size}1)</tool_call>"

    assert grows_linearly(work, make, SIZE)


def test_underscores_make_no_stand_in_longer() -> None:
    """It was longer than the longest run of them, at each odd name."""
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (python_calls,))
    tools = (Tool("go-on", {"properties": {"a-b": {}}}, {}), TOOL)

    def work(size: int) -> None:
        calls = ["go-on(a-b=1)"] * (size // 12)
        text = ", ".join([*calls, f'look(a="{"_" * size}")', 'look(a="_name0_name1_")'])
        found = split_calls([f"<tool_call>[{text}]</tool_call>"], [syntax], tools)
        assert found.parsed[0] == ("go-on", {"a-b": 1})
        assert found.parsed[-1] == ("look", {"a": "_name0_name1_"})

    assert grows_linearly(work, lambda size: size, 6000)


def test_names_of_other_arguments_are_no_part_of_a_value() -> None:
    """And a stand-in is none of the model's own words, which Python composes."""
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (python_calls,))
    odd = ['path="a", content', "n=True, content", ", content", "a-b"]
    tools = (TOOL, Tool("other", {"properties": dict.fromkeys(odd, {})}, {}))
    text = '<tool_call>look(path="a", content="b", a\uff3f\uff3f0_="v")</tool_call>'
    found = split_calls([text], [syntax], tools)
    assert found.parsed == [("look", {"path": "a", "content": "b", "a__0_": "v"})]


@pytest.mark.parametrize(
    "name", ["cafe\u0301", "\u304b\u3099", "\ufb01le", "\uff29\uff24"]
)
def test_python_composes_no_letters_of_a_name(name: str) -> None:
    """`ast` does: the call was one of arguments that its tool has not."""
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (python_calls,))
    tools = (Tool(name, {"properties": {name: {}}}, {}),)
    text = f'<tool_call>[{name}({name}="x")]</tool_call>'
    assert split_calls([text], [syntax], tools).parsed == [(name, {name: "x"})]


def test_a_call_may_spell_out_arguments_that_are_no_names() -> None:
    """`**{..}` of texts; anything else in its place is no call."""
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (python_calls,))
    text = '<tool_call>look(a=1, **{"b c": [2], "d": None})</tool_call>'
    found = split_calls([text], [syntax], (TOOL,))
    assert found.parsed == [("look", {"a": 1, "b c": [2], "d": None})]
    for odd in ("**x", "**{**x}", "**{1: 2}", '**{"a": 1}, a=2'):
        found = split_calls([f"<tool_call>look({odd})</tool_call>"], [syntax], (TOOL,))
        assert not found.calls


@pytest.mark.parametrize("name", ["page[size]", "expand[]", "xsi:type", "a b[c]"])
def test_signs_of_a_name_are_no_part_of_python(name: str) -> None:
    """As templates print past calls, and as few APIs do without."""
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (python_calls,))
    tools = (Tool("look", {"properties": {name: {}, "a": {}}}, {}),)
    text = f"<tool_call>[look({name}=[1, 'x'], a='{name}=2')]</tool_call>"
    found = split_calls([text], [syntax], tools)
    assert found.parsed == [("look", {name: [1, "x"], "a": f"{name}=2"})]


BROKEN = [
    r'{"path": "C:\users\new"}',
    r'{"path": "\ud800\udc"}',
    '{"path": "x", ,"text": "y"}',
    '{"path": "x", oops}',
    '{"path": "x", "n": NaN}',
    '{"path": "x", "n": 1e999}',
    '{"path": "x", "n": +1}',
    '{"path": "a" : "b"}',
    '{"path": "a", "v": [1,,2]}',
]


@pytest.mark.parametrize("arguments", BROKEN)
@pytest.mark.parametrize("name", ["mistral", "channels", "hermes"])
def test_nobody_can_run_a_call_that_broke(name: str, arguments: str) -> None:
    """What left of it is no JSON for any parser, and no letter of it is lost."""
    splitter: StreamSplitter | ChannelSplitter
    if name == "channels":
        splitter = ChannelSplitter(CHANNEL_SYNTAX, (TOOL,))
        text = f"<|channel|>commentary to=functions.look<|message|>{arguments}<|call|>"
    elif name == "mistral":
        syntax = ToolSyntax("[TOOL_CALLS]", "", (mistral,))
        splitter = StreamSplitter(Markers(), "off", (syntax,), (TOOL,))
        text = f"[TOOL_CALLS]look[ARGS]{arguments}"
    else:  # whose last brace is missing
        syntax = ToolSyntax("<tool_call>", "</tool_call>", (hermes_json,))
        splitter = StreamSplitter(Markers(), "off", (syntax,), (TOOL,))
        text = f'<tool_call>{{"name": "look", "arguments": {arguments}</tool_call>'
    pieces = [piece for letter in text for piece in splitter.feed(letter)]
    last, is_cut = splitter.flush(is_cut=False)
    read = collect([*pieces, *last], is_cut=is_cut)
    assert read.calls == []
    ((called, shown),) = read.broken
    assert called == "look"
    with pytest.raises(json.JSONDecodeError):
        json.loads(shown, strict=False)
    squeezed = "".join(arguments.split())
    assert "".join(shown.split()).rstrip('"').startswith(squeezed.rstrip('"'))


def test_what_is_no_literal_of_python_is_its_source() -> None:
    """As it stands, whatever lines and letters are before it."""
    source = "look(a='ü\\n',\n b=f'{x}é{y!r}', c=[1, ö + 2],\n d=1.5)"
    read = read_calls(source, [ToolSyntax("", "", (python_calls,))], (TOOL,))
    ((_, arguments),) = read.parsed
    assert arguments == {"a": "ü\n", "b": "f'{x}é{y!r}'", "c": [1, "ö + 2"], "d": 1.5}


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (ToolSyntax("<tool_call>", "</tool_call>", (qwen3_coder_xml,)),
         "<tool_call><function=look>"),
        (ToolSyntax("<start_function_call>", "<end_function_call>", (gemma,)),
         "<start_function_call>call:look"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_call_without_any_argument_yet_is_not_shown(
    syntax: ToolSyntax, text: str, is_closed: bool
) -> None:
    """Broken or cut there, its client would run it with none."""
    text += syntax.closer * is_closed
    read = split_calls([*text], [syntax], (TOOL,))
    assert (read.calls, read.broken, read.open) == ([], [], None)


def test_what_stands_behind_a_call_of_a_list_is_the_same_in_pieces() -> None:
    """A list that is not closed: the call is said once, and nothing of it again."""
    text = '[{"name": "look", "arguments": {"a": "Xy", "c": "secret"}}</tool_call>'
    syntax = ToolSyntax("<tool_call>", "</tool_call>", (hermes_json,))
    read = read_calls(f"<tool_call>{text}", [syntax], (TOOL,))
    assert len(read.calls) == 1
    assert "secret" not in read.text


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "look", "args": {"a": "/tmp/x"}}',
        '{"name": "look", "a": "/tmp/x"}',
        '{"name": "look", "a": "/tmp/x", "id": "c1", "type": "function"}',
        '{"name": "look", "arguments": null, "input": {"a": "/tmp/x"}}',
        '{"function": {"name": "look", "a}rguments": {"a": "/tmp/x"}}}',
        '{"name": "look", "arguments": {}, "arguments": {"a": "/tmp/x"}}',
        '{"arguments": {}, "parameters": {"a": "/tmp/x"}, "name": "look"}',
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("read_format", [hermes_json, bare_json])
def test_a_call_is_not_made_without_what_was_said_of_it(
    said: str, read_format: Format, *, is_whole: bool
) -> None:
    """Arguments under a name of the model's own, or twice: it is no call to run."""
    if read_format is bare_json:
        syntax = ToolSyntax("{", "", (bare_json,), is_inside=True, at_line_start=True)
    else:
        syntax = ToolSyntax(*_TOOL_CALL, (read_format,))
    text = f"{'' if syntax.is_inside else syntax.opener}{said}{syntax.closer}"
    read = split_calls([text] if is_whole else [*text], [syntax], (TOOL,))
    assert (read.calls, read.open) == ([], None)
    if read.broken:
        with pytest.raises(json.JSONDecodeError):
            json.loads(read.broken[0][1], strict=False)
    else:
        assert "/tmp/x" in read.text


def test_a_call_without_arguments_may_have_what_others_have_beside_theirs() -> None:
    """Ids and types do not say what it is to do; null is no arguments."""
    syntax = ToolSyntax(*_TOOL_CALL, (hermes_json,))
    for said in (
        '{"id": "x", "type": "function", "function": {"name": "look"}}',
        '{"name": "look", "arguments": null}',
    ):
        read = read_calls(f"<tool_call>{said}</tool_call>", [syntax], (TOOL,))
        assert read.parsed == [("look", {})]
    said = '{"name": "look", "arguments": null, "parameters": {"a": 1}}'
    read = read_calls(f"<tool_call>{said}</tool_call>", [syntax], (TOOL,))
    assert read.parsed == [("look", {"a": 1})]


_BEHIND_ARGUMENTS = [
    ", ...}",
    ', {"b": 1}}',
    " oops}",
    ', "id": }',
    '{"id": 1}}',
    ",,}",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("arguments", ["{}", '{"a": "Xy"}', "null", '"{}"'])
@pytest.mark.parametrize("behind", _BEHIND_ARGUMENTS)
@pytest.mark.parametrize("is_eager", [True, False])
def test_what_breaks_behind_whole_arguments_is_read_once(
    arguments: str, behind: str, *, is_eager: bool
) -> None:
    """It was found again for ever where the call's own brace is its opener."""
    tool = Tool("look", TOOL.parameters, {}, is_held=not is_eager)
    said = f'{{"name": "look", "arguments": {arguments}{behind}'
    bare = ToolSyntax("{", "", (bare_json,), is_inside=True, at_line_start=True)
    marked = ToolSyntax(*_TOOL_CALL, (hermes_json,))
    listed = f"<tool_call>[{said}]</tool_call>"
    for syntax, text in ((bare, said), (marked, listed)):
        whole = read_calls(text, [syntax], (tool,))
        for size in (1, 4):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            read = split_calls(pieces, [syntax], (tool,))
            assert (read.calls, read.broken) == (whole.calls, whole.broken)
            assert (read.text, read.open) == (whole.text, None)
        assert whole.text.count("Xy") + len(whole.calls) + len(whole.broken) <= 1


@pytest.mark.parametrize("end", ["", ",", ', "id": "x', ', "id"'])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_text_that_ends_behind_whole_arguments_has_the_call(
    end: str, *, is_cut: bool
) -> None:
    """All that it is to do is known."""
    syntax = ToolSyntax(*_TOOL_CALL, (hermes_json,))
    text = f'<tool_call>{{"name": "look", "arguments": {{"a": 1}}{end}'
    read = split_calls([*text], [syntax], (TOOL,), is_cut=is_cut)
    assert (read.parsed, read.open, read.text) == ([("look", {"a": 1})], None, "")
