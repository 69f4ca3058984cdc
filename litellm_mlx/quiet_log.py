"""
One line in LiteLLM's log for a refusal, instead of sixty.

LiteLLM writes a traceback for each error of a provider's. Of one that says what a
client did wrong, that the sidecar is busy, or that no local model serves a route, it
tells of LiteLLM's own code only.
"""

import logging

from litellm_mlx.lost_refusals import is_unserved

_LOGGERS = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router")
_EXPLAINED = (429, 501, 503)
_TRACEBACK = "\nTraceback (most recent call last)"


class WithoutTraceback(logging.Filter):
    """Leaves the traceback of what the client is answered out of a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let all through."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if error is not None and _is_explained(error):
            record.exc_info = record.exc_text = None
        text = record.getMessage()
        if _TRACEBACK in text and is_unserved(text.encode(errors="replace")):
            record.msg, record.args = text.partition(_TRACEBACK)[0], ()
        return True


def install() -> None:
    """Have LiteLLM's loggers leave them out. Doing it twice does no harm."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, WithoutTraceback) for one in logger.filters):
            logger.addFilter(WithoutTraceback())


def _is_explained(error: BaseException) -> bool:
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and (400 <= status < 500 or status in _EXPLAINED):
        return True
    return is_unserved(str(error).encode(errors="replace"))
