"""One batch in progress: which of its requests wait, and where the answers go."""

import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

from sidecar.service.batches.batch import Batch
from sidecar.service.batches.batch_lines import (
    AnswerFile,
    BatchLine,
    left_over,
    read_lines,
)
from sidecar.service.batches.stored_files import StoredFiles

_OK = 200
_EXPIRED = {
    "code": "batch_expired",
    "message": "The request was not answered before its batch expired.",
}


class BatchRun:
    """
    The requests of a batch that are still to be answered. Under its runner's lock.

    Raises:
        BadLines: its file is no batch. OSError: a file cannot be read or written.
    """

    def __init__(self, batch: Batch, files: StoredFiles) -> None:
        self.batch, self._files = batch, files
        self.input = files.path(batch.order.input_file_id)
        lines = read_lines(self.input, batch.order.endpoint)
        batch.num_requests = len(lines)
        self._good = AnswerFile(files.path(batch.output_id))
        self._bad = AnswerFile(files.path(batch.error_id))
        self._waiting = deque(left_over(lines, self._good, self._bad))
        self._due: dict[str, float] = {}  # of those that were put off, by custom id
        self.num_begun = 0  # that are being answered now
        self.not_before = 0.0  # of the monotonic clock: then the next one may begin
        self.settled_not_before = 0.0  # then its end may be tried again
        self.last_turn = 0
        self.has_expired = False
        self._count()

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits for its turn."""
        return bool(self._waiting)

    @property
    def is_done(self) -> bool:
        """Whether all are answered."""
        return not (self._waiting or self.num_begun)

    def has_due(self, now: float) -> bool:
        """Whether one may begin."""
        return now >= self.not_before and self._next_due(now) is not None

    def take(self, now: float) -> BatchLine:
        """The next request that may begin; it is answered, or given back."""
        line = self._next_due(now)
        assert line is not None
        self._waiting.remove(line)
        self._due.pop(line.custom_id, None)
        self.num_begun += 1
        return line

    def put_off(self, line: BatchLine, due: float) -> None:
        """It is tried again then; others begin meanwhile."""
        self._due[line.custom_id] = due
        self.num_begun -= 1
        self._waiting.append(line)

    def _next_due(self, now: float) -> BatchLine | None:
        if not self._due:
            return self._waiting[0] if self._waiting else None
        due = self._due
        lines = (line for line in self._waiting if due.get(line.custom_id, 0.0) <= now)
        return next(lines, None)

    def give_back(self, line: BatchLine) -> None:
        """It is the next one again."""
        self.num_begun -= 1
        self._waiting.appendleft(line)

    def answered(self, line: BatchLine, response: Mapping[str, Any]) -> None:
        """
        Keep an answer; it is on the disk itself when this returns.

        Raises:
            OSError: it cannot be written, and the request is to be given back.
        """
        is_good = response["status_code"] == _OK
        file = self._good if is_good else self._bad
        file.append([_line(line, response, None)])
        self.num_begun -= 1
        self._count()

    def expire(self) -> None:
        """Say of all that wait that they were not answered in time."""
        self._bad.append([_line(line, None, _EXPIRED) for line in self._waiting])
        self._waiting.clear()
        self.has_expired = True
        self._count()

    def close(self) -> None:
        """Let the files go."""
        self._good.close()
        self._bad.close()

    def keep_files(self) -> None:
        """Let its client have what was answered, and nothing that is empty."""
        batch = self.batch
        for file_id, number, kind in (
            (batch.output_id, batch.num_completed, "output"),
            (batch.error_id, batch.num_failed, "error"),
        ):
            if number:
                name = f"{batch.id}_{kind}.jsonl"
                self._files.keep_written(file_id, batch.owner, name, "batch_output")
            else:
                self._files.path(file_id).unlink(missing_ok=True)

    def _count(self) -> None:
        self.batch.num_completed = len(self._good.answered)
        self.batch.num_failed = len(self._bad.answered)


def _line(line: BatchLine, response: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
