"""
What went wrong on Google's route, as the error that it is.

LiteLLM asks a chat there, and makes one ValueError of each of its errors: a refusal
then is a failure like any other, which goes to a fallback, and is answered with 500.
"""

import functools
import importlib
import logging
from typing import Any

_MODULE = "litellm.google_genai.adapters.handler"
_CLASS, _METHOD = "GenerateContentToCompletionHandler", "async_generate_content_handler"

logger = logging.getLogger(__name__)


def install() -> None:
    """Have LiteLLM raise the chat's own error. Doing it twice does no harm."""
    try:
        handler = getattr(importlib.import_module(_MODULE), _CLASS)
        original = getattr(handler, _METHOD)
    except (ImportError, AttributeError):
        logger.warning("this LiteLLM answers 500 to all that fails on Google's route")
        return
    if getattr(original, "raises_as_is", False):
        return

    @functools.wraps(original)
    async def raising(*args: Any, **call: Any) -> Any:
        try:
            return await original(*args, **call)
        except ValueError as error:
            own = error.__context__
            if isinstance(own, Exception) and hasattr(own, "status_code"):
                raise own from None
            raise

    raising.raises_as_is = True  # type: ignore[attr-defined]
    setattr(handler, _METHOD, staticmethod(raising))
