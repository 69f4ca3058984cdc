"""The schema of a tool's arguments, taken apart for formats that are not JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

_MAX_LEVELS, _MAX_ALTERNATIVES = 16, 1024
_UNIONS = ("anyOf", "oneOf")
_ANYTHING: dict[str, Any] = {}
_DEFS = "$defs"
_OF_NAMES = ("properties", "patternProperties", "dependentSchemas")
_MAX_PARTS, _MAX_DIGITS = 64, 9
_MAX_COPIED, _STEP = 1 << 17, 16
_OF_VALUES = ("type", "enum", "const")
_COUNTED = ("properties", "enum", "type", "required", _DEFS, "definitions")

Json = dict[str, Any]
Types = frozenset[str]
Targets = dict[int, tuple[str, Any]]  # a name and what it refers to, by its id
ANY_TYPE: Types = frozenset(
    {"string", "number", "integer", "boolean", "null", "array", "object"}
)
SIMPLE_TYPES = tuple(sorted(ANY_TYPE))
TEXT_ALONE: Types = frozenset({"string"})
_OF_STRINGS = ("pattern", "minLength", "maxLength", "format", "contentEncoding")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a tool; `is_needed`: it must be there."""

    name: str
    schema: Any
    is_needed: bool


class ToolSchema:
    """
    The schema of one tool.

    Args:
        parameters: as its client sent it.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = dict(parameters)
        self._num_copied = 0  # members of schemas
        self._object = self._as_object()

    @property
    def whole(self) -> Json:
        """All of it as the schema of an object, whatever it says of its own type."""
        kind = self._root.get("type", "object")
        is_object = "object" in (kind if isinstance(kind, list) else [kind])
        return {**self._root, "type": "object"} if is_object else {"type": "object"}

    @property
    def arguments(self) -> list[Argument]:
        """In their order; those of all alternatives where it has some."""
        return members_of(self._object)

    @property
    def names_and_types(self) -> Json:
        """A schema of the same arguments that says no more than their types."""
        if not isinstance(self._object.get("properties"), dict):
            return {"type": "object"}
        types = {one.name: self.types_of(one.schema) for one in self.arguments}
        kept = {
            name: {} if found == ANY_TYPE else {"type": sorted(found)}
            for name, found in types.items()
        }
        return {"type": "object", "properties": kept}

    @property
    def takes_any(self) -> bool:
        """Whether there may be arguments that it does not name."""
        more = self._object.get("additionalProperties")
        is_open = more is True or isinstance(more, dict)
        return is_open or not isinstance(self._object.get("properties"), dict)

    @property
    def is_closed(self) -> bool:
        """Whether there may be none but those that it names."""
        return self._object.get("additionalProperties") is False

    def alternatives(self, schema: Any) -> list[Json]:
        """
        What a value may be, each of one type or of given values.

        References are followed, and unions; more than some are anything.
        """
        found: list[Json] = []
        self._collect(schema, found, 0)
        if not 0 < len(found) <= _MAX_ALTERNATIVES or not all(found):
            return [_ANYTHING]
        # Given values are looked at once, however often they are referred to.
        given = {
            (id(one["enum"]), str(one.get("type")))
            if _is_list(one, "enum")
            else id(one): one
            for one in found
        }
        return [*given.values()]

    def types_of(self, schema: Any) -> Types:
        """The types that a value may have; all of them where nothing says it."""
        return frozenset().union(*map(_types_of, self.alternatives(schema)))

    def text_choices(self, schema: Any) -> tuple[str, ...] | None:
        """The texts that a value may be; None: any."""
        found: list[str] = []
        for one in self.alternatives(schema):
            given = given_values(one)
            if given is None and one.get("type") in ("string", None):
                return None
            found += [value for value in given or () if isinstance(value, str)]
        return tuple(found)

    def standalone(self, schema: Mapping[str, Any]) -> Json:
        """
        A part of it with all that it refers to, as a schema of its own.

        Raises:
            ValueError: it is longer than any honest tool's.
        """
        targets: Targets = {}
        made = self._renamed(schema, targets)
        defs: Json = {}
        while len(defs) < len(targets):
            for name, target in [*targets.values()][len(defs) :]:
                defs[name] = self._renamed(target, targets)
        return {**made, _DEFS: defs} if defs else dict(made)

    def _renamed(self, value: Any, targets: Targets) -> Any:
        """A copy whose references are to names of its own, by what they refer to."""
        if isinstance(value, list):
            return [self._renamed(one, targets) for one in value]
        if not isinstance(value, Mapping):
            return value
        if not self._may_copy(value):
            raise ValueError("the schema of a tool is too long")
        made = {
            key: {name: self._renamed(inner, targets) for name, inner in one.items()}
            if key in _OF_NAMES and isinstance(one, Mapping)
            else self._renamed(one, targets)
            for key, one in value.items()
            if key not in (_DEFS, "definitions")
        }
        reference = value.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            target = referred(reference, self._root)
            known = targets.setdefault(id(target), (f"d{len(targets)}", target))
            made["$ref"] = f"#/{_DEFS}/{known[0]}"
        return made

    def _as_object(self) -> Json:
        each = [one for one in self.alternatives(self._root) if "properties" in one]
        if len(each) < 2:
            return each[0] if each else self._resolved(self._root)
        needed = [{a.name for a in members_of(one) if a.is_needed} for one in each]
        merged: Json = {}
        for one in each:
            properties = one["properties"]
            merged.update(properties if isinstance(properties, dict) else {})
        return {
            "type": "object",
            "properties": merged,
            "required": sorted(set.intersection(*needed)),
        }

    def _collect(self, schema: Any, found: list[Json], level: int) -> None:
        if len(found) > _MAX_ALTERNATIVES:
            return
        is_known = isinstance(schema, dict) and level <= _MAX_LEVELS
        if not is_known or not self._may_copy(schema):
            found.append(_ANYTHING)
            return
        resolved = self._resolved(schema)
        for key in _UNIONS:
            if _is_list(resolved, key):
                beside = {k: v for k, v in resolved.items() if k != key}
                for one in resolved[key]:
                    if not self._may_copy(beside):
                        found.append(_ANYTHING)
                        return
                    inner = self._resolved(one)
                    own = {k: inner[k] for k in _OF_VALUES if k in inner}
                    whole = {**_both(beside, inner), **own}
                    self._collect(whole, found, level + 1)
                return
        kind = resolved.get("type")
        if not isinstance(kind, list):
            found.append(resolved)
            return
        kinds = [one for one in SIMPLE_TYPES if one in kind]
        found += [{**resolved, "type": one} for one in kinds] or [_ANYTHING]

    def _may_copy(self, schema: Mapping[str, Any]) -> bool:
        """
        Count what a copy of it takes: a short schema could refer to it for ever.

        One without members takes a step, too.
        """
        self._num_copied += _STEP
        for part in (schema, *(schema.get(key) for key in _COUNTED)):
            self._num_copied += len(part) if isinstance(part, dict | list) else 0
        return self._num_copied < _MAX_COPIED

    def _resolved(self, schema: Any, level: int = 0) -> Json:
        """With what it refers to, and all parts of it, in one."""
        if not isinstance(schema, dict) or level > _MAX_LEVELS:
            return _ANYTHING
        parts = schema.get("allOf")
        parts = [*parts[:_MAX_PARTS]] if isinstance(parts, list) else []
        if isinstance(schema.get("$ref"), str):
            parts.append(referred(schema["$ref"], self._root))
        if not parts:
            return schema
        whole = {k: v for k, v in schema.items() if k not in ("$ref", "allOf")}
        for part in parts:
            one = self._resolved(part, level + 1)
            if not self._may_copy(one) or not self._may_copy(whole):
                return _ANYTHING
            whole = _both(whole, one)
        return whole


def given_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists, of its type; None: it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or not listed:
        return None
    kind = schema.get("type")
    return [one for one in listed if kind is None or _is_of(one, kind)] or listed


def declared_types(parameters: Any) -> Mapping[str, Types]:
    """The types of each argument of a tool; none if it declares no arguments."""
    if not isinstance(parameters, Mapping):
        return {}
    schema = ToolSchema(parameters)
    return {one.name: schema.types_of(one.schema) for one in schema.arguments}


def _types_of(schema: Mapping[str, Any]) -> Types:
    given, kind = given_values(schema), schema.get("type")
    if given is not None:
        return frozenset(map(type_of, given))
    lower = kind.lower() if isinstance(kind, str) else ""  # Google's are in capitals
    if lower in ANY_TYPE:
        return frozenset({lower, "integer"} if lower == "number" else {lower})
    is_text = any(key in schema for key in _OF_STRINGS)
    return TEXT_ALONE if is_text else ANY_TYPE


def _is_of(value: Any, kind: Any) -> bool:
    found = type_of(value)
    return found == kind or (found == "integer" and kind == "number")


def members_of(schema: Mapping[str, Any]) -> list[Argument]:
    """The members that the schema of an object names, or wants."""
    properties, required = schema.get("properties"), schema.get("required")
    listed = required if isinstance(required, list) else []
    needed = {name for name in listed if isinstance(name, str)}
    named = properties if isinstance(properties, dict) else {}
    found = [Argument(name, inner, name in needed) for name, inner in named.items()]
    return found + [Argument(n, _ANYTHING, True) for n in sorted(needed - named.keys())]


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> Json:
    """What is said by two schemas that hold both, as far as one can say it."""
    whole = {**other, **one}
    for key in ("properties", "$defs", "definitions"):
        if isinstance(one.get(key), dict) and isinstance(other.get(key), dict):
            merged = dict(one[key])
            for name, inner in other[key].items():
                is_new = name not in merged or merged[name] == inner
                merged[name] = inner if is_new else {"allOf": [merged[name], inner]}
            whole[key] = merged
    for key in ("required", "allOf"):
        if isinstance(one.get(key), list) and isinstance(other.get(key), list):
            whole[key] = [*one[key], *other[key]]
    return whole


def _is_list(schema: Mapping[str, Any], key: str) -> bool:
    return isinstance(schema.get(key), list) and bool(schema[key])


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if value is None:
        return "null"
    return "array" if isinstance(value, list) else "object"


def referred(reference: str, root: Any) -> Any:
    """What a reference within the same schema points to; None: nothing is there."""
    path, found = reference.split("/"), root
    if path[0] != "#":
        return None
    for name in path[1:]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            is_place = key.isascii() and key.isdigit() and len(key) < _MAX_DIGITS
            number = int(key) if is_place else len(found)
            found = found[number] if number < len(found) else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found
