"""
Stored KV that was not used for its time to live is let go, on an idle server too.

KV goes when its time is up on a server that nobody asks anything, too. That wait is a
thread's of its own: the GPU thread waits without a limit (engine/gpu_thread), and is
woken only when there is something to let go.
"""

import logging
import threading
from collections.abc import Callable

from sidecar.engine.gpu_thread import GpuThread
from sidecar.kv.eviction import KVBudget

logger = logging.getLogger(__name__)

_MIN_WAIT_S = 1.0  # what expires shortly after each other goes together
_MAX_WAIT_S = 120.0


class Expiry:
    """
    Watches all stored KV until it is closed.

    Args:
        wait: waits so many seconds, or until it is closed: then true. For tests.
    """

    def __init__(
        self,
        budget: KVBudget,
        gpu: GpuThread,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._budget = budget
        self._gpu = gpu
        self._is_closed = False
        self._called = threading.Event()
        self._wait = wait or self._wait_for_a_call
        threading.Thread(target=self._run, name="expiry", daemon=True).start()

    def _wait_s(self) -> float:
        """Not for long at a time: the limit may become another one meanwhile."""
        return min(max(_MIN_WAIT_S, self._budget.expires_in()), _MAX_WAIT_S)

    def close(self) -> None:
        """End the watch; repeatable."""
        self._is_closed = True
        self._called.set()

    def look_again(self) -> None:
        """Go by the limit as it is now, which is another one."""
        self._called.set()

    def _wait_for_a_call(self, seconds: float) -> bool:
        """At most so long; whether it is closed."""
        self._called.wait(seconds)
        self._called.clear()
        return self._is_closed

    def _run(self) -> None:
        while not self._wait(self._wait_s()):
            if self._budget.expires_in() == 0:
                try:
                    self._gpu.call(self._budget.expire)
                except Exception:
                    logger.exception("expired KV could not be let go")
