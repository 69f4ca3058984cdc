"""Codes that open the admin page once: a key never stands in an address."""

import secrets
import threading
import time
from collections.abc import Callable

_GOOD_S = 60.0
_MAX_CODES = 32


class AdminCodes:
    """Each is good for a minute and for one exchange. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def issue(self, key: str) -> str:
        """A code that stands for a key."""
        code = secrets.token_urlsafe(24)
        with self._lock:
            self._drop_old()
            while len(self._keys) >= _MAX_CODES:
                self._keys.pop(next(iter(self._keys)))
            self._keys[code] = key, self._clock() + _GOOD_S
        return code

    def exchange(self, code: str) -> str | None:
        """The key; None: there is no such code, or not any more."""
        with self._lock:
            self._drop_old()
            key, _ = self._keys.pop(code, (None, 0.0))
        return key

    def _drop_old(self) -> None:
        now = self._clock()
        self._keys = {c: kept for c, kept in self._keys.items() if kept[1] > now}
