"""
One answer that is held to something: which tokens may come next.

Thinking is free: a grammar begins behind its close tag. Where a model may begin to
think or not, the open tag may come as well as what the grammar lets in. Thinking that
has taken all of its budget is closed, and behind the one call that is wanted nothing
but an end may come.
"""

import copy
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from sidecar.engine.grammar_compiler import GrammarCompiler, first_line
from sidecar.engine.tokens_beyond import TokensBeyond

_TAIL = 24  # tokens in which a close tag is looked for, however it was cut
_ALL = -1  # as bits: any token
# CPU time that the grammar of a request may take in all its answers, and what a step
# adds to what is left of it: all others wait for it, on the GPU thread.
_MOST_S, _STEP_S = 0.5, 0.01


@dataclass(slots=True)
class Allowance:
    """What the grammar of one request may take still. GPU thread only."""

    seconds: float = field(default_factory=lambda: _MOST_S)

    def step(self) -> None:
        """One more token; what is saved up is no more than at the beginning."""
        self.seconds = min(_MOST_S, self.seconds + _STEP_S)


@dataclass(frozen=True, slots=True)
class Constraint:
    """
    What the answers of a request are held to.

    Args:
        matcher: a grammar at its beginning; None: any text may come.
        behind: the text that ends thinking, in letters of any case; "": none comes
            before the answer.
        beyond: tokens that hold more than the end of that text.
        opener: a token that may begin the thinking; None: there is none, or that has
            begun.
        budget: tokens of thinking; None: as many as there are.
        close_ids: what ends the thinking then.
        call_end: the token behind which nothing may come; None: there is none.
        banned: tokens that never come.
        armed_by: tokens at each of which the grammar begins; before them, and behind
            its end, any text may come. Empty: it begins at once.
    """

    grammars: GrammarCompiler
    matcher: LLMatcher | None = None
    behind: str = ""
    opener: int | None = None
    budget: int | None = None
    close_ids: tuple[int, ...] = ()
    call_end: int | None = None
    banned: tuple[int, ...] = ()
    armed_by: tuple[int, ...] = ()
    beyond: TokensBeyond = field(default_factory=dict)
    allowance: Allowance = field(default_factory=Allowance)

    @property
    def is_form(self) -> bool:
        """Whether the whole answer, but for its thinking, is held to a grammar."""
        return self.matcher is not None and not self.armed_by


