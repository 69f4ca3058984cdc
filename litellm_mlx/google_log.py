"""
Whole answers on Google's route, as LiteLLM's success log takes them.

It reads them from the response of Google's own server. Where it made a chat of the
request there is none: it fails with a ValueError, and no success callback runs.
"""

import functools
import importlib
import logging
from typing import Any

_MODULE, _CLASS = "litellm.litellm_core_utils.litellm_logging", "Logging"
_METHOD = "_handle_non_streaming_google_genai_generate_content_response_logging"
_FROM_ANSWER = "_generate_content_result_as_model_response"

logger = logging.getLogger(__name__)


def install() -> None:
    """Have it read the answer itself. Doing it twice does no harm."""
    try:
        logging_class = getattr(importlib.import_module(_MODULE), _CLASS)
        original = getattr(logging_class, _METHOD)
        getattr(logging_class, _FROM_ANSWER)
    except (ImportError, AttributeError):
        logger.warning("this LiteLLM logs answers on Google's route in its own way")
        return
    if getattr(original, "reads_the_answer", False):
        return

    @functools.wraps(original)
    def reading(self: Any, result: Any) -> Any:
        if self.model_call_details.get("httpx_response") is None:
            made = getattr(self, _FROM_ANSWER)(result)
            if made is not None:
                return made
        return original(self, result)

    reading.reads_the_answer = True  # type: ignore[attr-defined]
    setattr(logging_class, _METHOD, reading)
