"""
Drafts what an answer goes on with by looking up where its last tokens stood before.

Agents write what they have read: a file with a few lines changed, a command once more.
The idea is prompt look-up decoding (Apoorv Saxena, 2023), which is also in transformers
and vLLM. What is new here: the sources are the forms in which the model itself would
write what it has read (source_forms.py), and within a call the place in the source is
kept, so that behind a changed word the draft goes on beside it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GRAMS = (4, 3)  # how many of the last tokens are looked for, the longest first
_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)
_APART = -1  # between two sources: no token
_NEAR = 64  # how far behind a miss the source is looked through
Ids = NDArray[np.int64]


class NgramIndex:
    """
    Where each run of tokens of one length stood last. Any thread, once made.

    Args:
        ids: of all sources, one behind the other.
    """

    def __init__(self, ids: Ids, length: int) -> None:
        self._ids, self._length = ids, length
        hashes = _hashes(ids, length)
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]

    def behind(self, gram: Sequence[int]) -> int | None:
        """The place behind the last run that is this one; None: there is none."""
        key = _hashes(np.array(gram, np.int64), self._length)[0]
        at = int(np.searchsorted(self._sorted, key, side="right")) - 1
        if at < 0 or self._sorted[at] != key:
            return None
        start = int(self._order[at])
        end = start + self._length
        return end if self._ids[start:end].tolist() == list(gram) else None


def _hashes(ids: Ids, length: int) -> NDArray[np.uint64]:
    """A number for each run; 64 bits, so that equal ones are nearly always equal."""
    count = max(len(ids) - length + 1, 0)
    hashes = np.zeros(count, np.uint64)
    numbers = ids.astype(np.uint64)
    for place in range(length):
        hashes = hashes * _FACTOR + numbers[place : place + count]
    return hashes


class Sources:
    """
    All that an answer may repeat. Filled on a thread of its own; empty until then.

    Args:
        texts: ids of the prompt, then of other forms of its parts; the last is looked
            up first.
        prediction: what the client expects the answer to be, in pieces.
        vocab_size: a text ends at an id beyond: a tokenizer may know more tokens than
            the model has rows for, which would be read and written out of bounds.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]] = (),
        prediction: Sequence[Sequence[int]] = (),
        *,
        vocab_size: int,
    ) -> None:
        self._vocab_size = vocab_size
        self.fill(texts, prediction)

    def fill(
        self,
        texts: Sequence[Sequence[int]],
        prediction: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take texts in place of what it held."""
        num_before = sum(len(text) + 1 for text in texts)
        opening = num_before if any(prediction) else None
        self._text = _Text([*texts, *prediction], opening, self._vocab_size)

    @property
    def opening(self) -> int | None:
        """The place where the prediction begins; None: there is none."""
        return self._text.opening

    def behind(self, said: Sequence[int]) -> int | None:
        """The place behind the last occurrence of the last tokens that were said."""
        for length, index in self._text.indexes.items():
            if len(said) >= length:
                found = index.behind(said[-length:])
                if found is not None:
                    return found
        return None

    def has(self, place: int, token: int) -> bool:
        """Whether a token stands at a place."""
        ids = self._text.ids
        return place < len(ids) and bool(ids[place] == token)

    def run(self, start: int, most: int) -> list[int]:
        """The tokens from a place on, up to the end of their source."""
        found: list[int] = self._text.ids[start : start + most].tolist()
        return found[: found.index(_APART)] if _APART in found else found


class _Text:
    """Sources, one behind the other, and where their runs stand."""

    def __init__(
        self, texts: Sequence[Sequence[int]], opening: int | None, vocab_size: int
    ) -> None:
        parts: list[Ids] = [np.empty(0, np.int64)]
        for text in texts:
            parts += [np.array(text, np.int64), np.array([_APART], np.int64)]
        self.ids = np.concatenate(parts)
        self.ids[self.ids >= vocab_size] = _APART
        self.indexes = {n: NgramIndex(self.ids, n) for n in _GRAMS}
        self.opening = opening


class LookupDrafter:
    """
    Drafts one answer. GPU thread only.

    Args:
        last: the last tokens of the prompt.
    """

    def __init__(self, sources: Sources, last: Sequence[int]) -> None:
        self._sources = sources
        self._said = list(last[-max(_GRAMS) :])
        self._own: dict[tuple[int, ...], int] = {}  # places behind runs of the answer
        self._cursor: int | None = None  # of the next token, if it goes on as a source
        self._is_begun = False
        self.is_in_call = False

    def take(self, token: int) -> None:
        """Go on behind a token of the answer."""
        for length in _GRAMS:
            if len(self._said) >= length:
                self._own[tuple(self._said[-length:])] = len(self._said)
        self._said.append(token)
        self._is_begun = True
        self._cursor = self._moved(token)

    def propose(self, most: int) -> list[int]:
        """What may come next, as many tokens at most; empty: nothing is known."""
        if not self._is_begun:
            self._cursor = self._sources.opening
        if self._cursor is not None:
            return self._sources.run(self._cursor, most)
        for length in _GRAMS:
            at = self._own.get(tuple(self._said[-length:]))
            if at is not None:
                return self._said[at : at + most]
        self._cursor = self._sources.behind(self._said)
        return [] if self._cursor is None else self._sources.run(self._cursor, most)

    def _moved(self, token: int) -> int | None:
        """The place in the source behind a token; None: the answer has left it."""
        at = self._cursor
        if at is None:
            return None
        if self._sources.has(at, token):
            return at + 1
        is_kept = self.is_in_call or self._sources.opening is not None
        return self._found_near(at) if is_kept else None

    def _found_near(self, at: int) -> int | None:
        """Beside where the source stood: there a changed text goes on as it was."""
        near = self._sources.run(at, _NEAR)
        last, before = self._said[-1], self._said[-2:-1]
        for place in range(1, len(near)):
            if near[place - 1 : place] == before and near[place] == last:
                return at + place + 1
        return at + near.index(last) + 1 if last in near else None
