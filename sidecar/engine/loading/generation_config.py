"""A model's own sampling defaults: what of its generation_config.json is sound."""

import json
import logging
import math
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# Least and largest value of what is read from the file; what a request may ask as well.
_RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 1 << 24),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}


def read_generation_config(folder: Path) -> dict[str, Any] | None:
    """
    What a model says of its own sampling; None if it ships no such file.

    A value that no request could ask for either is left out, and a file that is no JSON
    object counts as empty: each is warned of, and the model is served without it.
    """
    file = folder / "generation_config.json"
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("generation_config.json of %s is not read: %s", folder, error)
        return {}
    if not isinstance(found, dict):
        logger.warning("generation_config.json of %s is no object: not read", folder)
        return {}
    return {key: value for key, value in found.items() if _is_sound(key, value, folder)}


def _is_sound(key: str, value: Any, folder: Path) -> bool:
    if key not in _RANGES or value is None:
        return True
    least, largest = _RANGES[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and least <= value <= largest:
        return True
    text = "%s of generation_config.json of %s is no number from %s to %s: not used"
    logger.warning(text, key, folder, least, largest)
    return False
