"""
Drafts what an answer goes on with by a small model of the same vocabulary.

The idea is speculative decoding (Leviathan and others, 2023; Chen and others, 2023). A
draft is only ever tried (speculating_batch), so what the small model reads need not be
the whole prompt: it reads the last tokens, and holds KV for one row at a time. It draws
with the row's own random keys: where both models think alike, both draw the same token.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from sidecar.engine.sampling import Drawing, RowSampler, Sampler
from sidecar.engine.speculation import padded_kv
from sidecar.engine.speculation.draft_length import DraftPrices
from sidecar.kv.kv_layers import (
    KVLayers,
    arrays_of,
    evaluate,
    is_attention_planned,
    trim,
)

if TYPE_CHECKING:
    from sidecar.engine.loading.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

_READ = 1024  # tokens of a row's end, when the model begins with it
_MOST_HELD = 4096  # tokens; then it begins anew


class DraftModel:
    """
    A small model and what it holds of the row that it drafted for last.

    GPU thread only.

    Args:
        width: of the logits that the large model's tokens are drawn from.
    """

    def __init__(self, model: "LoadedModel", width: int) -> None:
        self._model, self._width = model, width
        self.prices = DraftPrices()  # of a call, the draft itself included
        self._row: ModelDrafter | None = None
        self._first = 0  # the place of the first token that is held, in its row
        self._held: list[int] = []
        self._cache: KVLayers = []

    @property
    def arrays(self) -> list[mx.array]:
        """What its caches hold."""
        return arrays_of(self._cache)

    def drafter(self, last: Sequence[int], sampler: Sampler) -> "ModelDrafter":
        """
        A drafter for one row.

        Args:
            last: the tokens of its prompt.
            sampler: which draws the row's own tokens.
        """
        return ModelDrafter(self, last[-_READ:], sampler)

    def reads(self, ids: Sequence[int]) -> bool:
        """Whether it has a row of its embedding for each token."""
        return max(ids, default=0) < self._model.vocab_size

    def let_go(self, row: "ModelDrafter") -> None:
        """Hold nothing of a row any more."""
        if self._row is row:
            self._row, self._held, self._cache = None, [], []

    def go_on(self, row: "ModelDrafter", ids: Sequence[int], count: int) -> list[int]:
        """So many tokens that may follow a row's, drawn as the row draws."""
        logits = self._logits_behind(row, ids)
        drawing, found = Drawing([row.sampler]), []
        with _same_keys_again(row.sampler):
            for number in range(count):
                drawn = drawing(self._logprobs(logits))
                mx.async_eval(drawn)  # type: ignore[no-untyped-call]
                found.append(drawn)
                if number < count - 1:
                    logits = self._model.forward(drawn[None], self._cache)[:, -1, :]
        drafted = cast(list[int], mx.concatenate(found).tolist())
        self._held += drafted[:-1]
        return drafted

    def prepare(self, row: "ModelDrafter", ids: Sequence[int]) -> None:
        """Read what is missing of a row but its last token."""
        if self._missing(row, ids) > padded_kv.LONGEST_RUN:
            self._feed(ids[self._first + len(self._held) : -1])
            evaluate(self._cache)

    def _logits_behind(self, row: "ModelDrafter", ids: Sequence[int]) -> mx.array:
        """Read a row to its end; one token at least is read for that."""
        self._missing(row, ids)
        return self._feed(ids[self._first + len(self._held) :])

    def _missing(self, row: "ModelDrafter", ids: Sequence[int]) -> int:
        """Go back to what the row has in common with what is held; what it lacks."""
        is_long = len(ids) - self._first > _MOST_HELD
        is_behind = len(ids) - self._first - len(self._held) > _READ
        if self._row is not row or is_long or is_behind:
            self._row, self._first = row, max(0, len(ids) - _READ)
            self._held, self._cache = [], self._model.new_cache()
        wanted = ids[self._first : -1]
        same = _num_same(self._held, wanted)
        trim(self._cache, len(self._held) - same)
        del self._held[same:]
        return len(wanted) + 1 - same

    def _feed(self, ids: Sequence[int]) -> mx.array:
        """Logits behind the last of some tokens, which are held from now on."""
        self._held += ids
        fed, cache = list(ids), self._cache
        if 1 < len(fed) <= padded_kv.LONGEST_RUN and is_attention_planned():
            fed = padded_kv.filled(fed)
            cache = padded_kv.padded(cache, len(fed))
        logits = self._model.forward(mx.array([fed]), cache)[:, len(ids) - 1, :]
        trim(self._cache, len(fed) - len(ids))
        return logits

    def _logprobs(self, logits: mx.array) -> mx.array:
        """As wide as the large model's: what one of them lacks is never drawn."""
        logits = logits[:, : self._width]
        missing = self._width - logits.shape[-1]
        if missing:
            ends = [(0, 0), (0, missing)]
            logits = mx.pad(logits, ends, constant_values=-mx.inf)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@contextlib.contextmanager
def _same_keys_again(sampler: Sampler) -> Iterator[None]:
    """What is drawn within is not said: the row draws with these keys once more."""
    if not isinstance(sampler, RowSampler):
        yield
        return
    before = sampler.num_drawn
    try:
        yield
    finally:
        sampler.give_back(sampler.num_drawn - before)


class ModelDrafter:
    """Drafts one answer with the small model. GPU thread only."""

    def __init__(
        self, draft: DraftModel, last: Sequence[int], sampler: Sampler
    ) -> None:
        self._draft, self.sampler = draft, sampler
        self.prices = draft.prices
        self._ids = list(last)
        self._has_failed = False
        self.drafted_s = 0.0  # what the last draft took, without reading what was new

    def take(self, token: int) -> None:
        """Go on behind a token of the answer."""
        self._ids.append(token)

    def propose(self, drawn: int, most: int) -> list[int]:
        """
        What may come next.

        Args:
            drawn: the next token, which is drawn already.
            most: how many tokens, that one included.
        Returns:
            That one, then what the small model goes on with; empty: it cannot read it.
        """
        ids = [*self._ids, drawn]
        if self._has_failed or not self._draft.reads(ids):
            return []
        try:
            self._draft.prepare(self, ids)
            started = time.perf_counter()
            found = self._draft.go_on(self, ids, most - 1)
        except Exception:
            # It is an aid: the answer goes on without it.
            logger.warning("the draft model failed", exc_info=True)
            self._has_failed = True
            self.end()
            return []
        self.drafted_s = time.perf_counter() - started
        return [drawn, *found]

    def end(self) -> None:
        """Have the small model hold nothing of the row."""
        self._draft.let_go(self)


def _num_same(held: Sequence[int], wanted: Sequence[int]) -> int:
    most = min(len(held), len(wanted))
    return next((n for n in range(most) if held[n] != wanted[n]), most)
