"""Which tokens may come next: free within thinking, held behind it."""

import itertools
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer

import sidecar
from sidecar.core.errors import Unavailable
from sidecar.core.requests import OutputFormat
from sidecar.engine import constrained_row, grammar_check
from sidecar.engine.constrained_row import ConstrainedRow, Constraint, masked
from sidecar.engine.grammar_compiler import GrammarCompiler, UnsupportedGrammar
from sidecar.infra import limited_child
from sidecar.output.grammars.answer_grammar import answer_grammar

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
    pattern = [f'{{"type": "string", "pattern": ".*abc.{{{n}}}"}}' for n in range(30)]
    lark = f'start: %json {{"allOf": [{", ".join(pattern)}]}}'
    with monkeypatch.context() as patch:
        patch.setattr(limited_child, "_RUN_S", 0.2)
        with pytest.raises(Unavailable):  # the machine may have been busy
            grammars.compile(lark)
    with pytest.raises(UnsupportedGrammar, match="to compile"):
        grammars.compile(lark)


def _allowed(row: ConstrainedRow) -> set[int] | None:
    """Which tokens may come next; None: any."""
    if row.lets_in_all:
        return None
    mask = np.full((1, 96), -1, np.int32)
    row.fill(mask, 0)
    bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
    return {*np.flatnonzero(bits).tolist()}


@pytest.mark.parametrize("starts", ["on", "undecided"])
@pytest.mark.parametrize("budget", [1, 3])
def test_thinking_is_closed_when_its_budget_is_spent(
    grammars: GrammarCompiler, tokenizer: Any, budget: int, starts: str
) -> None:
    """By its tag, whatever the model wanted to think; then all is free."""
    close = tuple(tokenizer.encode("</think>", add_special_tokens=False))
    opener = grammars.vocabulary["<think>"] if starts == "undecided" else None
    row = ConstrainedRow(
        Constraint(grammars, None, "</think>", opener, budget=budget, close_ids=close)
    )
    word = tokenizer.encode("a", add_special_tokens=False)[0]
    if opener is not None:
        row.take(opener)
    for _ in range(budget):
        assert _allowed(row) is None
        row.take(word)
    for token in close:
        assert _allowed(row) == {token}
        row.take(token)
    for _ in range(5):
        assert _allowed(row) is None
        row.take(word)


def test_behind_the_one_call_nothing_but_an_end_may_come(
    grammars: GrammarCompiler, tokenizer: Any
) -> None:
    """A mark within the thinking ends no call."""
    end = grammars.vocabulary["</tool_call>"]
    row = ConstrainedRow(Constraint(grammars, None, "</think>", call_end=end))
    close = tokenizer.encode("</think>", add_special_tokens=False)
    for token in (end, *close, 5, 6):
        assert _allowed(row) is None
        row.take(token)
    row.take(end)
    assert _allowed(row) == set(grammars.stop_ids)


def test_thinking_may_begin_behind_a_word(
    grammars: GrammarCompiler, tokenizer: Any
) -> None:
    """A mark that it quotes ends no call, and its tokens count."""
    end, opener = (grammars.vocabulary[tag] for tag in ("</tool_call>", "<think>"))
    close = tuple(tokenizer.encode("</think>", add_special_tokens=False))
    asked = Constraint(grammars, None, "</think>", opener, 3, close, end)
    row = ConstrainedRow(asked)
    for token in (5, opener, end, 6, 7):
        assert _allowed(row) is None
        row.take(token)
    assert _allowed(row) == {close[0]}


