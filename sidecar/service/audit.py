"""
The audit: a row for each call that asks or changes something.

Rows are handed to a thread of their own over a bounded queue: no answer waits for the
disk. Rows that cannot be written are lost and counted, with one warning.
"""

import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sidecar.core.errors import SidecarError
from sidecar.infra.audit_store import AuditRow, AuditStore
from sidecar.infra.lru import Lru
from sidecar.service.request_history import EndedRequest

logger = logging.getLogger(__name__)

_MAX_ENDED = 1024
_MAX_WAITING, _MAX_BATCH = 1000, 200
_CLOSE_S = 5.0
_MAX_CHARS = 256
_ADMIN = "/admin/"
_OF_MODELS = "/admin/models/"
_LEFT = 499  # the client did
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """
    What the door knows of a call.

    Args:
        endpoint: a known path, or `other`. sender: a name for its key.
        trace: its header `traceparent`.
    """

    request_id: str
    method: str
    path: str
    endpoint: str
    address: str
    status: int
    seconds: float
    client: str | None
    sender: str | None
    trace: str
    error: SidecarError | None


class Audit:
    """
    Joins what the door knows of a call with what its chat took. Any thread.

    Args:
        store: None: nothing is kept. dropped: called with how many rows were lost.
    """

    def __init__(
        self, store: AuditStore | None, dropped: Callable[[int], None]
    ) -> None:
        self.store, self._dropped = store, dropped
        self._has_warned = False
        self._waiting: queue.Queue[AuditRow | None] = queue.Queue(_MAX_WAITING)
        self._ended: Lru[str, EndedRequest] = Lru(
            _MAX_ENDED, _MAX_ENDED, lambda name, ended: 1
        )
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        if store is not None:
            self._thread.start()

    def ended(self, ended: EndedRequest) -> None:
        """A chat has ended; its call will."""
        if self.store is not None:
            self._ended.put(ended.request_id, ended)

    def covers(self, method: str) -> bool:
        """Whether calls of a method are kept: all but those that only read."""
        return self.store is not None and method not in ("GET", "HEAD", "OPTIONS")

    def answered(self, call: AnsweredCall) -> None:
        """A call of a method that is kept has ended."""
        is_admin = call.path.startswith(_ADMIN) or call.endpoint == "/native/train"
        chat = self._ended.pop(call.request_id)
        self.note(_row(call, chat, is_admin=is_admin))

    def note(self, row: AuditRow) -> None:
        """Have a row written; it is lost if a thousand wait already."""
        try:
            self._waiting.put_nowait(row)
        except queue.Full:
            self._dropped(1)

    def close(self) -> None:
        """Write what waits, if the disk lets; repeatable."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            taken = [*self._taken()]
            is_over = None in taken
            rows = [row for row in taken if row is not None]
            if rows and self.store is not None:
                self._write(self.store, rows)

    def _write(self, store: AuditStore, rows: list[AuditRow]) -> None:
        try:
            store.write(rows)
            self._has_warned = False
        except OSError as error:
            self._dropped(len(rows))
            if not self._has_warned:
                logger.warning("audit rows are lost: %s", error)
            self._has_warned = True

    def _taken(self) -> Iterator[AuditRow | None]:
        """What waits, up to a batch; waits for the first."""
        yield self._waiting.get()
        with contextlib.suppress(queue.Empty):
            for _ in range(_MAX_BATCH - 1):
                yield self._waiting.get_nowait()


def _row(call: AnsweredCall, chat: EndedRequest | None, *, is_admin: bool) -> AuditRow:
    outcome = "success" if call.status < 400 else "error"
    if call.status == _LEFT and call.error is None:
        outcome = "client_gone"
    # Paths and names of fields are the client's words, but for those of what is there.
    is_named = call.path.startswith(_OF_MODELS) and call.status < 400
    row = AuditRow(
        at=time.time(),
        kind="admin" if is_admin else "request",
        request_id=call.request_id[:_MAX_CHARS],
        endpoint=call.path[:_MAX_CHARS] if is_named else call.endpoint,
        address=call.address,
        status=call.status,
        outcome=chat.outcome if chat else outcome,
        duration_ms=round(1000 * call.seconds),
        client=call.client and call.client[:_MAX_CHARS],
        key_id=call.sender,
        error_type=call.error.code if call.error else None,
        trace_id=_trace_id(call.trace),
    )
    return row if chat is None else _with_chat(row, chat)


def _with_chat(row: AuditRow, chat: EndedRequest) -> AuditRow:
    return replace(
        row,
        model=chat.model,
        client=chat.client and chat.client[:_MAX_CHARS],
        key_id=chat.conversation.tenant or row.key_id,
        ttft_ms=None if chat.ttft_s is None else round(1000 * chat.ttft_s),
        prompt_tokens=chat.work.prompt_tokens,
        cached_tokens=chat.work.reused_tokens,
        completion_tokens=chat.output_tokens,
        cause=chat.warmth.cause,
    )


def _trace_id(header: str) -> str | None:
    """The trace of a W3C `traceparent`."""
    found = _TRACE.fullmatch(header.strip().lower())
    return found[1] if found else None
