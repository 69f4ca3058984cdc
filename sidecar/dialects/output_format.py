"""The fields that say what form an answer must have, in all wire formats."""

import json
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.core.requests import OutputFormat
from sidecar.dialects.fields import Fields

_MAX_SCHEMA_CHARS = 1 << 18
_MAX_CHOICES = 1024
_MAX_CHARS = {"regex": 4096, "grammar": 32_768}
_KINDS = "text, json_object or json_schema"
# Of vLLM's servers: beside the others, or within `structured_outputs`.
_GUIDED = {
    "json": "guided_json",
    "choice": "guided_choice",
    "regex": "guided_regex",
    "grammar": "guided_grammar",
}

FORM_FIELDS = frozenset(("response_format", "structured_outputs", *_GUIDED.values()))


def read_response_format(fields: Fields) -> OutputFormat | None:
    """
    Chat's `response_format`, or one of vLLM's fields.

    Raises:
        BadRequest: naming the field; two of them.
    """
    found = [*_guided(fields)]
    if (given := fields.object("response_format")) is not None:
        asked = Fields(given, "response_format")
        if _kind(asked) == "json_schema":
            inner = Fields(asked.object("json_schema") or {}, asked.path("json_schema"))
            found.append(_schema(inner, is_strict=False))
        elif asked.raw("type") == "json_object":
            found.append(OutputFormat("json_object", param="response_format"))
    if len(found) > 1:
        names = " and ".join(one.param for one in found)
        raise BadRequest(f"only one of {names} may be set", param=found[1].param)
    return found[0] if found else None


def read_text_format(
    fields: Fields, name: str, *, is_strict: bool
) -> OutputFormat | None:
    """
    `text.format` of Responses, `output_config.format` of Messages.

    Args:
        is_strict: what holds where it does not say.
    Raises:
        BadRequest: naming the field.
    """
    return read_form(Fields(fields.object(name) or {}, name), "format", is_strict)


def read_form(fields: Fields, name: str, is_strict: bool) -> OutputFormat | None:
    """
    A form whose kind and schema stand side by side.

    Raises:
        BadRequest: naming the field.
    """
    if (given := fields.object(name)) is None:
        return None
    path = fields.path(name)
    asked = Fields(given, path)
    if _kind(asked) == "json_schema":
        return _schema(asked, is_strict=is_strict)
    if asked.raw("type") == "json_object":
        return OutputFormat("json_object", param=path)
    return None


def _kind(asked: Fields) -> str:
    kind = asked.required_text("type")
    if kind not in ("text", "json_object", "json_schema"):
        path = asked.path("type")
        raise BadRequest(f"{path} must be {_KINDS}", param=path)
    return kind


def _schema(inner: Fields, *, is_strict: bool) -> OutputFormat:
    schema, path = inner.object("schema"), inner.path("schema")
    if schema is None:
        raise BadRequest(f"{path} must be a JSON schema", param=path)
    is_strict = inner.boolean("strict", is_strict)
    return OutputFormat("json_schema", _checked(schema, path), is_strict, path)


def _checked(schema: dict[str, Any], path: str) -> dict[str, Any]:
    Fields(schema, path).require_printable()
    if len(json.dumps(schema)) > _MAX_SCHEMA_CHARS:
        raise BadRequest(
            f"{path} must have at most {_MAX_SCHEMA_CHARS} characters", param=path
        )
    return schema


def _guided(fields: Fields) -> list[OutputFormat]:
    """What vLLM's fields ask for."""
    within = Fields(fields.object("structured_outputs") or {}, "structured_outputs")
    found = []
    for inner, outer in _GUIDED.items():
        for place, name in ((fields, outer), (within, inner)):
            if place.raw(name) is not None:
                found.append(_one_guided(place, name, inner))
    return found


def _one_guided(place: Fields, name: str, kind: str) -> OutputFormat:
    path = place.path(name)
    if kind == "json":
        value = place.raw(name)
        if isinstance(value, str):
            value = _parsed(value, path)
        schema = Fields({name: value}, place.where).object(name) or {}
        return OutputFormat("json_schema", _checked(schema, path), True, path)
    if kind == "regex":
        return OutputFormat("regex", _text(place, name, kind), True, path)
    if kind == "grammar":
        return OutputFormat("grammar", _text(place, name, kind), True, path)
    texts = place.items(name)
    is_fit = 0 < len(texts) <= _MAX_CHOICES and all(
        isinstance(text, str) and text for text in texts
    )
    if not is_fit:
        wanted = f"a list of 1 to {_MAX_CHOICES} non-empty strings"
        raise BadRequest(f"{path} must be {wanted}", param=path)
    return OutputFormat("choice", tuple(texts), True, path)


def _parsed(text: str, path: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequest(f"{path} must be a JSON schema", param=path) from None


def _text(place: Fields, name: str, kind: str) -> str:
    text, maximum = place.required_text(name), _MAX_CHARS[kind]
    if len(text) > maximum:
        path = place.path(name)
        raise BadRequest(f"{path} must have at most {maximum} characters", param=path)
    return text