def _chain(length: int) -> dict[str, Any]:
    """A schema that refers to itself so often."""
    defs: dict[str, Any] = {
        f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(length)
    }
    return {"$defs": {**defs, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def _bomb() -> dict[str, Any]:
    """What the library would intersect for minutes, behind references."""
    chance = random.Random(7)
    names = ["".join(chance.choices("abcdefghij", k=3)) for _ in range(30)]
    defs = {
        f"p{n}": {"type": "string", "pattern": f".*{name}.{{{n + 1}}}"}
        for n, name in enumerate(names)
    }
    return {"$defs": defs, "allOf": [{"$ref": f"#/$defs/p{n}"} for n in range(30)]}


def _hidden(schema: dict[str, Any]) -> dict[str, Any]:
    """The same below a name that looks like one of the vocabulary's tokens."""
    defs = schema.pop("$defs")
    properties = {"<[1]>": schema, "<[2]>": {"type": "string"}}
    return {"type": "object", "$defs": defs, "properties": properties,
            "required": [*properties], "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize("schema", [_bomb(), _chain(1000), _chain(2490)])
@pytest.mark.parametrize("is_hidden", [True, False])
def test_a_schema_that_costs_too_much_is_refused_where_it_can_be_ended(
    grammars: GrammarCompiler, schema: dict[str, Any], *, is_hidden: bool
) -> None:
    """However it is named; and it is not tried again."""
    schema = _hidden(json.loads(json.dumps(schema))) if is_hidden else schema
    asked = OutputFormat("json_schema", schema, True, "p")
    lark = answer_grammar(asked)
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(UnsupportedGrammar):
            grammars.compile(lark)
        took_s = time.monotonic() - began
    assert took_s < 0.1


def test_what_is_tried_is_what_is_compiled(grammars: GrammarCompiler) -> None:
    """
    A comment with a quote, behind which names look like tokens.

    The trial once read tokens' numbers out of the text: of two members of one name the
    harmless one was tried, and the other one compiled, for minutes.
    """
    bomb = json.dumps(_bomb()["$defs"] and {"allOf": [*_bomb()["$defs"].values()]})
    members = f'"<[1]>": {bomb}, "<[256]>": {{"type": "boolean"}}'
    schema = f'{{"type": "object", "properties": {{{members}}}}}'
    asked = OutputFormat("grammar", f'// "\nstart: %json {schema}\n', True, "p")
    with pytest.raises(UnsupportedGrammar):
        grammars.compile(answer_grammar(asked))
    known = grammars.vocabulary["<think>"]
    with pytest.raises(UnsupportedGrammar):
        grammars.compile(f"start: <[{known}]>")  # the trial has no such token
    assert grammars.compile(f'start: "a" <[{known}]>', 'start: "a" <[256]>')
    assert set(grammars.trial_vocabulary.values()) == {grammar_check.SPECIAL}


def test_a_token_that_the_model_cannot_write_need_not_be_kept_from_it(
    grammars: GrammarCompiler,
) -> None:
    """Some tokenizers have more tokens than their model has logits."""
    row = ConstrainedRow(Constraint(grammars, banned=(5, 3072, 1 << 20)))
    mask = np.full((1, 3072 // 32), -1, np.int32)
    row.fill(mask, 0)
    bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits == 0).tolist() == [5]


def _each_step_takes(seconds: float, patch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(thread_time=lambda: next(ticks) * seconds)
    patch.setattr(constrained_row, "time", clock)


def test_a_grammar_that_takes_seconds_of_an_answer_is_given_up(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are made where all other answers wait for them."""
    _each_step_takes(0.15, monkeypatch)
    row = row_of(grammars)
    errors = []
    for _ in range(4):
        allowed(row)
        errors.append(row.error)
    assert errors == ["", "", "", "its steps take too much time"]
    matcher = grammars.compile('start: "yes" | "no"')
    assert matcher is not row._source  # it is not kept


def _taken(row: ConstrainedRow, ids: list[int]) -> None:
    for token in ids:
        assert token in allowed(row)
        row.take(token)


@pytest.mark.parametrize("said", ['</foo"', '</FOO"'])
def test_no_token_holds_the_end_of_a_tag_and_what_is_behind_it(
    grammars: GrammarCompiler, tokenizer: Any, said: str
) -> None:
    """The form would begin anew behind it: `{` was shown, and `{` came again."""
    beyond, quote = grammars.tokens_beyond('</foo"'), tokenizer.get_vocab()['"']
    matcher = grammars.compile('start: "yes" | "no"')
    row = ConstrainedRow(Constraint(grammars, matcher, behind='</foo"', beyond=beyond))
    odd = set(beyond['"'])
    assert odd & allowed(row)  # anywhere else they may come
    _taken(row, tokenizer.encode(f"hm {said[:-1]}", add_special_tokens=False))
    assert not odd & allowed(row)
    assert quote in allowed(row)
    row.take(quote)
    assert len(allowed(row)) < 10
    assert tokenizer.encode("yes")[0] in allowed(row)


def test_answers_of_one_request_share_what_their_form_may_take(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight answers do not take eight times as much of the others' time."""
    _each_step_takes(0.3, monkeypatch)
    asked = Constraint(grammars, grammars.compile('start: "yes" | "no"'))
    one, other = ConstrainedRow(asked), ConstrainedRow(asked)
    allowed(one)
    allowed(other)
    assert (one.error, other.error) == ("", "its steps take too much time")
    alone = ConstrainedRow(Constraint(grammars, asked.matcher))
    allowed(alone)
    assert alone.error == ""


def test_cheap_steps_save_up_no_more_than_there_was(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long forced text once paid for minutes of the others' time behind it."""
    row = row_of(grammars)
    for _ in range(200):
        allowed(row)
    _each_step_takes(0.6, monkeypatch)
    allowed(row)
    assert row.error == "its steps take too much time"


def armed_row(grammars: GrammarCompiler, **asked: Any) -> ConstrainedRow:
    opener = grammars.vocabulary["<tool_call>"]
    lark = 'start: "yes" <[{}]>'
    matcher = grammars.compile(
        lark.format(grammars.vocabulary["</tool_call>"]), lark.format(256)
    )
    return ConstrainedRow(Constraint(grammars, matcher, armed_by=(opener,), **asked))


def test_a_grammar_begins_at_its_token_and_all_is_free_around_it(
    grammars: GrammarCompiler, tokenizer: Any
) -> None:
    """Each time that it comes."""
    row, vocab = armed_row(grammars), grammars.vocabulary
    for _ in range(2):
        for token in tokenizer.encode("hm yes", add_special_tokens=False):
            assert row.lets_in_all
            row.take(token)
        row.take(vocab["<tool_call>"])
        assert not row.lets_in_all
        _taken(row, tokenizer.encode("yes", add_special_tokens=False))
        assert allowed(row) == {vocab["</tool_call>"]}
        row.take(vocab["</tool_call>"])
        assert row.lets_in_all
    assert row.error == ""


def test_it_does_not_begin_within_thinking_and_once_if_one_is_wanted(
    grammars: GrammarCompiler, tokenizer: Any
) -> None:
    vocab = grammars.vocabulary
    end = vocab["</tool_call>"]
    row = armed_row(grammars, behind="</think>", call_end=end)
    for token in (vocab["<tool_call>"], 5, 6, vocab["</think>"]):
        assert row.lets_in_all
        row.take(token)
    row.take(vocab["<tool_call>"])
    _taken(row, [*tokenizer.encode("yes", add_special_tokens=False), end])
    assert _allowed(row) == set(grammars.stop_ids)


def test_thinking_does_not_begin_within_a_call(
    grammars: GrammarCompiler, tokenizer: Any
) -> None:
    """The mask let its tag in, and the grammar then failed on it."""
    vocab = grammars.vocabulary
    row = armed_row(grammars, behind="</think>", opener=vocab["<think>"])
    row.take(vocab["<tool_call>"])
    assert vocab["<think>"] not in allowed(row)


def test_thinking_may_begin_again_behind_a_call(
    grammars: GrammarCompiler, tokenizer: Any
) -> None:
    vocab = grammars.vocabulary
    row = armed_row(grammars, behind="</think>", opener=vocab["<think>"])
    call = [vocab["<tool_call>"], *tokenizer.encode("yes", add_special_tokens=False)]
    call.append(vocab["</tool_call>"])
    for _ in range(2):
        for token in (vocab["<think>"], vocab["<tool_call>"], 7, vocab["</think>"]):
            assert row.lets_in_all
            row.take(token)
        for token in call:
            row.take(token)
    assert row.lets_in_all
    assert row.error == ""


@pytest.mark.parametrize("vocab_size", [3072, 3000])
def test_logits_are_masked_alike_when_a_mask_comes_again(
    grammars: GrammarCompiler, tokenizer: Any, vocab_size: int
) -> None:
    """It is kept on the device for a row alone; of a batch it is made anew."""
    row, words = row_of(grammars), tokenizer.encode("yes")
    states = [row_of(grammars), row_of(grammars)]
    states[1].take(words[0])
    logits = mx.ones((1, vocab_size))
    for _ in range(2):
        for state in states:
            alone = np.isfinite(np.array(masked(logits, [5], {5: state})))
            both = masked(mx.ones((2, vocab_size)), [5, 6], {5: row, 6: state})
            assert set(np.nonzero(alone[0])[0]) == {
                token for token in allowed(state) if token < vocab_size
            }
            assert (np.isfinite(np.array(both))[1] == alone[0]).all()


def test_drafts_have_time_of_their_own(
    grammars: GrammarCompiler, tokenizer: Any
) -> None:
    """What is tried ahead takes nothing from what an answer's own steps may take."""
    row = row_of(grammars)
    left = row._allowance.seconds
    ids = tokenizer.encode("yes", add_special_tokens=False)
    mask = constrained_row.mask_along(row, ids, 3072)
    assert mask.num_places == len(ids)
    assert row.forced() is not None
    assert row._allowance.seconds == left
    row._ahead_allowance.seconds = -1.0
    assert not row.may_go_ahead
    row.take(ids[0])
    assert row.error == ""
