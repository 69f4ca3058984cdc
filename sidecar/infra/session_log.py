"""
One log file per session, for looking at what the cache did.

Blocks of `[time] request_id=.. direction=prompt|sampler|generation`, JSON, blank line.
The files hold conversations (unless LOG_CONTENT is off): 0600 in 0700 folders.

A file that has grown large goes on under the same name; what it held becomes `.1`,
`.2` and so on. What is too old goes, and beyond the bytes allowed what was written to
longest ago.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

Direction = Literal["prompt", "sampler", "generation"]

_PATTERN = "*/cache-session-*.log*"
_SWEEP_EVERY_S = 3600.0
_KEPT_SHARE = 0.9  # after a sweep for bytes, so that not each request brings one
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class LogLimits:
    """
    How much of the past is kept.

    Args:
        max_bytes: of all files together. max_file_bytes: before a file is set aside.
        max_age_days: since a file was last written to; 0 keeps it for ever.
    """

    max_bytes: int
    max_age_days: float
    max_file_bytes: int = 64 << 20


class SessionLog:
    """
    Appends blocks. Any thread; a failure to write is a warning, once.

    Args:
        root: where the day folders go; None writes nothing.
        with_content: False leaves messages, prompts and outputs out.
    """

    def __init__(
        self,
        root: Path | None,
        limits: LogLimits,
        *,
        with_content: bool,
        now: Callable[[], float] = time.time,
        steady: Callable[[], float] | None = None,
    ) -> None:
        self._root = root
        self._limits = limits
        self.with_content = with_content
        self._now = now
        self._steady = steady or _steady_clock()
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._swept_at: float | None = None
        self._has_warned = False

    def write(
        self,
        session: str,
        request_id: str,
        direction: Direction,
        meta: Mapping[str, Any],
        content: Mapping[str, Any],
    ) -> None:
        """Append one block; `content` only if content may be kept."""
        if self._root is None:
            return
        body = {"request_meta": meta, **(content if self.with_content else {})}
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._now()))
        head = f"[{stamp}] request_id={request_id} direction={direction}"
        text = json.dumps(body, ensure_ascii=False, default=str)
        block = f"{head}\n{text}\n\n".encode(errors="replace")
        try:
            with self._lock:
                self._append(self._root, session, block)
        except OSError:
            if not self._has_warned:
                logger.warning("cannot write the session log", exc_info=True)
            self._has_warned = True

    def _append(self, root: Path, session: str, block: bytes) -> None:
        day = time.strftime("%Y-%m-%d", time.localtime(self._now()))
        folder = root / day
        if not root.exists():  # a folder of the user's own keeps its mode
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        name = hashlib.sha1(session.encode(), usedforsecurity=False).hexdigest()[:16]
        file = folder / f"cache-session-{name}.log"
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_size + len(block) > self._limits.max_file_bytes:
                _set_aside(file)
        handle = os.open(
            file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600
        )
        with os.fdopen(handle, "ab") as out:
            os.fchmod(handle, 0o600)  # an older one may have been made otherwise
            out.write(block)
        self._num_bytes += len(block)
        self._sweep_if_due(root, file)

    def _sweep_if_due(self, root: Path, current: Path) -> None:
        now = self._steady()
        is_time = self._swept_at is None or not (
            0 <= now - self._swept_at < _SWEEP_EVERY_S
        )
        if is_time or self._num_bytes > self._limits.max_bytes:
            self._swept_at = now
            left = self._sweep(root, current)
            # What cannot be removed must not bring a sweep with each request.
            self._num_bytes = min(left, int(self._limits.max_bytes * _KEPT_SHARE))

    def _sweep(self, root: Path, current: Path) -> int:
        """Remove what is too old or too much, never `current`; bytes that are left."""
        files = sorted(_files(root))
        left = sum(size for _, size, _ in files)
        enough = self._limits.max_bytes
        if left > enough:
            enough = int(enough * _KEPT_SHARE)
        max_age_s = self._limits.max_age_days * _DAY_S
        for written_at, size, file in files:
            is_old = bool(max_age_s) and self._steady() - written_at > max_age_s
            if file == current or not (is_old or left > enough):
                continue
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
                left -= size
                file.parent.rmdir()  # fails unless it was the last of its day
        return left


def _steady_clock() -> Callable[[], float]:
    """
    The time as it was at the start, and what has passed since.

    By a clock that jumps ahead, as after a machine slept, all files would be too old.
    """
    offset_s = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset_s


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    """When each session file was last written to, and its size."""
    for file in root.glob(_PATTERN):
        with contextlib.suppress(FileNotFoundError):
            found = file.stat()
            yield found.st_mtime, found.st_size, file


def _set_aside(file: Path) -> None:
    """Rename a file to the first of `.1`, `.2` and so on that is free."""
    number = 1
    while (aside := file.with_name(f"{file.name}.{number}")).exists():
        number += 1
    file.rename(aside)
