"""JSON objects of bodies and errors, whatever is really there."""

import json
from collections.abc import Mapping


def json_object(body: bytes) -> Mapping[str, object]:
    """A JSON object; an empty one for all that is none."""
    try:
        return as_object(json.loads(body))
    except ValueError:
        return {}


def as_object(value: object) -> Mapping[str, object]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
