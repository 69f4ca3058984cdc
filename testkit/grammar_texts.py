"""Random texts of a grammar, as a model without a mind would write them."""

import random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

_END_CHANCE, _MARK_CHANCE = 0.5, 0.3


class GrammarTexts:
    """
    Writes texts in the tokens of one model.

    Args:
        tokenizer: mlx-lm's wrapper.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stops = set(tokenizer.eos_token_ids)
        self.vocabulary: LLTokenizer = from_tokenizer(
            tokenizer._tokenizer, None, sorted(self._stops)
        )
        known = tokenizer.get_vocab()
        added = set(tokenizer.get_added_vocab().values())
        self._marks = {one for text, one in known.items() if text[:1] in "<[\"'}"}
        self._marks |= added

    def write(self, grammar: str, seed: int, most: int = 400) -> str | None:
        """
        A text of a grammar.

        What closes strings and calls is written oftener than by chance, or few would
        end.

        Returns:
            None: it did not end in so many tokens.
        """
        lark = LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(self.vocabulary, lark, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        chance = random.Random(seed)
        ids: list[int] = []
        while len(ids) < most:
            token = self._choose(matcher, chance)
            if token in self._stops:
                return str(self._tokenizer.decode(ids))
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
        return None

    def takes(self, grammar: str, *pieces: str) -> bool:
        """
        Whether a text is one of a grammar, whole.

        Args:
            pieces: of it, each in tokens of its own.
        """
        lark = LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(self.vocabulary, lark, log_level=0)
        encode = self._tokenizer.encode
        ids = [i for one in pieces for i in encode(one, add_special_tokens=False)]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def _choose(self, matcher: LLMatcher, chance: random.Random) -> int:
        mask = allocate_token_bitmask(1, self.vocabulary.vocab_size)
        fill_next_token_bitmask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
        allowed = np.nonzero(bits[: self.vocabulary.vocab_size])[0].tolist()
        stops = self._stops.intersection(allowed)
        if stops and chance.random() < _END_CHANCE:
            return min(stops)
        marks = sorted(self._marks.intersection(allowed) - stops)
        if marks and chance.random() < _MARK_CHANCE:
            return chance.choice(marks)
        return int(chance.choice(allowed))
