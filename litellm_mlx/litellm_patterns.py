"""
Makes LiteLLM's own searches linear in what a client wrote.

It looks through errors and logs for secrets, through messages for pictures, and through
schemas for patterns, on the thread that serves everybody. Its expression for secrets is
cubic in the beginnings of private keys: 81 kB of them held the port for minutes. That
for pictures reads 255 characters behind each `data:`. And to see whether a pattern is
one it compiles it, which takes milliseconds for each class of characters.
"""

import importlib
import re
from typing import Any

from litellm.litellm_core_utils import logging_utils, secret_redaction
from litellm.litellm_core_utils.prompt_templates import common_utils

_SECRETS = "_SECRET_RE"
_PICTURES = "_DATA_URI_RE"
_IS_NO_PATTERN = "_is_not_python_regex"
_HEAD, _TAIL = 4096, 2048  # characters: 50 ms in the worst case that was found
_KEY_BEGINS = re.compile("-----BEGIN", re.IGNORECASE)
_PRIVATE_KEY = re.compile("PRIVATE KEY", re.IGNORECASE)
# As LiteLLM's; a media type has no colon, so that `data:` ends one.
_DATA_URI = re.compile(r"data:([^;,:\s]{1,255});base64,([A-Za-z0-9+/=]+)")
_MAX_PATTERN = 8192


class BoundedSearch:
    """LiteLLM's pattern for secrets, for short texts without private keys only."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pattern, name)

    def sub(self, replacement: str, text: str) -> str:
        """
        The text without secrets.

        The middle of a long one is left out, and all behind the beginning of a key.
        """
        if len(text) > _HEAD + _TAIL:
            left_out = len(text) - _HEAD - _TAIL
            kept = text[:_HEAD], text[-_TAIL:]
            head, tail = (self.sub(replacement, part) for part in kept)
            return f"{head}.. ({left_out} characters) ..{tail}"
        key = _KEY_BEGINS.search(text)
        if key is not None and _PRIVATE_KEY.search(text):
            text = text[: key.start()]
            return f"{self._pattern.sub(replacement, text)}{replacement}"
        return str(self._pattern.sub(replacement, text))


def is_no_pattern(pattern: str) -> bool:
    """Whether Python would refuse a pattern, or it is too long to tell."""
    if len(pattern) > _MAX_PATTERN:
        return True
    try:
        importlib.import_module("re._parser").parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return True
    return False


def install() -> None:
    """Have LiteLLM search so. Doing it twice does no harm."""
    secrets = getattr(secret_redaction, _SECRETS, None)
    if secrets is not None and not isinstance(secrets, BoundedSearch):
        setattr(secret_redaction, _SECRETS, BoundedSearch(secrets))
    if hasattr(logging_utils, _PICTURES):
        setattr(logging_utils, _PICTURES, _DATA_URI)
    if hasattr(common_utils, _IS_NO_PATTERN):
        setattr(common_utils, _IS_NO_PATTERN, is_no_pattern)
