"""Which JSON types the schema of a tool lets each of its arguments have."""

from collections.abc import Mapping
from typing import Any

from sidecar.output.calls.tool_schema import ToolSchema, referred, type_of

Types = frozenset[str]
ANY_TYPE: Types = frozenset(
    {"string", "number", "integer", "boolean", "null", "array", "object"}
)
SIMPLE_TYPES = tuple(sorted(ANY_TYPE))
TEXT_ALONE: Types = frozenset({"string"})
_MAX_LEVELS = 16
_UNIONS = ("anyOf", "oneOf")
_OF_STRINGS = ("pattern", "minLength", "maxLength", "format", "contentEncoding")


def declared_types(parameters: Any) -> Mapping[str, Types]:
    """The types of each property; all of them where its schema does not say."""
    if not isinstance(parameters, Mapping):
        return {}
    schemas, arguments = _Schemas(parameters), ToolSchema(parameters).arguments
    return {one.name: schemas.types_of(one.schema) for one in arguments}


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
            found &= self.types_of(referred(reference, self._root), level)
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


def _named(schema: Mapping[str, Any]) -> Types:
    """By the words that name types, or values."""
    found = ANY_TYPE
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    kinds = (_kinds(name) for name in names if isinstance(name, str))
    known = frozenset[str]().union(*kinds) & ANY_TYPE
    if known:
        found &= known
    listed = schema.get("enum")
    if isinstance(listed, list) and listed:
        found &= {type_of(value) for value in listed}
    if "const" in schema:
        found &= {type_of(schema["const"])}
    return found


def _kinds(name: str) -> Types:
    """The types of a word; Google's are in capitals. A number may be an integer."""
    lower = name.lower()
    return frozenset({lower, "integer"} if lower == "number" else {lower})
