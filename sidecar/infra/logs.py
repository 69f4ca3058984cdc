"""Logging set-up: one line per event, the request id in each."""

import logging
import sys
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="-")

_FORMAT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"


class _RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


def setup_logging(level: str) -> None:
    """Send the `sidecar` loggers to stderr at `level` (DEBUG, INFO, WARNING, ERROR)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
    handler.addFilter(_RequestIdFilter())
    logger = logging.getLogger("sidecar")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
