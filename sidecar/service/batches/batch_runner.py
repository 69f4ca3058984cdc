"""
Answers batches while nobody else asks.

A request that comes in goes before all of a batch: what is being answered for one is
ended, and answered anew when all has been quiet for a moment.
"""

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sidecar.core.errors import SidecarError
from sidecar.service.batches.batch import Batch
from sidecar.service.batches.batch_lines import BadLines, BatchLine
from sidecar.service.batches.batch_run import BatchRun
from sidecar.service.batches.batch_service import BatchService

logger = logging.getLogger(__name__)

_QUIET_S = 0.5  # an agent's next turn comes sooner
_YIELD_S = 1.0  # how long a request waits for what is ended: a step, mostly
_LOOK_S = 0.2
_STOP_S = 10.0
_TRIES = 20  # for a request that the server has no room for
_SHORT_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_OK, _BUSY = 200, (429, 503)


@dataclass(eq=False)
class BatchCall:
    """
    One request of a batch on its way.

    Args:
        owner: see StoredFile. is_wanted: False: its answer is for nobody.
    """

    url: str
    body: bytes
    request_id: str
    owner: str | None
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class BatchReply:
    """
    What came of a call.

    Args:
        status: of HTTP. ignored: the fields that had no effect; "": none.
    """

    status: int
    body: Any
    ignored: str = ""


@dataclass(eq=False)
class _Begun:
    """A request that is being answered."""

    run: BatchRun
    line: BatchLine
    call: BatchCall = field(repr=False)


