"""
One line in LiteLLM's log for a refusal, instead of sixty.

LiteLLM writes a traceback for each error of a provider's. Of one that says what a
client did wrong, or that the sidecar is busy, it tells of LiteLLM's own code only.
"""

import logging

_LOGGERS = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router")
_TOLD = (429, 501, 503)


class WithoutTraceback(logging.Filter):
    """Leaves the traceback of what the client is told out of a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let all through."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if error is not None and _is_told(error):
            record.exc_info = record.exc_text = None
        return True


def install() -> None:
    """Have LiteLLM's loggers leave them out. Doing it twice does no harm."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, WithoutTraceback) for one in logger.filters):
            logger.addFilter(WithoutTraceback())


def _is_told(error: BaseException) -> bool:
    status = getattr(error, "status_code", None)
    return isinstance(status, int) and (400 <= status < 500 or status in _TOLD)
