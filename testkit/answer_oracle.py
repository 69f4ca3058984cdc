"""
Were answers right? Each sampled one is computed again from its first token.

A forward pass over the ids the model read and then said, with KV of its own, tells for
each place what greedy decoding had to choose there; what it chose may differ only in a
near-tie.
"""

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from sidecar.app import App
from sidecar.engine.job import ChoiceEnded, Job, JobEvent

_CHUNK = 512
_NEAR = 1e-3  # logits closer than this may change places by rounding


@dataclass
class AnswerOracle:
    """Listens to a server's jobs; `check` computes the sampled ones again."""

    share: float
    seed: int = 0
    num_checked: int = 0
    num_near_ties: int = 0
    wrong: list[str] = field(default_factory=list)
    _sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=list
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Note what some jobs read and say; only greedy ones can be checked."""
        chance = random.Random(self.seed)
        emit = Job.emit

        def noted(job: Job, event: JobEvent) -> None:
            emit(job, event)
            how = job.spec.sampling
            is_greedy = how.temperature == 0 and not how.has_processors
            is_end = isinstance(event, ChoiceEnded) and not event.is_aborted
            if is_greedy and is_end:
                with self._lock:
                    if chance.random() < self.share:
                        pair = (tuple(job.spec.model_ids), event.token_ids)
                        self._sampled.append(pair)

        monkeypatch.setattr(Job, "emit", noted)

    def check(self, app: App) -> None:
        """Compute what was sampled so far, on the GPU thread."""
        with self._lock:
            sampled, self._sampled = self._sampled, []
        with app.pool.lease("local") as served:
            model = served.engine.model.model
        for prompt, said in sampled:
            if said:
                app.gpu.call(lambda p=prompt, s=said: self._check_one(model, p, s))

    def _check_one(
        self, model: Any, prompt: tuple[int, ...], said: tuple[int, ...]
    ) -> None:
        logits = _logits(model, prompt, said)
        best = logits.argmax(axis=-1)
        self.num_checked += 1
        for place, (row, token) in enumerate(zip(logits, said, strict=True)):
            if best[place] == token:
                continue
            gap = float(row[best[place]] - row[token])
            if gap > _NEAR:
                self.wrong.append(f"token {place} of {len(said)}: off by {gap:.4f}")
                return
            self.num_near_ties += 1


def _logits(model: Any, prompt: tuple[int, ...], said: tuple[int, ...]) -> np.ndarray:
    """
    Before each token said; in chunks, or it would need more memory than the server.

    Returns:
        float32 (len(said), vocabulary).
    """
    cache = make_prompt_cache(model)
    for start in range(0, len(prompt) - 1, _CHUNK):
        model(mx.array([prompt[start : min(start + _CHUNK, len(prompt) - 1)]]), cache)
        mx.eval([layer.state for layer in cache])
    return np.array(
        model(mx.array([[prompt[-1], *said[:-1]]]), cache)[0].astype(mx.float32)
    )
