"""
A decode batch whose only row may say several tokens a step: those of plain steps.

All of a draft goes through the model in one pass. At each place the row's own draw
decides, with the logits, penalties, mask and random key that it would have had there:
what it draws is said, and the first token that is not the draft's ends the run. So a
bad draft costs time and changes nothing (docs/speculation.md). Rejection sampling
(Leviathan and others, 2023) would keep the distribution but not the tokens.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import Any, cast

import mlx.core as mx

from sidecar.engine.constrained_row import mask_along
from sidecar.engine.decode_batch import DecodeBatch, likeliest, read
from sidecar.engine.sampling import Drawing, RowSampler
from sidecar.engine.speculation import padded_kv
from sidecar.kv.kv_layers import (
    is_attention_planned,
    is_sliceable,
    restore_checkpoint,
    take_checkpoint,
    trim,
)


class SpeculatingBatch(DecodeBatch):
    """A decode batch that can try drafts."""

    @property
    def may_speculate(self) -> bool:
        """Whether a draft can be tried: for one row that is alone, without images."""
        is_alone = self._is_plain and len(self.uids) == 1
        return is_alone and not (self._shifts or self._unfed)

    def drawn(self) -> int:
        """The only row's next token, which is drawn already; waits for it."""
        self.take_back()  # the draft's own draws begin with the same keys
        return cast(int, self._next_tokens.item())

    def speculate(self, draft: Sequence[int]) -> list[Any]:
        """
        Say as many tokens of a draft as would have been said without it.

        Args:
            draft: the token that is drawn already first. No stop token is tried.
        Returns:
            mlx-lm's responses, in order; none where nothing can be tried.
        """
        most = self.max_tokens[0] - self._num_tokens[0] - 1
        run = _before_any(draft[: max(most, 0)], self.stop_ids)
        if len(run) < 2 or self._next_tokens.tolist() != run[:1]:
            return []
        self.take_back()
        logits, num_fed, saved = self._computed(run)
        self.before_wait()
        if constrained := self._constrained.get(self.uids[0]):
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # masks are made meanwhile
            mask = mask_along(constrained, run, logits.shape[-1])
            run = run[: mask.num_places]
            if not run:  # its grammar has failed: a plain step will say so
                self._go_back(num_fed, run, 0, saved)
                return []
            logits = logits[: len(run)]
        processed = self._processed_along(logits, mx.array(run))
        logprobs, drawn = self._drawn_along(
            mask.applied(processed) if constrained else processed
        )
        num_top = self._num_top.get(self.uids[0])
        found = [
            likeliest(logprobs[place], drawn[place], num_top)
            for place in range(len(run))
        ]
        due = self._next_logprobs
        mx.eval(drawn, found, due)
        num_taken = num_equal(run[1:], cast(list[int], drawn.tolist()))
        said = run[: num_taken + 1]
        self._go_back(num_fed, run, len(said), saved)
        self._next_tokens = drawn[num_taken : num_taken + 1]
        self._next_logprobs = found[num_taken : num_taken + 1]
        self._num_tokens[0] += len(said)
        self.tokens[0] += said
        if constrained is not None:
            constrained.take_all(said)
        logprobs_said = map(read, [*due, *found[:num_taken]])
        return [
            self.Response(self.uids[0], token, logprob, None, None, None)
            for token, logprob in zip(said, logprobs_said, strict=True)
        ]

    def _computed(self, run: list[int]) -> tuple[mx.array, int, list[Any] | None]:
        """Logits behind each token, how many were fed, and what can be gone back to."""
        cache, fed, saved = self.prompt_cache, run, None
        if not is_sliceable(cache):
            saved = take_checkpoint(cache)
        elif is_attention_planned():
            fed = padded_kv.filled(run)
            cache = padded_kv.padded(cache, len(fed))
        logits = self._forward(mx.array([fed]), cache)[0, : len(run)]
        return logits, len(fed), saved

    def _processed_along(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Logits at each place of a run after the row's own processors."""
        if not self.logits_processors[0]:
            return logits
        places = [slice(place, place + 1) for place in range(len(inputs))]
        rows = [self._processed_row(0, logits[at], inputs[at])[0] for at in places]
        return mx.concatenate(rows, axis=0)

    def _drawn_along(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Log-probabilities and draws at each place, each draw with its own key."""
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return logprobs, Drawing(self.samplers * len(logits))(logprobs)

    def _go_back(
        self, num_fed: int, run: list[int], num_said: int, saved: list[Any] | None
    ) -> None:
        """
        Forget what was fed and not said.

        Layers that cannot be cut go back to where they were before the run, and all
        others with them: what was said of it is fed with the next token.
        """
        if num_fed == num_said:
            return
        num_wrong = len(run) - num_said
        if self.logits_processors[0]:
            self._token_context[0]._size -= num_wrong
        sampler = self.samplers[0]
        if isinstance(sampler, RowSampler):
            sampler.give_back(num_wrong)
        if saved is None:
            trim(self.prompt_cache, num_fed - num_said)
            return
        trim(self.prompt_cache, num_fed)
        restore_checkpoint(self.prompt_cache, saved)
        self._unfed = run[:num_said]


def _before_any(run: Sequence[int], ends: Collection[int]) -> list[int]:
    """The beginning of a run that has none of these."""
    return list(itertools.takewhile(lambda one: one not in ends, run))


def num_equal(expected: Sequence[int], found: Sequence[int]) -> int:
    """How many tokens are the same before the first that is another."""
    pairs = zip(expected, found, strict=False)
    most = min(len(expected), len(found))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), most)
