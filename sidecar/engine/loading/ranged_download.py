"""
Downloads one file of the hub by HTTP range, resumed until it is whole and right.

It grows as `blobs/ETAG.incomplete` in the hub's cache; whatever stopped it, the next
try goes on where the file ends. Processes take turns by a lock on it.
"""

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from sidecar.core.format_bytes import format_bytes
from sidecar.engine.loading.download_progress import DownloadProgress
from sidecar.engine.loading.hub_faults import HubFault, final_fault, reason

T = TypeVar("T")

_TURN_S = 0.1
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _Broken(Exception):
    """What arrived is not what was asked for; worth another try."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Pauses after failures in a row, and when to give up; a byte starts anew."""

    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    max_failures: int = 9  # two minutes of pauses

    def pause_s(self, num_failures: int) -> float:
        """Pause after that many failures in a row."""
        return min(self.first_pause_s * 2.0 ** (num_failures - 1), self.longest_pause_s)


@dataclass(frozen=True, slots=True)
class Retries:
    """
    How the parts of one download are repeated. Safe from any thread.

    Args:
        stopped: set once the download as a whole has failed.
    """

    policy: RetryPolicy
    progress: DownloadProgress
    stopped: threading.Event

    def until_done(self, action: Callable[[], T]) -> T:
        """
        Do it again while the line is at fault.

        Raises:
            HubFault: too many failures in a row without a byte, or a final one.
        """
        num_failures, seen = 0, self._num_done()
        while True:
            try:
                return action()
            except (httpx.HTTPError, LocalEntryNotFoundError, _Broken) as error:
                final = final_fault(error)
                num_failures = 1 if self._num_done() > seen else num_failures + 1
                if final or num_failures >= self.policy.max_failures:
                    raise HubFault(final or self._given_up(error)) from error
                seen = self._num_done()
                pause_s = self.policy.pause_s(num_failures)
                self.progress.say(
                    f"the download broke ({reason(error)}); going on in {pause_s:g} s"
                )
            if self.stopped.wait(pause_s):
                raise HubFault("the download was stopped")

    def _num_done(self) -> int:
        state = self.progress.state
        return state.done_bytes if state else 0

    def _given_up(self, error: Exception) -> str:
        state = self.progress.state
        where = ""
        if state:
            done, total = map(format_bytes, (state.done_bytes, state.total_bytes))
            where = f" at {done} of {total}"
        return (
            f"its download broke off{where} ({reason(error)}); start again to go on "
            "from there"
        )


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of the hub, and where the cache keeps its content."""

    url: str
    size: int
    etag: str
    blob: Path

    @property
    def partial(self) -> Path:
        """Where it grows."""
        return self.blob.with_name(f"{self.etag}.incomplete")

    @property
    def kept_bytes(self) -> int:
        """What is here already."""
        if self.blob.exists():
            return self.size
        return self.partial.stat().st_size if self.partial.exists() else 0


def fetch_file(file: HubFile, retries: Retries) -> None:
    """
    Bring a file into the cache.

    Raises:
        HubFault: it cannot be had; what arrived is kept.
    """
    descriptor = os.open(file.partial, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _wait_for_turn(descriptor, retries)
        if file.blob.exists():  # another process was first
            retries.progress.add(file.size - os.fstat(descriptor).st_size)
            return
        _fetch_right(file, descriptor, retries)
        os.fsync(descriptor)
        os.replace(file.partial, file.blob)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise HubFault(
            "the disk is full; make room and start again, what was downloaded is kept"
        ) from error
    finally:
        os.close(descriptor)


def _wait_for_turn(descriptor: int, retries: Retries) -> None:
    has_said = False
    while not retries.stopped.wait(_TURN_S if has_said else 0):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not has_said:
                retries.progress.say("another process downloads it: waiting for that")
            has_said = True
        except OSError:
            return  # a file system that cannot lock
    raise HubFault("the download was stopped")


def _fetch_right(file: HubFile, descriptor: int, retries: Retries) -> None:
    """What was begun may be damaged, and what arrives; but not both in a row."""
    for _ in range(2):
        retries.until_done(lambda: _fetch_rest(file, descriptor, retries))
        if _is_right(file):
            return
        retries.progress.say("a file was damaged: fetching it again from its beginning")
        retries.progress.add(-os.fstat(descriptor).st_size)
        os.ftruncate(descriptor, 0)
    raise HubFault("a file of it arrives damaged again and again; try another line")


def _fetch_rest(file: HubFile, descriptor: int, retries: Retries) -> None:
    have = os.fstat(descriptor).st_size
    if have < file.size:
        have = _stream(file, descriptor, retries)
    if have < file.size:
        raise _Broken(f"the connection ended at {format_bytes(have)} of a file")


def _stream(file: HubFile, descriptor: int, retries: Retries) -> int:
    """Append what the server sends; returns the file's length then."""
    have = os.lseek(descriptor, 0, os.SEEK_END)
    # Not compressed: a range counts the bytes of what is sent.
    wanted = {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    headers = build_hf_headers(headers=wanted)
    timeout = float(HF_HUB_DOWNLOAD_TIMEOUT)
    with get_session().stream(
        "GET", file.url, headers=headers, timeout=timeout
    ) as answer:
        hf_raise_for_status(answer)
        if have and not _begins_at(answer, have):
            retries.progress.add(-have)  # the server sends it from its beginning
            os.ftruncate(descriptor, 0)
            have = os.lseek(descriptor, 0, os.SEEK_SET)
        for chunk in answer.iter_raw():
            if retries.stopped.is_set():
                raise HubFault("the download was stopped")
            if have + len(chunk) > file.size:
                raise HubFault("the hub sends more of a file than it announced")
            _write(descriptor, chunk)
            have += len(chunk)
            retries.progress.add(len(chunk))
    return have


def _begins_at(answer: httpx.Response, have: int) -> bool:
    given = answer.headers.get("Content-Range", "")
    return answer.status_code == 206 and given.startswith(f"bytes {have}-")


def _write(descriptor: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _is_right(file: HubFile) -> bool:
    """Whether the content is what the etag says: a SHA-256, or git's SHA-1."""
    if file.partial.stat().st_size != file.size:
        return False
    with file.partial.open("rb") as stream:
        if len(file.etag) == 64:
            return hashlib.file_digest(stream, "sha256").hexdigest() == file.etag
        if len(file.etag) == 40:
            # git names a file by the digest of a small head and the content.
            digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
            while block := stream.read(1 << 20):
                digest.update(block)
            return digest.hexdigest() == file.etag
    return True
