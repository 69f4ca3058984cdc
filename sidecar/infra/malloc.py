"""
glibc's malloc, set up for large arrays that come and go.

On the CPU, MLX has no pool of buffers: each is malloc'ed and freed. Left to itself
glibc gives large ones back to the system and faults them in again, page by page: by
`python -m bench.overhead` 5 % of a prefill's time once KV is kept between requests.
"""

import ctypes
import gc
import logging
import platform
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# From malloc.h. The map threshold's largest legal value is 32 MB.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
IDLE_S = 20.0
_OPTIONS = {
    # With one, the interpreter and MLX's threads wait for each other (512 tokens are
    # prefilled 4 % later); with one a thread, each comes to hold the most it ever used.
    _M_ARENA_MAX: 4,
    _M_MMAP_THRESHOLD: 32 << 20,
    _M_TRIM_THRESHOLD: 1 << 30,
    _M_TOP_PAD: 64 << 20,
}


def keep_freed_pages() -> bool:
    """
    Keep up to 1 GiB of freed memory; call it before any other thread starts.

    Returns:
        Whether it took effect: False where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    refused = [name for name, value in _OPTIONS.items() if not mallopt(name, value)]
    if refused:
        logger.warning("mallopt refused options=%s", refused)
    return not refused


def give_back_freed_pages() -> None:
    """
    Return what nobody needs to the system; for a process that has nothing to do.

    Garbage in circles goes first: models that were unloaded leave tokenizers in some,
    and Python looks for those the more seldom, the more objects there are. Where there
    is no glibc that is all.
    """
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class IdleTrim:
    """
    Gives freed memory back once a server has had nothing to do for a while.

    Args:
        trim: gives it back. clock: seconds.
    """

    def __init__(
        self,
        trim: Callable[[], None] = give_back_freed_pages,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trim = trim
        self._clock = clock
        self._num_begun = 0
        self._busy_at: float | None = None  # None: nothing since the last time

    def look(self, num_begun: int, num_running: int) -> None:
        """Called now and then with requests begun so far and running; cheap."""
        if num_running or num_begun != self._num_begun:
            self._num_begun = num_begun
            self._busy_at = self._clock()
        elif self._busy_at is not None and self._clock() - self._busy_at > IDLE_S:
            self._busy_at = None
            self._trim()
