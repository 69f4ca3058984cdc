"""
How often a client may ask, and how much it may have computed, within a minute.

Each client has two token buckets (Turner, New directions in communications, 1986): one
holds requests, one tokens, and both fill again at the rate of their limit. A request is
taken while the first holds one and the second is not empty. What an answer has cost is
known at its end, so its tokens are taken then, and the second bucket may go below zero.
Tokens that were reused cost nothing and do not count.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sidecar.config.settings import ServerConfig
from sidecar.core.errors import RateLimitExceeded
from sidecar.infra.lru import Lru

_MINUTE_S = 60.0
_MAX_CLIENTS = 4096


@dataclass(slots=True)
class _Bucket:
    """What is left of a limit, at a time in seconds."""

    level: float
    at: float

    def fill(self, limit: int, now: float) -> None:
        """Add what came since; a minute's worth is the most."""
        level = self.level + (now - self.at) * limit / _MINUTE_S
        self.level, self.at = min(level, float(limit)), now


class RateLimits:
    """
    The limits of each client. Any thread.

    A client that is not heard of while 4,096 others are begins anew.

    Args:
        clock: seconds. For tests.
    """

    def __init__(
        self, config: ServerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.use(config)

    def use(self, config: ServerConfig) -> None:
        """Go by other limits; each client begins with a full minute."""
        with self._lock:
            self._per_minute = {
                "RATE_LIMIT_RPM": config.requests_per_minute,
                "RATE_LIMIT_TPM": config.tokens_per_minute,
            }
            self._buckets: Lru[tuple[str, str], _Bucket] = Lru(
                2 * _MAX_CLIENTS, 2 * _MAX_CLIENTS, lambda key, bucket: 1
            )
            # A plain field: without limits nothing here is called.
            self.is_on = any(self._per_minute.values())

    def begin(self, client: str) -> None:
        """
        Count a request; "" is nobody, who has no limits.

        Raises:
            RateLimitExceeded: it comes too early. It is not counted.
        """
        with self._lock:
            if not client:
                return
            tokens = self._bucket("RATE_LIMIT_TPM", client)
            requests = self._bucket("RATE_LIMIT_RPM", client)
            refusals = []
            if tokens and tokens.level <= 0:
                missing = -tokens.level
                refusals.append(self._too_early("RATE_LIMIT_TPM", "tokens", missing))
            if requests and requests.level < 1:
                missing = 1 - requests.level
                refusals.append(self._too_early("RATE_LIMIT_RPM", "requests", missing))
            if refusals:  # who waits for one would only meet the other
                raise max(refusals, key=lambda error: error.retry_after_s or 0)
            if requests:
                requests.level -= 1

    def computed(self, client: str, num_tokens: int) -> None:
        """Count tokens of a prompt or an answer that were computed for a client."""
        with self._lock:
            if client and (bucket := self._bucket("RATE_LIMIT_TPM", client)):
                bucket.level -= num_tokens

    def _bucket(self, name: str, client: str) -> _Bucket | None:
        """As full as it is by now; None: there is no such limit."""
        limit, now = self._per_minute[name], self._clock()
        if not limit:
            return None
        bucket = self._buckets.get((name, client))
        if bucket is None:
            bucket = _Bucket(float(limit), now)
            self._buckets.put((name, client), bucket)
        bucket.fill(limit, now)
        return bucket

    def _too_early(self, name: str, what: str, missing: float) -> RateLimitExceeded:
        limit = self._per_minute[name]
        seconds = max(math.ceil(missing * _MINUTE_S / limit), 1)
        # The plugin reads the first words and the last where there is no code or no
        # header (Messages, completions).
        message = (
            f"rate limit: at most {limit} {what} a minute ({name}); "
            f"again in {seconds} s"
        )
        return RateLimitExceeded(message, retry_after_s=seconds)
