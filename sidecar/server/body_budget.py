"""Memory of the bodies that are being read and answered, bounded over all requests."""

import threading
from types import TracebackType
from typing import Self

from sidecar.core.errors import PayloadTooLarge, Unavailable
from sidecar.server.json_size import count_values

# The longest prompt of token ids has 2**18; long conversations a tenth of that.
MOST_VALUES = 1_000_000
_VALUE_BYTES = 128  # of a parsed value; a list in a list takes 64
# So much of each body is free: small ones are served while large ones fill the rest.
_FREE = 1 << 20
_LEAST = 512 << 20


class BodyBudget:
    """
    What all bodies may take together. Any thread.

    Args:
        limit_bytes: the largest body allowed; some of that size fit beside each other.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._most = max(4 * limit_bytes, _LEAST)
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes taken now."""
        with self._lock:
            return self._used

    def take(self, num_bytes: int) -> None:
        """
        Take bytes, or give them back.

        Raises:
            Unavailable: there are not so many.
        """
        with self._lock:
            if num_bytes > 0 and self._used + num_bytes > self._most:
                raise Unavailable("too many large bodies at once", retry_after_s=2)
            self._used += num_bytes


class BodyShare:
    """What one body takes, from its first byte to the end of its answer."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._budget.take(-max(0, self._size - _FREE))
        self._size = 0

    def grow(self, num_bytes: int) -> None:
        """
        Count more bytes of it.

        Raises:
            Unavailable: the bodies of others leave no room.
        """
        before = max(0, self._size - _FREE)
        self._budget.take(max(0, self._size + num_bytes - _FREE) - before)
        self._size += num_bytes

    def weigh(self, body: bytes) -> None:
        """
        Count what a whole body becomes when it is parsed.

        Raises:
            PayloadTooLarge: it holds too many values. Unavailable.
        """
        num_values = count_values(body, MOST_VALUES)
        if num_values > MOST_VALUES:
            raise PayloadTooLarge(f"a body must hold at most {MOST_VALUES} JSON values")
        self.grow(num_values * _VALUE_BYTES)
