"""JSON of strangers, which may be nested deeper than anything here can print."""

import json
from typing import Any

# What prints a value again counts its own levels on top: orjson takes 254 in all,
# Python's encoder and chat templates some hundreds.
MOST_LEVELS = 100


def load_json(text: str, **options: Any) -> Any:
    """
    Parse JSON text; `options` are those of `json.loads`.

    Raises:
        ValueError: it is no JSON, or nested deeper than MOST_LEVELS.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deep") from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """ValueError for lists and objects that are nested deeper than MOST_LEVELS."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ValueError("nested too deep")
