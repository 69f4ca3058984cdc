"""One sequence in the decode batch: its ids, its text, its stop strings."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer

from sidecar.core.events import TokenLogprob
from sidecar.core.prompt import ModelIds
from sidecar.engine.decode_batch import TopLogprobs
from sidecar.engine.job import ChoiceEnded, Job, Token
from sidecar.engine.loader import LoadedModel
from sidecar.engine.prefill import Prefill
from sidecar.output.stop_strings import StopStrings


@dataclass(eq=False)
class Row:
    """What one choice of a job has generated. GPU thread only."""

    job: Job
    choice: int
    model: LoadedModel
    prefill: Prefill
    sampled: list[int] = field(default_factory=list)
    stop_string: str | None = None
    last_progress: float = field(default_factory=lambda: time.monotonic())
    longest_gap_s: float = 0.0
    is_ahead: bool = False

    def __post_init__(self) -> None:
        self._detokenizer = _continuing(self.model.tokenizer.detokenizer)
        self._stops = StopStrings(self.job.spec.stop)

    @property
    def kv_ids(self) -> ModelIds:
        """The ids whose KV the row's cache holds once its last token was fed."""
        fed = [self.model.printed_stops.get(i, i) for i in self.sampled[-1:]]
        return ModelIds((*self.job.spec.model_ids, *self.sampled[:-1], *fed))

    def take_early(self, token_id: int, logprobs: TopLogprobs | None) -> None:
        """Take the first token before the batch says it."""
        self.take(token_id, logprobs)
        self.is_ahead = True

    def take(self, token_id: int, logprobs: TopLogprobs | None) -> None:
        """Count a sampled token and tell the job's reader."""
        if self.is_ahead:
            self.is_ahead = False
            return
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_progress)
        self.last_progress = now
        self.sampled.append(token_id)
        if token_id in self.model.stop_ids:
            return
        self._detokenizer.add_token(token_id)
        shown = self._stops.feed(self._detokenizer.last_segment)
        self.stop_string = shown.stop
        logprob = self._logprob(token_id, logprobs)
        self.job.emit(Token(self.choice, shown.text, logprob))

    def end(
        self, reason: Literal["stop", "length"], *, is_aborted: bool = False
    ) -> None:
        """Flush what is held back and say how it ended."""
        text = ""
        if self.stop_string is None:
            self._detokenizer.finalize()
            last = self._stops.feed(self._detokenizer.last_segment)
            self.stop_string = last.stop
            text = last.text if last.stop else last.text + self._stops.flush()
        ids = self.sampled
        if ids and ids[-1] in self.model.stop_ids:
            ids = ids[:-1]
        if self.stop_string is not None:
            reason = "stop"
        self.job.emit(
            ChoiceEnded(
                self.choice, text, reason, self.stop_string, tuple(ids), is_aborted
            )
        )

    def _logprob(self, token_id: int, found: TopLogprobs | None) -> TokenLogprob | None:
        if found is None:
            return None
        decode: Any = self.model.tokenizer.decode
        pairs = zip(found.ids, found.values, strict=True)
        top = tuple((decode([i]), i, value) for i, value in pairs)
        return TokenLogprob(decode([token_id]), token_id, found.own, top)


def _continuing(detokenizer: Any) -> Any:
    """
    A detokenizer in mid-text: a byte-level one drops a space before its first word.

    A text goes on where its prompt ends, so the space belongs to it.
    """
    if isinstance(detokenizer, BPEStreamingDetokenizer):
        detokenizer.text, detokenizer.offset = " ", 1
    return detokenizer
