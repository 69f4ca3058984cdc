"""What the disk cache needs of the rest: settings, turns, tombstones, the machine."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from sidecar.core.prompt import ModelIds
from sidecar.kv.disk.disk_thread import DiskThread

WRITING = (
    "disk_bytes_written",
    "disk_skipped_subagent",
    "disk_skipped_single",
    "disk_skipped_budget",
    "disk_skipped_space",
)
READING = (
    "disk_bytes_read",
    "disk_tokens_restored",
    "disk_restored",
    "disk_damaged",
)
Turn = Callable[[Callable[[], Any]], Any]  # runs on the GPU thread, in a turn there


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """
    When KV is written, and when it is read back.

    Args:
        min_tokens: the shortest prompt that is written, and the shortest gain.
        run_tokens: what a conversation writes although it goes on without a rest;
            shorter runs are joined as they add up to it.
        quiet_s: how long a conversation rests before it is written.
        restore: whether reading is weighed against computing.
    """

    min_tokens: int
    run_tokens: int
    quiet_s: float
    restore: Literal["auto", "always", "never"]

    @property
    def min_gain(self) -> int:
        """Tokens that a write or a restore must be worth."""
        return min(256, self.min_tokens)


@dataclass(frozen=True, slots=True)
class Machine:
    """
    What the disk needs of the rest of the process.

    Args:
        turn: runs on the GPU thread, in a turn between others.
        make_room: for so many bytes, on the GPU thread; whether there is.
        token_s: seconds to compute a token.
        is_idle: whether no request of any model waits or runs.
    """

    thread: DiskThread
    turn: Turn
    make_room: Callable[[int], bool]
    token_s: Callable[[], float]
    is_idle: Callable[[], bool]


class Explained(Protocol):
    """Knows what was said behind stored KV (memory/conversation_memory). Any thread."""

    def save(
        self, ids: ModelIds, salt: str
    ) -> tuple[list[Mapping[str, Any]], np.ndarray]:
        """
        What is to be kept with a path, and was not yet.

        Returns:
            Turns as JSON, oldest first; canonical ids of the last one's prompt.
        """

    def saved(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """These were written; they need not be saved again."""

    def load(self, kept: Sequence[Mapping[str, Any]], canonical: np.ndarray) -> None:
        """Know again what was saved with a path."""


class Marks(Protocol):
    """Says which saved turns are not to be known again (memory/tombstones)."""

    def unlogged(self) -> list[str]:
        """Lines that are to be added to the file of them."""

    def logged(self, lines: Sequence[str]) -> None:
        """These were added."""

    def lines(self) -> list[str]:
        """All that is known, for a file that is written anew."""

    def write_again(self) -> None:
        """Have all that is known written: the file of it is gone, or another one."""

    def clear(self) -> None:
        """Forget all: there is nothing left that they hide."""

    def learn(self, lines: Sequence[str]) -> None:
        """Know what a file says; what is no line of one is passed over."""


class MemoryPort(Explained, Protocol):
    """What explains KV, and what hides turns that were saved before."""

    @property
    def tombstones(self) -> Marks:
        """These marks."""


def salt_name(salt: str) -> str:
    """A name for a cache salt that does not tell it."""
    if not salt:
        return ""
    text = f"litellm-mlx salt {salt}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
