"""
The next token of many prompts, and how likely each of some labels is: no decoding.

A label is scored by its first token that tells it from the others; what all of them
begin with is put behind each prompt.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from sidecar.core.errors import BadRequest, GenerationFailed
from sidecar.engine.native.last_logits import LastLogits
from sidecar.engine.native.prompt_chunks import compute_in_chunks
from sidecar.engine.paced_batches import PacedBatches
from sidecar.engine.sampling import Sampler, Sampling, make_row_sampler
from sidecar.engine.text_engine import TextEngine
from sidecar.kv.kv_layers import give_back_much

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class NextToken:
    """
    What stands behind one prompt.

    Args:
        scores: of each label, between 0 and 1, together 1; empty without labels.
        logits: of the whole vocabulary, float32; None: they were not asked for.
    """

    token_id: int
    scores: tuple[float, ...]
    logits: np.ndarray | None


@dataclass(frozen=True, slots=True)
class LabelTokens:
    """
    Labels as tokens.

    Args:
        shared: what all of them begin with. own: the first of each behind that.
    """

    shared: tuple[int, ...] = ()
    own: tuple[int, ...] = ()


def label_tokens(labels: Sequence[Ids]) -> LabelTokens:
    """
    How labels are told from each other.

    Raises:
        BadRequest: two of them begin alike where others differ.
    """
    places = itertools.takewhile(
        lambda column: len(set(column)) == 1, zip(*labels, strict=False)
    )
    shared = tuple(column[0] for column in places)
    own: dict[int, int] = {}
    for index, label in enumerate(labels):
        rest = label[len(shared) :]
        if not rest:
            raise BadRequest(
                f"labels[{index}] is the beginning of another label", param="labels"
            )
        if (other := own.setdefault(rest[0], index)) != index:
            raise BadRequest(
                f"labels[{index}] and labels[{other}] begin with the same token, and "
                "others do not",
                param="labels",
            )
    return LabelTokens(shared, tuple(own))


class Classifier:
    """
    Classifies for one model. Any thread.

    Args:
        stall_s: how long one batch may keep running streams waiting.
        max_rows: most prompts of a batch. chunk_len: most tokens of one prompt that
            are computed at once.
    """

    def __init__(
        self, engine: TextEngine, stall_s: float, max_rows: int, chunk_len: int
    ) -> None:
        self._engine = engine
        self._batches = PacedBatches(stall_s, max_rows, engine.token_s)
        self._chunk_len = chunk_len

    def classify(
        self,
        prompts: Sequence[Ids],
        labels: LabelTokens,
        sampling: Sampling,
        check: Callable[[], None],
        *,
        with_logits: bool,
    ) -> list[NextToken]:
        """
        The next token of each prompt, in their order.

        Args:
            prompts: at least one token each. check: raises if nobody waits any more.
        Raises:
            Busy, InsufficientMemory, Unavailable.
        """
        texts = [[*prompt, *labels.shared] for prompt in prompts]
        last = LastLogits(self._engine.model)
        vocab_size = self._engine.model.vocab_size

        def read(logits: mx.array, places: Sequence[int]) -> list[NextToken]:
            draws = [make_row_sampler(sampling, vocab_size, at) for at in places]
            return _read(logits, labels, draws, with_logits=with_logits)

        steps = self._steps(texts, last, read, check)
        return self._engine.run_beside(steps, max(map(len, texts)))

    def _steps(
        self,
        texts: Sequence[Ids],
        last: LastLogits,
        read: Callable[[mx.array, Sequence[int]], list[NextToken]],
        check: Callable[[], None],
    ) -> Generator[None, None, list[NextToken]]:
        """The short ones in batches, then each long one in chunks."""
        places = range(len(texts))
        short = [i for i in places if len(texts[i]) <= self._chunk_len]

        def run(batch: list[int]) -> list[NextToken]:
            own = [short[i] for i in batch]
            return read(last([texts[place] for place in own]), own)

        batched = self._batches.steps([texts[i] for i in short], check, run)
        found = dict(zip(short, (yield from batched), strict=True))
        for place in places:
            if place not in found:
                logits = yield from self._long(texts[place], last, check)
                (found[place],) = read(logits, [place])
        return [found[place] for place in places]

    def _long(
        self, text: Ids, last: LastLogits, check: Callable[[], None]
    ) -> Generator[None, None, mx.array]:
        """Logits behind a text of several chunks."""
        model = self._engine.model
        cache = model.new_cache()
        done = (len(text) - 1) // self._chunk_len * self._chunk_len
        yield from compute_in_chunks(model, text[:done], cache, self._chunk_len, check)
        return last([text[done:]], cache)


def _read(
    logits: mx.array,
    labels: LabelTokens,
    draws: Sequence[Sampler],
    *,
    with_logits: bool,
) -> list[NextToken]:
    """What rows of logits say, each drawn from with randomness of its own."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    drawn = [draw(logprobs[row : row + 1]) for row, draw in enumerate(draws)]
    columns = logits[:, mx.array(labels.own)] if labels.own else logits[:, :0]
    tokens, scores = mx.concatenate(drawn), mx.softmax(columns, axis=-1)
    is_lost = mx.isnan(logits).any()
    mx.eval(tokens, scores, logits, is_lost)
    if is_lost.item():
        raise GenerationFailed("the model gives no numbers for these prompts")
    give_back_much()
    whole = np.array(logits) if with_logits else None
    return [
        NextToken(token, tuple(own), None if whole is None else whole[row])
        for row, (token, own) in enumerate(
            zip(np.array(tokens).tolist(), np.array(scores).tolist(), strict=True)
        )
    ]
