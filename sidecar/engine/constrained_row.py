"""
One answer that must keep to a grammar: which tokens may come next.

Thinking is free: the grammar begins behind its close tag. Where a model may begin to
think or not, the open tag may come as well as what the grammar lets in.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from sidecar.engine.grammar_compiler import GrammarCompiler, first_line

_TAIL = 24  # tokens in which a close tag is looked for, however it was cut
_ALL = -1  # as bits: any token


@dataclass(frozen=True, slots=True)
class Constraint:
    """
    A grammar for the answers of a request.

    Args:
        matcher: at its beginning. behind: the text that ends what is free; "": the
            grammar begins with the answer.
        opener: a token that may begin what is free; None: there is none, or that has
            begun.
    """

    grammars: GrammarCompiler
    matcher: LLMatcher
    behind: str = ""
    opener: int | None = None


class ConstrainedRow:
    """Follows one answer. GPU thread only."""

    def __init__(self, constraint: Constraint) -> None:
        self._grammars = constraint.grammars
        self._source = constraint.matcher
        self._matcher = constraint.matcher.deep_copy()
        self._behind, self._opener = constraint.behind, constraint.opener
        self._is_free = bool(constraint.behind) and constraint.opener is None
        self._tail: list[int] = []
        self.error = ""

    @property
    def num_words(self) -> int:
        """How many 32-bit words its mask has; as many for all rows of a model."""
        return self._grammars.num_words

    def take(self, token: int) -> None:
        """Go on behind a token that was sampled."""
        if self._is_free:
            self._tail = [*self._tail[1 - _TAIL :], token]
            self._is_free = self._behind not in self._grammars.decode(self._tail)
        elif token == self._opener:
            self._is_free, self._opener = True, None
        else:
            self._opener = None
            is_over = self._matcher.is_stopped()
            if not is_over and not self._matcher.consume_token(token):
                self._fail()

    def _fail(self) -> None:
        self.error = self.error or first_line(self._matcher.get_error()) or "it is over"
        self._grammars.drop(self._source)

    def fill(self, mask: NDArray[np.int32], row: int) -> None:
        """Write a bit for each token that may come next into a row of a mask."""
        bits = mask[row].view(np.uint32)
        if self._is_free:  # it must not end before what it was asked for has begun
            for stop in self._grammars.stop_ids:
                bits[stop // 32] &= ~np.uint32(1 << stop % 32)
            return
        if self.error:
            return  # the scheduler ends it
        fill_next_token_bitmask(self._matcher, mask, row)
        if self._matcher.is_error():
            self._fail()
        if self._opener is not None:
            bits[self._opener // 32] |= np.uint32(1 << self._opener % 32)


@functools.cache
def _bits_of_bytes() -> mx.array:
    """For each byte its bits, the lowest first: 256 x 8, on the device."""
    numbers = np.arange(256, dtype=np.uint8)[:, None]
    return mx.array(np.unpackbits(numbers, axis=1, bitorder="little").astype(bool))


def masked(
    logits: mx.array, uids: Sequence[int], rows: Mapping[int, ConstrainedRow]
) -> mx.array:
    """
    Logits of which only the tokens that may come next are left.

    Args:
        logits: (rows, vocabulary). uids: of the batch's rows, in order.
        rows: those that keep to a grammar, by uid.
    """
    num_words = next(iter(rows.values())).num_words
    mask = np.full((len(uids), num_words), _ALL, np.int32)
    for index, uid in enumerate(uids):
        if uid in rows:
            rows[uid].fill(mask, index)
    bits = _bits_of_bytes()[mx.array(mask.view(np.uint8))].reshape(len(uids), -1)
    return mx.where(bits[:, : logits.shape[-1]], logits, -mx.inf)