class ConstrainedRow:
    """Follows one answer. GPU thread only."""

    def __init__(self, constraint: Constraint) -> None:
        self._grammars = constraint.grammars
        self._source = constraint.matcher
        self._matcher = constraint.matcher and constraint.matcher.deep_copy()
        self._behind, self._opener = constraint.behind.lower(), constraint.opener
        self._beyond, self._allowance = constraint.beyond, constraint.allowance
        self._budget, self._call_end = constraint.budget, constraint.call_end
        self._close_ids, self._banned = constraint.close_ids, constraint.banned
        self._armed_by = constraint.armed_by
        self._is_begun = not self._armed_by  # the grammar
        self._is_thinking = bool(constraint.behind) and constraint.opener is None
        self._is_behind_last_call = False  # behind the one call
        self._is_ahead = False  # of tokens that may never be said
        self._ahead_allowance = Allowance()
        self._closing: list[int] = []  # what must come next, to end the thinking
        self._tail: list[int] = []
        self._said = ""  # by these tokens
        self.error = ""
        self._spend(0)

    @property
    def num_words(self) -> int | None:
        """How many 32-bit words its grammar's mask has; as many for all of a model."""
        return None if self._matcher is None else self._grammars.num_words

    @property
    def lets_in_all(self) -> bool:
        """Whether any token may come next."""
        is_held = self._closing or self._is_behind_last_call or self._banned
        return (self._matcher is None or not self._is_begun) and not is_held

    def fork(self) -> "ConstrainedRow":
        """Another one at the same place, which goes on by itself."""
        other = copy.copy(self)
        other._matcher = self._matcher and self._matcher.deep_copy()
        other._is_ahead, other._allowance = True, self._ahead_allowance
        return other

    @property
    def may_go_ahead(self) -> bool:
        """Whether drafts have time left: they have some of their own."""
        return self._ahead_allowance.seconds > 0

    def forced(self) -> list[int]:
        """Tokens of which there is no choice: they come next, as far as is known."""
        if self._closing:
            return [*self._closing]
        matcher = self._matcher
        is_free = self._is_thinking or self._is_behind_last_call
        is_held = self._is_begun and not (is_free or self.error)
        if matcher is None or not is_held or matcher.is_stopped():
            return []
        started = time.thread_time()
        found: list[int] = matcher.compute_ff_tokens()
        self._ahead_allowance.seconds -= time.thread_time() - started
        return found

    def take_all(self, tokens: Sequence[int]) -> None:
        """Go on behind several tokens that were sampled in one pass."""
        for token in tokens:
            self._count_step()
            self.take(token)

    def take(self, token: int) -> None:
        """Go on behind a token that was sampled."""
        if self._is_thinking:
            self._closing = self._closing[1:]
            self._tail = [*self._tail[1 - _TAIL :], token]
            self._said = self._grammars.decode(self._tail).lower()
            self._is_thinking = self._behind not in self._said
            self._spend(1)
            return
        if token == self._opener and not (self._armed_by and self._is_begun):
            self._is_thinking, self._tail, self._said = True, [], ""
            is_held = self._matcher is not None and not self._armed_by
            self._opener = None if is_held else self._opener
            self._spend(0)
            return
        self._is_behind_last_call |= token == self._call_end
        if self._matcher is None or self._source is None or self._is_behind_last_call:
            return
        if self._is_begun:
            self._follow(self._matcher, token)
        elif token in self._armed_by:
            self._is_begun, self._matcher = True, self._source.deep_copy()

    def _follow(self, matcher: LLMatcher, token: int) -> None:
        """Go on in the grammar; behind its end all is free where it may begin again."""
        if not self._armed_by:
            self._opener = None
        if not matcher.is_stopped() and not self._timed(
            matcher, lambda: matcher.consume_token(token)
        ):
            self._fail(matcher)
        if self._armed_by and matcher.is_accepting():
            self._is_begun = False

    def _spend(self, count: int) -> None:
        """Count tokens of thinking; close it when there are no more."""
        if self._budget is None or not self._is_thinking or self._closing:
            return
        self._budget -= count
        if self._budget <= 0:
            self._closing, self._budget = [*self._close_ids], None

    def _timed(self, matcher: LLMatcher, step: Callable[[], object]) -> object:
        """What a step of the grammar returns; too many seconds of them are an error."""
        started = time.thread_time()
        done = step()
        self._allowance.seconds -= time.thread_time() - started
        if self._allowance.seconds < 0 and not self.error:
            self.error = "its steps take too much time"
            self._fail(matcher)
        return done

    def _count_step(self) -> None:
        """A token that is said has its time, and so have drafts."""
        if not self._is_ahead:
            self._allowance.step()
            self._ahead_allowance.step()

    def _fail(self, matcher: LLMatcher) -> None:
        self.error = self.error or first_line(matcher.get_error()) or "it is over"
        if self._source is not None and not self._is_ahead:
            self._grammars.drop(self._source)

    def fill(self, mask: NDArray[np.int32], row: int) -> None:
        """Write a bit for each token that may come next into a row of a mask."""
        bits = mask[row].view(np.uint32)
        if self.lets_in_all or self.error:
            return  # the scheduler ends what went wrong
        stops = self._grammars.stop_ids
        if self._closing or self._is_behind_last_call:
            bits[:] = 0
            _set(bits, self._closing[:1] or stops)
            return
        if self._matcher is not None and self._is_begun:
            self._fill_held(self._matcher, mask, row)
        _clear(bits, self._banned)

    def _fill_held(self, matcher: LLMatcher, mask: NDArray[np.int32], row: int) -> None:
        bits = mask[row].view(np.uint32)
        if self._is_thinking:
            # It must not end before what it was asked for has begun.
            _clear(bits, self._grammars.stop_ids)
            for rest, ids in self._beyond.items():
                if self._said.endswith(self._behind.removesuffix(rest)):
                    _clear(bits, ids)
            return
        self._count_step()
        self._timed(matcher, lambda: fill_next_token_bitmask(matcher, mask, row))
        if matcher.is_error():
            self._fail(matcher)
        if self._opener is not None and not self._armed_by:
            _set(bits, [self._opener])


