"""Finds what answers may repeat, one after the other, on a thread of its own."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from sidecar.engine.job import Job

logger = logging.getLogger(__name__)

Texts = Callable[[], Iterable[Sequence[int]]]


class SourceMaker:
    """
    Fills the sources of jobs. Any thread.

    A job that has ended is not held, and nothing that is done for it goes on for longer
    than a piece of text takes. The process does not wait for it at its end.
    """

    def __init__(self) -> None:
        self._waiting: dict[Job, Callable[[], None]] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._run, name="draft-sources", daemon=True
        )
        self._thread.start()

    def add(self, job: Job, further: Texts, prediction: Texts) -> None:
        """
        Have a job's sources filled.

        Args:
            further, prediction: the ids of its further texts and of what its client
                expects, piece by piece.
        """
        with self._changed:
            if self._is_closed:
                return
            self._waiting[job] = lambda: _fill(job, further, prediction)
            self._changed.notify()

    def drop(self, job: Job) -> None:
        """Forget a job that has ended."""
        with self._changed:
            self._waiting.pop(job, None)

    def close(self) -> None:
        """Do no more."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (fill := self._next()) is not None:
            try:
                fill()
            except BaseException:  # a tokenizer's Rust code may panic
                logger.exception("nothing is drafted from what was read")
            del fill

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            return self._waiting.pop(next(iter(self._waiting)))


def _fill(job: Job, further: Texts, prediction: Texts) -> None:
    sources = job.spec.sources
    texts: list[Sequence[int]] = [job.spec.prompt.read_ids]
    expected: list[Sequence[int]] = []
    for found, pieces in ((texts, further), (expected, prediction)):
        for piece in pieces():
            if job.is_cancelled:
                return
            found.append(piece)
    if sources is not None:
        sources.fill(texts, expected)
