"""
Says in the terminal that a request left for another model, and why.

The other one may cost money. A line of the log, as `-> cloud: local would need 34 s`.
"""

import logging
import re

logger = logging.getLogger(__name__)

_MAX_CHARS = 160
_SECONDS = re.compile(r"first token would take about ([\d.]+) s")
_CODE = re.compile(r"\(sidecar (?:answered \d+|broke off the answer), (\w+)")
_WORDS_OF_CODE = {
    "context_length_exceeded": "is too small for the prompt",
    "insufficient_memory": "has too little memory for the prompt",
    "memory_pressure": "is short of memory",
    "rate_limited": "is busy",
    "service_unavailable": "is not ready",
    "training": "is training an adapter",
    "model_load_failed": "could not load its model",
}


def tell(model: object, original: str, error: BaseException, *, failed: bool) -> None:
    """
    Log one line.

    Args:
        model: the fallback. original: what was asked for.
        error: why that could not answer. failed: neither could the fallback.
    """
    outcome = " failed too" if failed else ""
    line = f"-> {model}{outcome}: {original} {reason(error)}"
    logger.warning("%s", _printable(line))


def reason(error: BaseException) -> str:
    """What a model did or would do, in a few words."""
    text = str(error)
    if found := _SECONDS.search(text):
        return f"would need {float(found[1]):.0f} s"
    if found := _CODE.search(text):
        words = _WORDS_OF_CODE.get(found[1])
        if words:
            return words
    if "sidecar is not reachable" in text:
        return "is not reachable"
    if "sidecar fell silent" in text:
        return "fell silent"
    return f"failed: {(text.splitlines() or [type(error).__name__])[0][:_MAX_CHARS]}"


def _printable(line: str) -> str:
    """Names come from clients: they must not forge lines or move the cursor."""
    return "".join(char if char.isprintable() else "?" for char in line)