class BatchRunner:
    """
    Takes requests of open batches in turns, as many at once as may run.

    Args:
        answer: answers one; it takes as long as it takes.
        cancel: ends one, by its request id and its owner.
        most: that run at once. num_asking: of those who wait for an answer.
    """

    def __init__(
        self,
        service: BatchService,
        answer: Callable[[BatchCall], BatchReply],
        cancel: Callable[[str, str | None], bool],
        most: int,
        num_asking: Callable[[], int],
    ) -> None:
        self._service, self._answer, self._cancel = service, answer, cancel
        self._most, self._changed = most, service.changed
        self._num_asking = num_asking
        self.is_active = False  # whether any runs; a plain field: each request looks
        self._runs: dict[str, BatchRun] = {}
        self._begun: list[_Begun] = []
        self._tries: Counter[tuple[str, str]] = Counter()  # that there was no room for
        self._pauses = defaultdict[str, float](float)  # of files that cannot be had
        self._turns = itertools.count(1)
        self._num_paused, self._quiet_since = 0, -_QUIET_S
        self._is_stopped = False
        self._thread = threading.Thread(target=self._loop, name="batches", daemon=True)

    def start(self) -> None:
        """Go on with what is open, and with what comes."""
        self._service.open_if_used()
        self._thread.start()

    def stop(self) -> None:
        """End what runs; it is answered in the next run of this server. Repeatable."""
        with self._changed:
            self._is_stopped = True
            self._end(list(self._begun))
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        with self._changed:
            for run in self._runs.values():
                if not run.num_begun:
                    run.close()
        self._service.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have a request of somebody who waits for its answer go before all batches."""
        with self._changed:
            self._num_paused += 1
            if self._begun:
                self._end(list(self._begun))
                self._changed.wait_for(lambda: not self._begun, _YIELD_S)
        try:
            yield
        finally:
            with self._changed:
                self._num_paused -= 1
                self._quiet_since = time.monotonic()
                self._changed.notify_all()

    def _end(self, begun: list[_Begun]) -> None:
        for one in begun:
            one.call.is_wanted = False
            self._cancel(one.call.request_id, one.call.owner)

    def _loop(self) -> None:
        while not self._is_stopped:
            try:
                self._open_new()
                with self._changed:
                    self._settle_all()
                    while begun := self._next():
                        self._begin(begun)
            except Exception:
                logger.exception("batches cannot be gone on with")
            with self._changed:
                if not self._is_stopped:
                    has_work = bool(self._runs or self._service.open_batches())
                    self._changed.wait(_LOOK_S if has_work else None)
        with self._changed:
            self._changed.wait_for(lambda: not self._begun, _STOP_S)

    def _open_new(self) -> None:
        """Read the files of new ones; nobody waits for that."""
        for batch in self._service.open_batches():
            is_due = time.monotonic() >= self._pauses[batch.id]
            if batch.id in self._runs or not (is_due or batch.status == "cancelling"):
                continue
            try:
                self._open(batch)
            except (OSError, SidecarError) as error:
                logger.warning("%s waits: %s", batch.id, error)
                self._pauses[batch.id] = time.monotonic() + _LONGEST_PAUSE_S
                self._give_up(batch)

    def _give_up(self, batch: Batch) -> None:
        """End one whose files cannot be had, if it is not wanted any more."""
        is_cancelled = batch.status == "cancelling"
        if is_cancelled or time.time() >= batch.expires_at:
            with self._changed, contextlib.suppress(SidecarError):
                batch.become("cancelled" if is_cancelled else "expired")
                self._service.keep(batch)

    def _settle_all(self) -> None:
        """End those that are done."""
        for run in list(self._runs.values()):
            if not self._service.has(run.batch):  # its folder was deleted by hand
                self._end([one for one in self._begun if one.run is run])
                if not run.num_begun:
                    self._drop(run)
                continue
            if time.monotonic() < run.settled_not_before:
                continue
            try:
                self._settle(run)
            except (OSError, SidecarError) as error:
                logger.warning("%s waits: %s", run.batch.id, error)
                run.settled_not_before = time.monotonic() + _LONGEST_PAUSE_S

    def _open(self, batch: Batch) -> None:
        """Begin it, or go on with it; if its file is no batch, it fails."""
        try:
            run = BatchRun(batch, self._service.files)
        except (BadLines, FileNotFoundError) as error:
            gone = [{"code": "invalid_request", "message": "its file is gone",
                     "param": "input_file_id", "line": None}]  # fmt: skip
            with self._changed:
                batch.errors = error.errors if isinstance(error, BadLines) else gone
                batch.become("failed")
                self._service.keep(batch)
            return
        with self._changed:
            if batch.status == "validating":
                batch.become("in_progress")
                self._service.keep(batch)
            self._runs[batch.id] = run

    def _settle(self, run: BatchRun) -> None:
        """End it, if all is answered, or its client or its time says so."""
        batch = run.batch
        is_late = time.time() >= batch.expires_at
        if batch.status == "cancelling" or is_late:
            self._end([one for one in self._begun if one.run is run])
            if run.num_begun:
                return
        elif not run.is_done:
            return
        if batch.status == "cancelling":
            self._finish(run, "cancelled")
        elif run.has_waiting or run.has_expired:
            run.expire()
            self._finish(run, "expired")
        else:
            self._finish(run, "completed")

    def _finish(self, run: BatchRun, status: Any) -> None:
        batch = run.batch
        if "finalizing" not in batch.times and status == "completed":
            batch.become("finalizing")
        run.keep_files()
        batch.become(status)
        self._service.keep(batch)
        self._drop(run)
        logger.info("batch ended id=%s status=%s", batch.id, status)

    def _drop(self, run: BatchRun) -> None:
        run.close()
        del self._runs[run.batch.id]
        for name in [name for name in self._tries if name[0] == run.batch.id]:
            del self._tries[name]

    def _next(self) -> _Begun | None:
        """What may begin now; the batch that has the fewest begun gives it."""
        now = time.monotonic()
        if self._is_stopped or len(self._begun) >= self._most or not self._is_quiet():
            return None
        ready = [
            run
            for run in self._runs.values()
            if run.batch.status == "in_progress" and run.has_due(now)
        ]
        if not ready:
            self.is_active = bool(self._begun)
            return None
        run = min(ready, key=lambda run: (run.num_begun, run.last_turn))
        run.last_turn = next(self._turns)
        line = run.take(now)
        try:
            body = line.body(run.input)
        except (OSError, ValueError) as error:
            run.give_back(line)
            logger.warning("%s waits: %s", run.batch.id, error)
            run.not_before = now + _LONGEST_PAUSE_S
            return None
        request_id = f"{run.batch.id}-{secrets.token_hex(4)}"
        url, owner = run.batch.order.endpoint, run.batch.owner
        return _Begun(run, line, BatchCall(url, body, request_id, owner))

    def _is_quiet(self) -> bool:
        """Whether nobody asks, nor did a moment ago; who asks from now on is seen."""
        self.is_active = True  # before the look: a request looks after it is counted
        if self._num_paused or self._num_asking():
            self._quiet_since = time.monotonic()
        is_quiet = time.monotonic() - self._quiet_since >= _QUIET_S
        self.is_active = is_quiet or bool(self._begun)
        return is_quiet

    def _begin(self, begun: _Begun) -> None:
        self._begun.append(begun)
        threading.Thread(
            target=self._run, args=[begun], name="batch-line", daemon=True
        ).start()

    def _run(self, begun: _Begun) -> None:
        try:
            reply = self._answer(begun.call)
        except BaseException:
            logger.exception("a request of a batch failed")
            reply = BatchReply(500, {"error": {"message": "internal error"}})
        with self._changed:
            self._begun.remove(begun)
            self._take(begun, reply)
            self.is_active = bool(self._begun)
            self._changed.notify_all()

    def _take(self, begun: _Begun, reply: BatchReply) -> None:
        """Keep an answer, or have its request wait again."""
        run, line = begun.run, begun.line
        name = run.batch.id, line.custom_id
        if not begun.call.is_wanted and reply.status != _OK:
            run.give_back(line)
            return
        self._tries[name] += reply.status in _BUSY
        if reply.status in _BUSY and self._tries[name] < _TRIES:
            now = time.monotonic()
            pause_s = min(0.5 * 2 ** self._tries[name], _LONGEST_PAUSE_S)
            run.not_before = now + _SHORT_PAUSE_S  # others may find room sooner
            run.put_off(line, now + pause_s)
            return
        try:
            run.answered(line, _response(begun.call.request_id, reply))
        except OSError as error:
            logger.warning("an answer of %s cannot be kept: %s", run.batch.id, error)
            run.not_before = time.monotonic() + _LONGEST_PAUSE_S
            run.give_back(line)


def _response(request_id: str, reply: BatchReply) -> dict[str, Any]:
    """As a batch's file has it."""
    found = {
        "status_code": reply.status,
        "request_id": request_id,
        "body": reply.body,
    }
    return {**found, "ignored": reply.ignored} if reply.ignored else found
