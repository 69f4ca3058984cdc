"""The splitter: thinking, calls and text, however the text is cut."""

import random
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.requests import Tool
from sidecar.output.calls.call_sink import ToolSyntax
from sidecar.output.calls.json_calls import bare_json, hermes_json
from sidecar.output.output_syntax import Markers, StartMode
from sidecar.output.pieces import Piece
from sidecar.output.reasoning_splitter import StreamSplitter
from testkit.call_texts import collect

TAGS = Markers()
CALLS = (ToolSyntax("<tool_call>", "</tool_call>", (hermes_json,)),)
TOOLS = (Tool("f", {}, {}),)
CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
NUM_CHUNKINGS = 150


@dataclass(frozen=True)
class Row:
    mode: StartMode
    text: str
    reasoning: str = ""
    content: str = ""
    tools: str = ""


# The numbers are those of the table; a row with two inputs is there twice.
ROWS = {
    "1": Row("on", "<think>r</think>\nans", "r", "ans"),
    "2": Row("on", "r</think>\n\nans", "r", "ans"),
    "3": Row("on", "unclosed", "unclosed"),
    "3b": Row("on", "<think>unclosed", "unclosed"),
    "4": Row("on", "<think>a</think>\nx <think>b</think> y", "ab", "x y"),
    "5": Row("on", "<think>a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
    "6": Row("on", "r</think>a</think>b", "r", "a</think>b"),
    "7": Row("on", "r</think>a<think>never closed", "rnever closed", "a"),
    "8": Row("on", "<think>r</think>\n a", "r", "a"),
    "9": Row("on", "r</think>ans" + " " * 30, "r", "ans"),
    "10": Row("on", f"r</think>\n{CALL}", "r", "", "f({})"),
    "11": Row("on", f"r{CALL}", "r", "", "f({})"),
    "12": Row(
        "on",
        "r <tool_call>X</tool_call> no</think>ans",
        "r <tool_call>X</tool_call> no",
        "ans",
    ),
    "13": Row("on", "<THINK>r</THINK>a", "r", "a"),
    "14": Row("off", "no think", "", "no think"),
    "15": Row("off", "  hi  \n", "", "  hi"),
    "16": Row("off", "x</think>y", "", "x</think>y"),
    "17": Row("off", "<think>r</think>a", "r", "a"),
    "18": Row("off", f"t {CALL} tail", "", "t\ntail", "f({})"),
    "19": Row("off", "a <tool_ca", "", "a <tool_ca"),
    "20": Row("off", " \n\t  "),
    "21": Row("on", "  \n", "  \n"),
    "22": Row("undecided", "plain answer", "", "plain answer"),
    "24": Row("on", "r</think>Use `<think>` for it.", "r", "Use `<think>` for it."),
    "25": Row("on", 'r</think>A "<think>" opens.', "r", 'A "<think>" opens.'),
    "26": Row("off", "So:\n```\n<think>\n```\n.", "", "So:\n```\n<think>\n```\n."),
    "27": Row("on", "r</think>a `b`\n<think>c</think> d", "rc", "a `b`\nd"),
    "28": Row("off", "`a <think> b` c<think>d", "d", "`a <think> b` c"),
    "23": Row("undecided", "\n<think>r</think>a", "r", "a"),
}


def split(
    mode: StartMode,
    pieces: list[str],
    markers: Markers = TAGS,
    calls: tuple[ToolSyntax, ...] = CALLS,
) -> Row:
    """Feed the pieces; join what comes out."""
    splitter = StreamSplitter(markers, mode, calls, TOOLS)
    found: list[Piece] = []
    for piece in pieces:
        found += splitter.feed(piece)
    found += splitter.flush(is_cut=False)[0]
    assert all(piece[1] for piece in found if isinstance(piece, tuple)), "empty"
    read = collect(found)
    tools = " ".join(f"{name}({arguments})" for name, arguments in read.calls)
    return Row(mode, "".join(pieces), read.reasoning, read.text, tools)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@pytest.mark.parametrize("number", ROWS)
def test_row_of_the_table_holds_for_any_chunking(number: str) -> None:
    """Whole, letter by letter and in 150 random cuts, a row gives its three texts."""
    row = ROWS[number]
    chance = random.Random(number)
    for _ in range(NUM_CHUNKINGS):
        places = [chance.randrange(999) for _ in range(chance.randrange(9))]
        assert split(row.mode, cut(row.text, places)) == row
    assert split(row.mode, [row.text]) == row
    assert split(row.mode, list(row.text)) == row


def test_tags_cut_where_the_table_cuts_them() -> None:
    """Row 8 in its own pieces: tags in two halves, white space by itself."""
    pieces = ["<th", "ink>r</th", "ink>", "\n", " a"]
    assert split("on", pieces) == ROWS["8"]


FRAGMENTS = [
    "<think>", "</think>", "<THINK>", "<thin", "</th", "k>", "<", ">", "/", " ", "\n",
    "a", "bc", "<tool_call>", "</tool_call>", "<tool", CALL, "\u00a0", "\u212a",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
modes = st.sampled_from(["on", "off", "undecided"])
places = st.lists(st.integers(0, 400), max_size=8)


@given(mode=modes, text=texts, cuts=places, offers_tools=st.booleans())
def test_chunking_never_matters(
    mode: StartMode, text: str, cuts: list[int], offers_tools: bool
) -> None:
    """Any cutting gives the spans of the uncut text, with tools offered or not."""
    calls = CALLS if offers_tools else ()
    pieces = cut(text, cuts)
    assert split(mode, pieces, TAGS, calls) == split(mode, [text], TAGS, calls)


@given(mode=modes, text=texts)
def test_nothing_but_tags_and_space_is_lost(mode: StartMode, text: str) -> None:
    """Every other letter comes out, in the texts' own order."""
    row = split(mode, [text])

    def letters(part: str) -> int:
        return len(re.findall(r"[abc\u212a]", part))

    assert letters(row.reasoning + row.content) == letters(text)


plain = st.lists(st.sampled_from(["a", "b ", " c", "\n", "d<", "e"]), max_size=5).map(
    "".join
)
space = st.sampled_from(["", " ", "\n\n", " \n\t"])
blocks = st.builds(
    lambda inside, gap, after: f"<think>{inside}</think>{gap}{after}",
    plain, space, plain,
)  # fmt: skip
orphan = st.builds(lambda inside, gap: f"{inside}</think>{gap}", plain, space)


@given(head=orphan | blocks, more=st.lists(blocks, max_size=3), cuts=places)
def test_content_is_what_the_oracle_says(
    head: str, more: list[str], cuts: list[int]
) -> None:
    """Thinking on: content = the text less each block, the orphan close, the ends."""
    text = head + "".join(more)
    expected = re.sub(r"<think>.*?</think>\s*", "", text, flags=re.DOTALL)
    if head.count("<think>") == 0:
        expected = re.sub(r"^.*?</think>\s*", "", expected, count=1, flags=re.DOTALL)
    row = split("on", cut(text, cuts), TAGS, ())
    assert row.content == expected.strip()


def test_other_tag_pairs() -> None:
    """The tags are the model's: [THINK] works as <think> does, and only it."""
    markers = Markers("[THINK]", "[/THINK]")
    row = split("undecided", list("[THINK]r <think>[/THINK] a</think>"), markers)
    assert (row.reasoning, row.content) == ("r <think>", "a</think>")


def test_a_letter_that_only_looks_like_a_tag_is_no_tag() -> None:
    """IGNORECASE alone would take the Kelvin sign for a k; it is text."""
    row = split("undecided", ["<thin\u212a>x"])
    assert (row.reasoning, row.content) == ("", "<thin\u212a>x")


@pytest.mark.parametrize(
    ("mode", "fed", "expected"),
    [
        ("on", "", True),
        ("on", "thought", True),
        ("on", "thought<tool_call>x", True),
        ("on", "thought</think>", False),
        ("off", "", False),
        ("undecided", "", False),
        ("undecided", "<think>x", True),
    ],
)
def test_knows_whether_it_is_reasoning(
    mode: StartMode, fed: str, expected: bool
) -> None:
    """`is_reasoning` follows the state, so tokens can be counted as they come."""
    splitter = StreamSplitter(TAGS, mode, CALLS, TOOLS)
    splitter.feed(fed)
    assert splitter.is_reasoning is expected


def test_content_is_shown_at_once() -> None:
    """Only a possible tag and trailing space wait; everything before them is out."""
    splitter = StreamSplitter(TAGS, "off", CALLS, TOOLS)
    assert splitter.feed("Hello ") == [("content", "Hello")]
    assert splitter.feed("you <") == [("content", " you")]
    assert splitter.feed("b") == [("content", " <b")]


def test_a_tag_within_a_form_is_a_text_of_it() -> None:
    """An answer that is held to a schema may speak of tags; it is never thinking."""
    for text in ('{"a": "use <think> and </think>"}', "<think>"):
        for size in (1, 3, 100):
            splitter = StreamSplitter(Markers(), "off", is_held=True)
            spans: list[Piece] = []
            for at in range(0, len(text), size):
                spans += splitter.feed(text[at : at + size])
            spans += splitter.flush(is_cut=False)[0]
            read = collect(spans)
            assert (read.text, read.reasoning) == (text, "")


@pytest.mark.parametrize(
    ("begun", "is_call"),
    [("Here:\n```json\n", False), ("See `", False), ("So:\n", True)],
)
def test_an_answer_that_is_begun_goes_on_where_it_stands(
    begun: str, *, is_call: bool
) -> None:
    """Within a fence or code that the client opened, a call is spoken of."""
    text = '{"name": "f", "arguments": {}}'
    syntax = ToolSyntax(
        '{"name":', "", (bare_json,), is_inside=True, at_line_start=True
    )
    splitter = StreamSplitter(Markers(), "off", (syntax,), (Tool("f", {}, {}),), begun)
    pieces = [*splitter.feed(text), *splitter.flush(is_cut=False)[0]]
    read = collect(pieces)
    assert (bool(read.calls), read.text) == (is_call, "" if is_call else text)


def test_the_space_that_follows_a_begun_answer_is_kept() -> None:
    splitter = StreamSplitter(Markers(), "off", begun="One")
    pieces = [*splitter.feed(" two"), *splitter.flush(is_cut=False)[0]]
    assert pieces == [("content", " two")]


@pytest.mark.parametrize("start", ["on", "undecided"])
@pytest.mark.parametrize("form", ["yes", "  yes", " \nyes", "\tyes"])
def test_a_form_stands_behind_the_line_breaks_before_it(
    start: StartMode, form: str
) -> None:
    """Two, as models write them behind thinking; what else stands first is its own."""
    splitter = StreamSplitter(Markers(), start, is_held=True)
    thought = "I see.</think>" if start == "on" else ""
    text = f"{thought}\n\n{form}"
    pieces = [piece for letter in text for piece in splitter.feed(letter)]
    assert collect([*pieces, *splitter.flush(is_cut=False)[0]]).text == form
