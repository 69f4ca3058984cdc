"""Which tokens may come next: free within thinking, held behind it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer

import sidecar
from sidecar.engine import grammar_compiler
from sidecar.engine.constrained_row import ConstrainedRow, Constraint
from sidecar.engine.grammar_compiler import GrammarCompiler, UnsupportedGrammar

BUILTIN = Path(sidecar.__file__).parent / "builtin_model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(BUILTIN)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 3072, tokenizer.eos_token_ids)


def allowed(row: ConstrainedRow) -> set[int]:
    """The ids that may come next."""
    mask = np.full((2, row.num_words), -1, np.int32)
    row.fill(mask, 1)
    assert (mask[0] == -1).all()
    bits = np.unpackbits(mask[1].view(np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def row_of(
    grammars: GrammarCompiler, behind: str = "", opener: int | None = None
) -> ConstrainedRow:
    matcher = grammars.compile('start: "yes" | "no"')
    return ConstrainedRow(Constraint(grammars, matcher, behind, opener))


def test_no_answer_ends_before_its_form_begins(
    grammars: GrammarCompiler, tokenizer: Any
) -> None:
    stops, vocab = tokenizer.eos_token_ids, tokenizer.get_vocab()
    row = row_of(grammars, "</think>")
    assert not allowed(row) & stops
    assert len(allowed(row)) > 3000
    for token in (*tokenizer.encode("hm no yes"), vocab["</think>"]):
        row.take(token)
    assert not allowed(row) & stops
    assert len(allowed(row)) < 10
    for token in tokenizer.encode("yes"):
        row.take(token)
    assert allowed(row) == stops
    row.take(min(stops))
    assert row.error == ""


def test_thinking_may_begin_or_not(grammars: GrammarCompiler, tokenizer: Any) -> None:
    vocab = tokenizer.get_vocab()
    opener = vocab["<think>"]
    row = row_of(grammars, "</think>", opener)
    held = allowed(row_of(grammars))
    assert allowed(row) == held | {opener}
    row.take(opener)
    assert len(allowed(row)) > 3000
    row.take(vocab["</think>"])
    assert allowed(row) == held
    row = row_of(grammars, "</think>", opener)
    row.take(tokenizer.encode("no")[0])
    assert opener not in allowed(row)


def test_what_a_grammar_does_not_let_in_is_an_error_of_its_row(
    grammars: GrammarCompiler, tokenizer: Any
) -> None:
    """And the grammar is compiled anew for the next one."""
    row, before = row_of(grammars), grammars.compile('start: "yes" | "no"')
    row.take(tokenizer.encode("lamp")[0])
    assert row.error
    assert "\n" not in row.error
    assert grammars.compile('start: "yes" | "no"') is not before
    assert len(allowed(row_of(grammars))) < 10


def test_rows_of_one_grammar_are_apart(
    grammars: GrammarCompiler, tokenizer: Any
) -> None:
    one, other = row_of(grammars), row_of(grammars)
    before = allowed(other)
    for token in tokenizer.encode("yes"):
        one.take(token)
    assert allowed(other) == before
    assert allowed(one) == tokenizer.eos_token_ids


@pytest.mark.parametrize(
    ("lark", "said"),
    [
        ('start: %json {"not": {}}', "not"),
        ("start: /[^\\x00-\\U0010ffff]/", ""),
        ("start: /(a{3000}){3022}/", ""),
        ("start", ""),
    ],
)
def test_what_is_no_grammar_is_told_in_one_line(
    grammars: GrammarCompiler, lark: str, said: str
) -> None:
    with pytest.raises(UnsupportedGrammar) as told:
        grammars.compile(lark)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_what_compiles_for_ever_is_ended(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, which takes what it took with it."""
    monkeypatch.setattr(grammar_compiler, "_CHECK_S", 0.5)
    pattern = [f'{{"type": "string", "pattern": ".*abc.{{{n}}}"}}' for n in range(30)]
    with pytest.raises(UnsupportedGrammar, match="to compile"):
        grammars.compile(f'start: %json {{"allOf": [{", ".join(pattern)}]}}')
