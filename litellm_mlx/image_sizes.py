"""
Has LiteLLM count an image's tokens without fetching it.

Its estimate downloads what a client's URL names, in one of the few threads in which
streams are opened as well: seven slow ones kept every stream from beginning.
"""

import struct
from typing import Any

from litellm.constants import DEFAULT_IMAGE_HEIGHT, DEFAULT_IMAGE_WIDTH
from litellm.litellm_core_utils import token_counter

_MEASURE = "get_image_dimensions"
_NO_IMAGE = (ValueError, TypeError, LookupError, ArithmeticError, struct.error)


def install() -> None:
    """Have LiteLLM measure so. Doing it twice does no harm."""
    original: Any = getattr(token_counter, _MEASURE, None)
    if original is None or getattr(original, "fetches_nothing", False):
        return

    def measure(data: str) -> tuple[int, int]:
        """Width and height in pixels: the usual ones of what is not sent along."""
        try:
            if data.startswith("data:"):
                width, height = original(data)
                return int(width), int(height)
        except _NO_IMAGE:  # the model's server refuses it, if it is asked
            pass
        return DEFAULT_IMAGE_WIDTH, DEFAULT_IMAGE_HEIGHT

    measure.fetches_nothing = True  # type: ignore[attr-defined]
    setattr(token_counter, _MEASURE, measure)
