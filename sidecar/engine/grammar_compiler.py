"""
Compiles grammars for one model's vocabulary, by llguidance.

The library's view of the vocabulary takes a second for 150,000 tokens, so it is made
once, at the first request that has a grammar, on that request's own thread.
"""

import re
import threading
from collections.abc import Iterable
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from sidecar.infra.lru import Lru

_MAX_KEPT = 64
_SAID_LEN = 300
_PLACE = re.compile(r"^at \d+\(\d+\): ")


class UnsupportedGrammar(Exception):
    """What the library says about a grammar that it cannot follow."""


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
        self._stop_ids = sorted(stop_ids)
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._kept: Lru[str, LLMatcher] = Lru(_MAX_KEPT, _MAX_KEPT, lambda k, m: 1)

    def compile(self, lark: str) -> LLMatcher:
        """
        A matcher at the beginning of a grammar; to be copied for each answer.

        Raises:
            UnsupportedGrammar: in the library's words.
        """
        if (kept := self._kept.get(lark)) is not None:
            return kept
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            said, _, _ = matcher.get_error().partition("\n")  # then the grammar itself
            raise UnsupportedGrammar(_PLACE.sub("", said)[:_SAID_LEN])
        self._kept.put(lark, matcher)
        return matcher

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
                highest = max(hf.get_vocab().values(), default=0)
                size = max(self._size, highest + 1)
                self._tokens = from_tokenizer(hf, size, self._stop_ids)
            return self._tokens
