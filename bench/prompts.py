"""Prompts of exact lengths that share no beginning, so nothing is ever cached."""

import random
from pathlib import Path

from tokenizers import Tokenizer

_SMALL_IDS = range(10, 2900)  # every model of the benchmarks has them


def random_ids(count: int) -> list[int]:
    """A prompt that nothing is cached of."""
    return random.choices(_SMALL_IDS, k=count)


class PromptSource:
    """
    Makes raw prompts of random words of a model's vocabulary.

    Args:
        tokenizer_file: the model's tokenizer.json.
        seed: equal seeds give equal prompts in the same order.
    """

    def __init__(self, tokenizer_file: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._random = random.Random(seed)
        self._words = sorted(
            token.removeprefix("Ġ")
            for token in self._tokenizer.get_vocab()
            if token.startswith("Ġ") and token[1:].isascii() and token[1:].isalpha()
        )
        self._first_ids: set[int] = set()

    def batch(
        self, num_streams: int, longest: int, shortest: int | None = None
    ) -> list[str]:
        """Prompts for one run: lengths from the longest down to half, shuffled."""
        lengths = lengths_of(num_streams, longest, shortest)
        self._random.shuffle(lengths)
        return [self._prompt(length) for length in lengths]

    def _prompt(self, length: int) -> str:
        while True:
            words = self._random.choices(self._words, k=length)
            ids = self._tokenizer.encode(" ".join(words)).ids[:length]
            text = self._tokenizer.decode(ids)
            is_exact = self._tokenizer.encode(text).ids == ids and len(ids) == length
            # A common beginning of one token would already count as cached.
            if is_exact and ids[0] not in self._first_ids:
                self._first_ids.add(ids[0])
                return text


def lengths_of(
    num_streams: int, longest: int, shortest: int | None = None
) -> list[int]:
    """Evenly spread prompt lengths in tokens; one stream has the longest."""
    shortest = shortest or (longest + 1) // 2
    steps = max(1, num_streams - 1)
    return [longest - (longest - shortest) * i // steps for i in range(num_streams)]
