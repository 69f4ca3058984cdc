"""The grammar of a text that an answer must be."""

from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer

import sidecar
from sidecar.core.requests import OutputFormat
from sidecar.output.grammars.answer_grammar import answer_grammar, ascii_classes
from testkit.grammar_texts import GrammarTexts

BUILTIN = Path(sidecar.__file__).parent / "builtin_model"


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
    lark = answer_grammar(asked)
    assert f"answer: /{slashed}/" in lark


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


def test_a_slash_of_a_pattern_is_text() -> None:
    asked = OutputFormat("regex", r"a/b\/c\\/")
    texts = GrammarTexts(load_tokenizer(BUILTIN))
    assert texts.write(answer_grammar(asked), 1) == "a/b/c\\/"
