"""Tokenising piece by piece gives the ids of the whole, or is not done."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, processors

from sidecar.pipeline.template.encoder import PromptEncoder
from testkit.chat_templates import BUILTIN, tokenizer_of

TURNS = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi there<|im_end|>\n"
)


class Wrapped:
    """A tokenizer with less to it: no Rust core, added tokens as a test wants them."""

    def __init__(self, core: Tokenizer, added: dict[str, int]) -> None:
        self._core = core
        self._added = added
        self.bos_token = None
        self.eos_token_ids: set[int] = set()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._core.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._core.decode(ids, skip_special_tokens=False))

    def get_added_vocab(self) -> dict[str, int]:
        return self._added


def core() -> Tokenizer:
    return Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))


def added(of: Tokenizer) -> dict[str, int]:
    return {token.content: i for i, token in of.get_added_tokens_decoder().items()}


def whole(tokenizer: Any, text: str, *, special: bool) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=special))


@pytest.mark.parametrize("kind", ["builtin", "llama3", "glm", "spm"])
def test_common_tokenizers_are_fed_piece_by_piece(kind: str) -> None:
    """With a start token, with many added tokens, with marked first words."""
    assert PromptEncoder(tokenizer_of(kind)).is_incremental


@pytest.mark.parametrize(
    ("kind", "text", "special"),
    [
        ("builtin", TURNS, False),
        ("llama3", "no start token in the text", True),
        ("llama3", "<|begin_of_text|><|start_header_id|>user", False),
        ("spm", "[INST] a [/INST] b </s>", True),
        ("spm", "<s>[INST] a [/INST]", False),
        ("spm", "plain words", True),
    ],
)
def test_start_tokens_are_added_unless_the_text_has_them(
    kind: str, text: str, special: bool
) -> None:
    """Never two, never none."""
    tokenizer = tokenizer_of(kind)
    assert PromptEncoder(tokenizer).encode(text).ids == whole(
        tokenizer, text, special=special
    )


def test_a_continued_text_has_no_start_token() -> None:
    """It stands behind a spliced turn."""
    tokenizer = tokenizer_of("llama3")
    text = "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhi"
    found = PromptEncoder(tokenizer).encode(text, is_start=False)
    assert found.ids == whole(tokenizer, text, special=False)


def test_every_piece_begins_with_its_token() -> None:
    """Places in characters and in ids belong together."""
    tokenizer = tokenizer_of("builtin")
    found = PromptEncoder(tokenizer).encode(TURNS)
    assert found.chars[0] == 0
    assert [TURNS[c : c + 8] for c in found.chars] == [
        "<|im_sta", "<|im_end", "<|im_sta", "<|im_end",
    ]  # fmt: skip
    for char, token in zip(found.chars, found.tokens, strict=True):
        assert tokenizer.decode(list(found.ids[:token])) == TURNS[:char]


def test_places_are_found_by_character() -> None:
    """The piece that holds a character, and where it ends."""
    found = PromptEncoder(tokenizer_of("builtin")).encode(TURNS)
    assert [found.piece_at(c) for c in (0, 5, found.chars[1], len(TURNS) - 1)] == [
        0, 0, 1, 3,
    ]  # fmt: skip
    assert found.end_of_piece(0) == found.tokens[1]
    assert found.end_of_piece(len(TURNS) - 1) == len(found.ids)


def test_ids_before_a_character_are_counted() -> None:
    """A token that begins before it counts."""
    encoder = PromptEncoder(tokenizer_of("builtin"))
    text = "one two three"
    counts = [encoder.counter_before(text)(char) for char in range(len(text) + 1)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(encoder.encode(text).ids))


def test_an_empty_text_has_no_ids() -> None:
    """But still one place to begin."""
    found = PromptEncoder(tokenizer_of("builtin")).encode("")
    assert (found.ids, found.piece_at(0), found.end_of_piece(0)) == ((), 0, 0)


def test_a_tokenizer_without_a_rust_core_is_asked_politely() -> None:
    """Same ids, and no less incremental."""
    plain = Wrapped(core(), added(core()))
    encoder = PromptEncoder(plain)
    assert encoder.is_incremental
    assert encoder.encode(TURNS).ids == whole(plain, TURNS, special=False)
    assert encoder.counter_before("one two")(3) == len(plain.encode(
        "one two", add_special_tokens=False
    ))  # fmt: skip


def test_a_tokenizer_without_added_tokens_gets_whole_texts() -> None:
    """There is nowhere to cut."""
    encoder = PromptEncoder(Wrapped(core(), {}))
    assert not encoder.is_incremental
    found = encoder.encode(TURNS)
    assert (found.chars, found.tokens) == ((0,), (0,))
    assert found.ids == whole(Wrapped(core(), {}), TURNS, special=False)


def test_a_token_that_eats_the_space_before_it_is_noticed() -> None:
    """`lstrip` takes text from the piece before: pieces do not give the whole."""
    greedy = core()
    greedy.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    encoder = PromptEncoder(Wrapped(greedy, added(greedy)))
    assert not encoder.is_incremental
    text = "a  <mask> b"
    assert encoder.encode(text).ids == whole(Wrapped(greedy, {}), text, special=False)


def test_a_normaliser_that_looks_at_the_whole_text_is_noticed() -> None:
    """Stripping the ends strips every piece's."""
    stripping = core()
    stripping.normalizer = normalizers.Strip()
    encoder = PromptEncoder(Wrapped(stripping, added(stripping)))
    text = "  a <|im_start|> b  "
    assert encoder.encode(text).ids == whole(
        Wrapped(stripping, {}), text, special=False
    )


def test_a_tokenizer_that_ends_every_text_gets_whole_texts() -> None:
    """A token behind each piece would be many."""
    ending = core()
    ending.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>",
        pair="$A $B",
        special_tokens=[("<|im_end|>", ending.token_to_id("<|im_end|>"))],
    )
    wrapped = Wrapped(ending, added(ending))
    encoder = PromptEncoder(wrapped)
    assert not encoder.is_incremental
    assert encoder.encode(TURNS).ids == whole(wrapped, TURNS, special=True)


def test_a_core_that_says_otherwise_is_not_used() -> None:
    """Some tokenizers do more in Python than their Rust core knows of."""
    upper = Wrapped(core(), added(core()))
    upper.backend_tokenizer = core()
    upper.encode = lambda text, *, add_special_tokens: whole(
        Wrapped(core(), {}), text.upper(), special=add_special_tokens
    )
    found = PromptEncoder(upper).encode("abc")
    assert found.ids == whole(Wrapped(core(), {}), "ABC", special=False)


def test_a_declared_token_that_is_none_does_no_harm() -> None:
    """Cutting there would give other ids."""
    wrong = Wrapped(core(), {**added(core()), "ser tex": 1})
    encoder = PromptEncoder(wrong)
    assert not encoder.is_incremental


@pytest.mark.parametrize("way", [PromptEncoder.encode, PromptEncoder.count])
def test_nobody_waits_for_a_long_text(way: Callable[[PromptEncoder, str], Any]) -> None:
    """Others run meanwhile: no thread is ever made to give way here but by itself."""
    encoder = PromptEncoder(tokenizer_of("llama3"))
    text = "well, yes and no; " * 60_000
    start, seen = threading.Lock(), threading.Event()
    start.acquire()

    def wait() -> None:
        with start:
            seen.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        start.release()
        way(encoder, text)
        assert seen.is_set()
    finally:
        sys.setswitchinterval(before)
        waiting.join(60)
