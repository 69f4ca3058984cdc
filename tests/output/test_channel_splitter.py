"""Messages on channels, as gpt-oss writes them."""

import random

import pytest

from sidecar.core.requests import Tool
from sidecar.output.channel_splitter import ChannelSplitter
from sidecar.output.tool_syntax import CHANNEL_SYNTAX
from testkit.call_texts import collect

TOOLS = (Tool("f", {}, {}),)

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def split(text: str, seed: int, *, has_tools: bool = True) -> tuple[str, str, str]:
    """Reasoning, content and calls of a text cut at random."""
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=seed))
    splitter = ChannelSplitter(CHANNEL_SYNTAX if has_tools else None, TOOLS)
    pieces = []
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += splitter.feed(text[a:b])
    read = collect([*pieces, *splitter.flush(is_cut=False)[0]])
    calls = [f"{name}({arguments})" for name, arguments in read.calls]
    return read.reasoning, read.text, " ".join(calls)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}r{NEXT}{FINAL}a", ("r", "a", "")),
        (f"{ANALYSIS}r<|end|>", ("r", "", "")),
        (f"{ANALYSIS}r", ("r", "", "")),
        (f"{ANALYSIS}r{NEXT}{ANALYSIS}s{NEXT}{FINAL}a<|return|>", ("r\ns", "a", "")),
        (f"{FINAL}  a \n\n", ("", "  a", "")),
        (f"{FINAL}a \n b", ("", "a \n b", "")),
        (f"{FINAL}a <|b|> <", ("", "a <|b|> <", "")),
        (f"<|channel|>commentary<|message|>pre{NEXT}{FINAL}a", ("", "pre\na", "")),
        (f"{ANALYSIS}{NEXT}{FINAL}a", ("", "a", "")),
        (f"{FINAL}{NEXT}{FINAL}a", ("", "a", "")),
        (f"{ANALYSIS}r{NEXT}{TO_F}{{}}<|call|>",
         ("r", "", "f({})")),
        (f"{TO_F}{{}}", ("", "", "f({})")),
        (f"{TO_F}{{}}{NEXT}{FINAL}a", ("", "a", "f({})")),
        (f"{TO_F}{{}}<|call|>{NEXT[7:]}{TO_F}{{}}<|call|>", ("", "", "f({}) f({})")),
        (f'{TO_F}{{"a": "<|call|>"}}<|call|>', ("", "", 'f({"a": "<|call|>"})')),
        (f"{TO_F}words<|call|>", ("", "to=functions.f <|constrain|>json"
                                      "<|message|>words", "")),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
         ("", "", "f({})")),
        (f"{ANALYSIS}r<|start|>assistant{FINAL}a", ("r", "a", "")),
        ("plain words", ("", "plain words", "")),
        ("<|channel|>analy", ("", "", "")),
        ("", ("", "", "")),
    ],
)  # fmt: skip
def test_channels_are_told_apart(text: str, expected: tuple[str, str, str]) -> None:
    """However the text was cut into pieces."""
    for seed in range(20):
        assert split(text, seed) == expected


def test_without_tools_a_call_is_text() -> None:
    """Nobody could run it."""
    assert split(f"{TO_F}{{}}<|call|>", 3, has_tools=False) == ("", "{}", "")


def test_text_now_is_reasoning_only_within_analysis() -> None:
    """For counting its tokens."""
    splitter = ChannelSplitter(CHANNEL_SYNTAX, TOOLS)
    states = []
    for piece in ("<|channel|>analysis", "<|message|>", "r", "<|end|>", FINAL, "a"):
        splitter.feed(piece)
        states.append(splitter.is_reasoning)
    assert states == [False, True, True, False, False, False]


def test_an_answer_that_is_begun_is_content_from_its_first_letter() -> None:
    """The prompt ends in the text of the final channel, not in a header."""
    splitter = ChannelSplitter(CHANNEL_SYNTAX, TOOLS, "One, two")
    text = f" and assistant.{NEXT}{TO_F}{{}}<|call|>"
    pieces = [piece for letter in text for piece in splitter.feed(letter)]
    read = collect([*pieces, *splitter.flush(is_cut=False)[0]])
    assert (read.text, read.calls) == (" and assistant.", [("f", "{}")])
