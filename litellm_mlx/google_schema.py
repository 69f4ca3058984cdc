"""
The form that an answer on Google's routes is asked to have, as a chat asks for it.

Google's schemas are OpenAPI's: types in capitals, `nullable`, an order of properties.
LiteLLM passes on objects only, and drops what JSON Schema says in another way.
"""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, object]

JSON, TEXT, CHOICE = "application/json", "text/plain", "text/x.enum"
MEDIA_TYPES = (JSON, TEXT, CHOICE)
MAX_LEVELS = 100  # as the sidecar's
_OURS = ("nullable", "propertyOrdering", "property_ordering")
_OF_NAMES = ("properties", "$defs", "defs", "patternProperties")
_LISTS = ("anyOf", "any_of", "oneOf", "allOf", "prefixItems", "prefix_items")
_SPELLINGS = {"any_of": "anyOf", "prefix_items": "prefixItems", "min_items": "minItems",
              "max_items": "maxItems", "min_length": "minLength",
              "max_length": "maxLength"}  # fmt: skip


def asked_form(media_type: object, schema: object, json_schema: object) -> Json:
    """
    The fields of a chat that ask for it; none where LiteLLM makes them, of objects.

    Args:
        media_type, schema, json_schema: `responseMimeType`, `responseSchema` and
            `responseJsonSchema` of a request.
    """
    asked: Any = json_schema if isinstance(json_schema, dict) else None
    if asked is None and isinstance(schema, dict):
        asked = as_json_schema(schema)
    if media_type == CHOICE and asked is not None:
        return {"guided_choice": asked.get("enum")}
    if media_type not in (None, JSON):
        return {}
    if asked is not None and asked.get("type") == "object":
        return {}
    if asked is not None:
        form = {"name": "response", "schema": asked}
        return {"response_format": {"type": "json_schema", "json_schema": form}}
    return {"response_format": {"type": "json_object"}} if media_type else {}


def as_json_schema(schema: Any) -> Any:
    """One of OpenAPI's schemas as JSON Schema has it."""
    if not isinstance(schema, dict):
        return schema
    read: dict[str, Any] = {}
    for given, value in schema.items():
        name = _SPELLINGS.get(str(given), str(given))
        if name in _OF_NAMES and isinstance(value, dict):
            read[name] = {key: as_json_schema(one) for key, one in value.items()}
        elif name in _LISTS and isinstance(value, list):
            read[name] = [as_json_schema(one) for one in value]
        elif name == "type" and isinstance(value, str):
            read[name] = value.lower()
        elif name not in _OURS:
            read[name] = as_json_schema(value) if name != "enum" else value
    _order(read, schema.get("propertyOrdering", schema.get("property_ordering")))
    return _or_null(read) if schema.get("nullable") is True else read


def _order(read: dict[str, Any], order: object) -> None:
    """Properties in the order in which they shall be written."""
    properties = read.get("properties")
    if isinstance(properties, dict) and isinstance(order, list):
        first = [name for name in order if isinstance(name, str) and name in properties]
        read["properties"] = {name: properties[name] for name in [*first, *properties]}


def _or_null(read: dict[str, Any]) -> dict[str, Any]:
    if isinstance(read.get("enum"), list):
        read["enum"] = [*read["enum"], None]
    if isinstance(read.get("anyOf"), list):
        read["anyOf"] = [*read["anyOf"], {"type": "null"}]
    if isinstance(read.get("type"), str):
        read["type"] = [read["type"], "null"]
    return read
