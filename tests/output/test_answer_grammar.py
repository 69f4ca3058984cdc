"""What a grammar lets a model write is read back as the calls that it names."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from mlx_lm.utils import load_tokenizer

import sidecar
from sidecar.core.requests import OutputFormat, Tool, ToolChoice
from sidecar.output.answer_grammar import answer_grammar, ascii_classes, call_grammar
from sidecar.output.calls.call_sink import Format, ToolSyntax
from sidecar.output.calls.element_calls import qwen3_coder_xml
from sidecar.output.calls.glm_calls import glm4_native
from sidecar.output.calls.json_calls import bare_json, hermes_json
from sidecar.output.calls.marked_calls import deepseek, mistral
from testkit.call_texts import read_calls

BUILTIN = Path(sidecar.__file__).parent / "builtin_model"
MARKS = ("<tool_call>", "</tool_call>")
SYNTAXES = {
    "hermes": ToolSyntax(*MARKS, (hermes_json, qwen3_coder_xml)),
    "xml": ToolSyntax(*MARKS, (qwen3_coder_xml, hermes_json)),
    "glm": ToolSyntax(*MARKS, (glm4_native, qwen3_coder_xml)),
    "mistral": ToolSyntax("[TOOL_CALLS]", "", (mistral,)),
    "bare": ToolSyntax('{"name":', "", (bare_json,), is_inside=True),
}


def tool(name: str, properties: dict[str, Any], required: Sequence[str]) -> Tool:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    function = {"name": name, "parameters": schema}
    return Tool(name, schema, {"type": "function", "function": function})


TEXT = {"type": "string", "maxLength": 6}
TOOLS = (
    tool("look", {"at": TEXT, "times": {"type": "integer"}}, ["at"]),
    tool("go-on", {}, []),
    tool(
        "move",
        {"to": {"enum": ["left", "right"]}, "by": {"type": "array", "items": TEXT,
                                                  "maxItems": 2}},
        ["to", "by"],
    ),
)  # fmt: skip
BY_NAME = {one.name: one for one in TOOLS}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(BUILTIN)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> LLTokenizer:
    return from_tokenizer(tokenizer._tokenizer, None, sorted(tokenizer.eos_token_ids))


def written(
    grammar: str, vocabulary: LLTokenizer, tokenizer: Any, seed: int, most: int = 500
) -> str | None:
    """A random text of a grammar; None: it did not end in so many tokens."""
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    chance, mask = random.Random(seed), allocate_token_bitmask(1, vocabulary.vocab_size)
    ids: list[int] = []
    while len(ids) < most:
        fill_next_token_bitmask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
        allowed = np.nonzero(bits[: vocabulary.vocab_size])[0].tolist()
        stops = set(allowed) & tokenizer.eos_token_ids
        token = (
            min(stops) if stops and chance.random() < 0.5 else chance.choice(allowed)
        )
        if token in tokenizer.eos_token_ids:
            return str(tokenizer.decode(ids))
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return None


@pytest.mark.parametrize("kind", SYNTAXES)
@pytest.mark.parametrize("name", [None, "move", "go-on"])
def test_calls_of_a_grammar_are_read_back(
    kind: str, name: str | None, vocabulary: LLTokenizer, tokenizer: Any
) -> None:
    syntax = SYNTAXES[kind]
    choice = ToolChoice("named", name) if name else ToolChoice("required")
    grammar = call_grammar(choice, TOOLS, syntax, tokenizer.get_vocab())
    assert grammar is not None
    found = []
    for seed in range(30):
        text = written(grammar, vocabulary, tokenizer, seed)
        if text is None:
            continue
        read = read_calls(text.strip(), [syntax], TOOLS)
        assert read.calls, text
        assert read.text == "", text
        for called, arguments in read.parsed:
            found.append(called)
            schema = dict(BY_NAME[called].parameters)
            if kind in ("xml", "glm"):  # a string stands as it is: its length is free
                at = arguments.get("at")
                arguments |= {"at": "a"} if isinstance(at, str) else {}
            jsonschema.validate(arguments, schema)
        assert name is None or [called for called, _ in read.calls] == [name]
    assert len(found) >= 5
    assert set(found) == ({name} if name else set(BY_NAME)) or kind != "hermes"


@pytest.mark.parametrize(
    ("pattern", "slashed"),
    [
        ("a/b", r"a\/b"), (r"a\/b", r"a\/b"), (r"a\\/b", r"a\\\/b"),
        ("a\nb", r"a\nb"), ("a\\\nb", r"a\nb"), ("a\\\\\nb", r"a\\\nb"),
    ],
)  # fmt: skip
def test_a_pattern_means_the_same_between_slashes(pattern: str, slashed: str) -> None:
    """An escaped backslash before a line break stays one."""
    asked = OutputFormat("regex", pattern, True, "guided_regex")
    lark = answer_grammar(asked, None, {}, is_behind_thinking=False)
    assert f"answer: /{slashed}/" in lark


def test_a_format_that_has_no_grammar_yet_says_so(tokenizer: Any) -> None:
    syntax = ToolSyntax("<a>", "</a>", (deepseek,))
    vocab = tokenizer.get_vocab()
    assert call_grammar(ToolChoice("required"), TOOLS, syntax, vocab) is None
    assert call_grammar(ToolChoice("required"), (), SYNTAXES["xml"], vocab) is None
    library: Format = lambda body, tools: []  # noqa: E731
    syntax = ToolSyntax("<a>", "</a>", (library,))
    assert call_grammar(ToolChoice("required"), TOOLS, syntax, vocab) is None


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        (r"\d+", "[0-9]+"),
        (r"[\d\-]\D", r"[0-9\-][^0-9]"),
        (r"\\d", r"\\d"),
        (r"[\w]\W", "[A-Za-z0-9_][^A-Za-z0-9_]"),
        (r"\s", r"[ \t\n\r\f\v]"),
        (r"\.[[]\d", r"\.[[][0-9]"),
    ],
)
def test_classes_of_a_pattern_are_ascii(pattern: str, read: str) -> None:
    assert ascii_classes(pattern) == read


def test_a_negated_class_within_brackets_is_refused() -> None:
    with pytest.raises(ValueError, match="within brackets"):
        ascii_classes(r"[\S]")


def test_a_slash_of_a_pattern_is_text(vocabulary: LLTokenizer, tokenizer: Any) -> None:
    asked = OutputFormat("regex", r"a/b\/c\\/")
    vocab = tokenizer.get_vocab()
    grammar = answer_grammar(asked, None, vocab, is_behind_thinking=False)
    assert written(grammar, vocabulary, tokenizer, 1) == "a/b/c\\/"
