"""Which JSON types the schema of a tool lets each of its arguments have."""

from collections.abc import Mapping
from typing import Any

Types = frozenset[str]
ANY_TYPE: Types = frozenset({"string", "number", "boolean", "null", "array", "object"})
TEXT_ALONE: Types = frozenset({"string"})
_MAX_LEVELS = 16
_UNIONS = ("anyOf", "oneOf")
_OF_STRINGS = ("pattern", "minLength", "maxLength", "format", "contentEncoding")


def declared_types(parameters: Any) -> Mapping[str, Types]:
    """The types of each property; all of them where its schema does not say."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return {}
    schemas = _Schemas(parameters)
    return {name: schemas.types_of(schema) for name, schema in properties.items()}


class _Schemas:
    """
    The schemas within one; each is looked at once.

    Args:
        root: in which references are looked up.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, Types] = {}

    def types_of(self, schema: Any, level: int = 0) -> Types:
        """The types that a schema lets in."""
        if not isinstance(schema, dict) or level > _MAX_LEVELS:
            return ANY_TYPE
        if id(schema) not in self._known:
            self._known[id(schema)] = ANY_TYPE  # for one that refers to itself
            self._known[id(schema)] = self._look_at(schema, level + 1)
        return self._known[id(schema)]

    def _look_at(self, schema: Mapping[str, Any], level: int) -> Types:
        found = _named(schema)
        if isinstance(reference := schema.get("$ref"), str):
            found &= self.types_of(_referred(reference, self._root), level)
        for key in _UNIONS:
            if isinstance(each := schema.get(key), list) and each:
                inner = [self.types_of(one, level) for one in each]
                found &= frozenset[str]().union(*inner)
        all_of = schema.get("allOf")
        for one in all_of if isinstance(all_of, list) else ():
            found &= self.types_of(one, level)
        if found == ANY_TYPE and any(key in schema for key in _OF_STRINGS):
            return TEXT_ALONE
        return found


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if value is None:
        return "null"
    return "array" if isinstance(value, list) else "object"


def _named(schema: Mapping[str, Any]) -> Types:
    """By the words that name types, or values."""
    found = ANY_TYPE
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    known = {_simple(name) for name in names if isinstance(name, str)} & ANY_TYPE
    if known:
        found &= known
    listed = schema.get("enum")
    if isinstance(listed, list) and listed:
        found &= {type_of(value) for value in listed}
    if "const" in schema:
        found &= {type_of(schema["const"])}
    return found


def _simple(name: str) -> str:
    lower = name.lower()  # Google's are in capitals
    return "number" if lower == "integer" else lower


def _referred(reference: str, root: Any) -> Any:
    """What a reference within the same schema points to; None: nothing is there."""
    path, found = reference.split("/"), root
    if path[0] != "#":
        return None
    for name in path[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found
