"""
Bounds LiteLLM's search for secrets in what it logs and answers.

It looks through each text for keys by one regular expression, on the thread that serves
everybody, and errors repeat what a client wrote: 81 kB of beginnings of private keys
held the port for minutes. The search is cubic in those, and linear with a factor of
thousands in others, so a long text is cut first.
"""

import re
from typing import Any

from litellm.litellm_core_utils import secret_redaction

_PATTERN = "_SECRET_RE"
_HEAD, _TAIL = 4096, 2048  # characters: 50 ms in the worst case that was found
_MAX_KEYS = 4
_PRIVATE_KEY = re.compile("PRIVATE KEY", re.IGNORECASE)


class BoundedSearch:
    """LiteLLM's pattern, for short texts only."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pattern, name)

    def sub(self, replacement: str, text: str) -> str:
        """The text without secrets; the middle of a long one is left out."""
        if len(text) > _HEAD + _TAIL:
            left_out = len(text) - _HEAD - _TAIL
            kept = text[:_HEAD], text[-_TAIL:]
            head, tail = (self.sub(replacement, part) for part in kept)
            return f"{head}.. ({left_out} characters) ..{tail}"
        if len(_PRIVATE_KEY.findall(text)) > _MAX_KEYS:
            return replacement
        return str(self._pattern.sub(replacement, text))


def install() -> None:
    """Have LiteLLM search so. Doing it twice does no harm."""
    pattern = getattr(secret_redaction, _PATTERN, None)
    if pattern is not None and not isinstance(pattern, BoundedSearch):
        setattr(secret_redaction, _PATTERN, BoundedSearch(pattern))
