"""
Compiles grammars for one model's vocabulary, by llguidance.

The library's view of the vocabulary takes a second for 150,000 tokens, so it is made
once, at the first request that has a grammar, on that request's own thread. A grammar
that is new is tried in a process of its own first (grammar_check.py).
"""

import functools
import hashlib
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from sidecar.core.errors import Unavailable
from sidecar.engine import grammar_check
from sidecar.engine.tokens_beyond import TokensBeyond, tokens_beyond
from sidecar.infra.limited_child import ChildBusy, run_limited
from sidecar.infra.lru import Lru

_MAX_KEPT, _MAX_REFUSED = 32, 1024
_SAID_LEN = 300
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_CHECK = Path(grammar_check.__file__)


class UnsupportedGrammar(Exception):
    """What the library says about a grammar that it cannot follow."""


def first_line(said: object) -> str:
    """What is wrong, in the library's words; it goes on with the grammar itself."""
    line, _, _ = str(said).partition("\n")
    return _PLACE.sub("", line)[:_SAID_LEN]


class GrammarCompiler:
    """
    The grammars of one model. Any thread.

    Args:
        tokenizer: mlx-lm's wrapper of it. vocab_size: columns of the model's logits.
        stop_ids: all that end an answer: with one missing a row would run on.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, stop_ids: Iterable[int]
    ) -> None:
        self._source = tokenizer
        self._size = vocab_size
        self.stop_ids = sorted(stop_ids)
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._beyond: dict[str, TokensBeyond] = {}
        self._kept: Lru[str, LLMatcher] = Lru(_MAX_KEPT, _MAX_KEPT, lambda k, m: 1)
        self._refused: Lru[str, str] = Lru(_MAX_REFUSED, _MAX_REFUSED, lambda k, f: 1)

    def compile(self, lark: str, trial: str | None = None) -> LLMatcher:
        """
        A matcher at the beginning of a grammar; to be copied for each answer.

        Args:
            trial: the same in `trial_vocabulary`; None: it names no tokens.
        Raises:
            UnsupportedGrammar: in the library's words.
            Unavailable: others are tried at the moment.
        """
        if (kept := self._kept.get(lark)) is not None:
            return kept
        name = hashlib.sha256(lark.encode("utf-8", "replace")).hexdigest()
        if (known := self._refused.get(name)) is not None:
            raise UnsupportedGrammar(known)
        try:
            return self._compiled(lark, lark if trial is None else trial)
        except UnsupportedGrammar as error:
            self._refused.put(name, str(error))
            raise

    def _compiled(self, lark: str, trial: str) -> LLMatcher:
        self._try(trial)
        grammar = LLMatcher.grammar_from_lark(lark)
        limits = grammar_check.limits()
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise UnsupportedGrammar(first_line(matcher.get_error()))
        if not self._lets_in_any(matcher.deep_copy()):
            raise UnsupportedGrammar("no text keeps to it")
        self._kept.put(lark, matcher)
        return matcher

    def drop(self, matcher: LLMatcher) -> None:
        """Keep no grammar that went wrong: its copies share what they found out."""
        self._kept.pop_if(lambda _, kept: kept is matcher)

    def _try(self, lark: str) -> None:
        """Compile it where it can be ended."""
        try:
            said = run_limited(_CHECK, lark.encode("utf-8", "replace"))
        except ChildBusy:
            busy = "the schema could not be tried in time"
            raise Unavailable(busy, retry_after_s=5) from None
        if said is None:  # out of its time or memory
            raise UnsupportedGrammar("it takes too much to compile")
        if said:
            raise UnsupportedGrammar(first_line(said.decode(errors="replace")))

    def _lets_in_any(self, matcher: LLMatcher) -> bool:
        """Whether anything but an end may come first."""
        mask = bytearray(matcher.compute_bitmask())
        for stop in self.stop_ids:
            mask[stop // 8] &= ~(1 << stop % 8) & 0xFF
        return not matcher.is_error() and any(mask)

    @functools.cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Ids by token; the tokenizer makes it anew each time, of 150,000 entries."""
        known: Mapping[str, int] = self._source.get_vocab()
        return known

    def tokens_beyond(self, tag: str) -> TokensBeyond:
        """Tokens that hold more than the end of a tag; see tokens_beyond.py."""
        tokens = self._tokenizer()
        with self._lock:
            if tag not in self._beyond:
                self._beyond[tag] = tokens_beyond(tag, tokens)
            return self._beyond[tag]

    @functools.cached_property
    def trial_vocabulary(self) -> Mapping[str, int]:
        """The same tokens, all of them as the one that a trial knows."""
        return dict.fromkeys(self.vocabulary, grammar_check.SPECIAL)

    @property
    def knows_tokenizer(self) -> bool:
        """Whether the library reads the model's tokenizer: it takes fast ones only."""
        return hasattr(self._source._tokenizer, "backend_tokenizer")

    @property
    def num_words(self) -> int:
        """How many 32-bit words a mask of the vocabulary has."""
        return (self._tokenizer().vocab_size + 31) // 32

    def decode(self, ids: list[int]) -> str:
        """A few tokens as text, special ones too."""
        return str(self._source.decode(ids))

    def _tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokens is None:
                hf = self._source._tokenizer
                highest = max(self.vocabulary.values(), default=0)
                size = max(self._size, highest + 1)
                try:
                    self._tokens = from_tokenizer(hf, size, self.stop_ids)
                except ValueError as error:
                    raise UnsupportedGrammar(first_line(error)) from None
            return self._tokens