def _set(bits: NDArray[np.uint32], ids: Sequence[int]) -> None:
    for one in ids:
        bits[one // 32] |= np.uint32(1 << one % 32)


def _clear(bits: NDArray[np.uint32], ids: Sequence[int]) -> None:
    """Take tokens out; a tokenizer may have some that its model cannot write."""
    for one in ids:
        if one // 32 < len(bits):
            bits[one // 32] &= ~np.uint32(1 << one % 32)


@functools.cache
def _bits_of_bytes() -> mx.array:
    """For each byte its bits, the lowest first: 256 x 8, on the device."""
    numbers = np.arange(256, dtype=np.uint8)[:, None]
    return mx.array(np.unpackbits(numbers, axis=1, bitorder="little").astype(bool))


def _lets_in(mask: NDArray[np.int32], token: int) -> bool:
    words = mask.view(np.uint32)
    return token // 32 < len(words) and bool(words[token // 32] >> token % 32 & 1)


def _bits(mask: bytes, shape: tuple[int, ...]) -> mx.array:
    """A mask as (rows, vocabulary) of whether a token may come, on the device."""
    rows = np.frombuffer(mask, np.uint8)
    bits = _bits_of_bytes()[mx.array(rows)].reshape(shape[0], -1)
    return bits[:, : shape[-1]]


@functools.lru_cache(maxsize=64)
def _known_bits(mask: bytes, shape: tuple[int, ...]) -> mx.array:
    """Of one row: most steps of an answer, those within a text, have the same mask."""
    bits = _bits(mask, shape)
    mx.async_eval(bits)  # type: ignore[no-untyped-call]  # it outlives this step
    return bits


def masked(
    logits: mx.array, uids: Sequence[int], rows: Mapping[int, ConstrainedRow]
) -> mx.array:
    """
    Logits of which only the tokens that may come next are left.

    Args:
        logits: (rows, vocabulary). uids: of the batch's rows, in order.
        rows: those that keep to a grammar, by uid.
    """
    held = [rows[uid] for uid in uids if uid in rows]
    if all(row.lets_in_all for row in held):
        return logits
    sizes = [size for row in held if (size := row.num_words) is not None]
    num_words = max(sizes, default=-(-logits.shape[-1] // 32))
    mask = np.full((len(uids), num_words), _ALL, np.int32)
    for index, uid in enumerate(uids):
        if uid in rows:
            rows[uid].fill(mask, index)
    known = _known_bits if len(uids) == 1 else _bits
    return mx.where(known(mask.tobytes(), logits.shape), logits, -mx.inf)


@dataclass(frozen=True, slots=True)
class RunMask:
    """
    What may come behind each token of a run, as far as the run itself may come.

    Args:
        words: (places, words): a bit for each token.
    """

    words: NDArray[np.int32]

    @property
    def num_places(self) -> int:
        """How many tokens of the run may come."""
        return len(self.words)

    def applied(self, logits: mx.array) -> mx.array:
        """Logits (places, vocabulary) of which only what may come is left."""
        if bool((self.words == _ALL).all()):
            return logits
        bits = _bits(self.words.tobytes(), logits.shape)
        return mx.where(bits, logits, -mx.inf)


def mask_along(row: ConstrainedRow, run: Sequence[int], vocab_size: int) -> RunMask:
    """
    The masks that a row would have behind each token of a run.

    The row itself stays where it is.

    Args:
        run: its first token may come.
    """
    ahead, masks = row.fork(), []
    num_words = row.num_words or -(-vocab_size // 32)
    for token, after in itertools.zip_longest(run, run[1:]):
        ahead.take(token)
        mask = np.full((1, num_words), _ALL, np.int32)
        ahead.fill(mask, 0)
        if ahead.error:
            break
        masks.append(mask)
        if after is None or not _lets_in(mask[0], after):
            break
    return RunMask(
        np.concatenate(masks) if masks else np.empty((0, num_words), np.int32)
    )
