"""
Checks an answer against a JSON Schema: reads a question from stdin, writes its answer.

    python limited_child.py json_check.py < QUESTION

A question is a JSON object of `schema` and `text`, what a model wrote; a text of null
asks whether the schema is one. Its answer has `text`, the JSON of that text and nothing
else, `fault`, what is wrong ("": nothing), `keyword`, which word of the schema says so,
and `path`, where, from `$`, the whole.

A client chooses the schema, and a pattern of twenty characters can be matched for
hours; nothing ends that within a process. So this is run as a file, in one of its own
(infra/limited_child.py), and imports the library alone.
"""

import contextlib
import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

_MAX_SAID = 500  # characters of what is wrong
_MAX_COERCED = 256  # values of one answer
_FENCE = re.compile(r"```[\w-]*[ \t]*\n(.*?)```", re.DOTALL)
_CITED = re.compile(r"\[[\w .-]*\]")
_CITED_WORDS = re.compile(r"\[(?!true\b|false\b|null\b)[A-Za-z][\w .-]*\]")
_KEY = re.compile(r'"\s*:\s*$')
_BEGIN = re.compile(r"[\[{]")
_INSIDE = re.compile(r'[\[\]{}]|"(?:[^"\\]|\\.)*"', re.DOTALL)
_DATA = ("const", "default", "enum", "examples")  # no schemas, whatever is in them
_OF_VALUES = ("type", "anyOf", "oneOf", "enum", "const")
Found = dict[str, str]


def found(schema: Any, text: str | None) -> Found:
    """What is said of an answer, or of the schema itself."""
    whole = DRAFT202012.create_resource(schema)
    registry: Registry[Any] = Registry().with_resource("", whole)
    if text is None:
        return _of_schema(schema, registry)
    holder: list[Any] = []  # of the value, so that it can be put in place of another
    written = _read(text, holder)
    if not holder:
        return _fault("there is no JSON in it")
    formats = Draft202012Validator.FORMAT_CHECKER
    validator = Draft202012Validator(schema, registry=registry, format_checker=formats)
    is_changed = _coerce(holder, validator)
    if (error := best_match(validator.iter_errors(holder[0]))) is not None:
        return _fault(error.message, error)
    return {"text": _printed(holder[0]) if is_changed else written}


def _printed(value: Any) -> str:
    """As JSON, with letters as they are where a text can hold them."""
    plain = json.dumps(value, ensure_ascii=False)
    is_text = plain.encode("utf-8", "replace").decode() == plain
    return plain if is_text else json.dumps(value)


def _fault(said: str, error: ValidationError | SchemaError | None = None) -> Found:
    found = {"fault": said}
    if error is not None:
        found |= {"keyword": str(error.validator), "path": error.json_path}
    return {name: _shown(text) for name, text in found.items()}


def _shown(text: str) -> str:
    return text[:_MAX_SAID].encode("utf-8", "replace").decode()


def _of_schema(schema: Any, registry: "Registry[Any]") -> Found:
    """What is wrong with a schema; a reference to elsewhere is fetched from nowhere."""
    try:
        Draft202012Validator.check_schema(schema)
        for reference in _references(schema):
            registry.resolver().lookup(reference)
    except SchemaError as error:
        return _fault(error.message, error)
    except Unresolvable as error:
        return _fault(f"$ref leads nowhere: {error.ref}")
    return {}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for key, part in schema.items():
            yield from _references(part if key not in _DATA else None)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _read(text: str, holder: list[Any]) -> str:
    """
    Read the one JSON of a text; where it stands, letter for letter.

    It may stand in a fence, or in brackets, with words around it. Where there is more
    with brackets around it, it may be a part of something broken: then there is none.
    """
    for start, end in ((0, len(text)), *_fenced(text), *_bracketed(text)):
        part = text[start:end]
        with contextlib.suppress(ValueError):
            value = _loads(part)
            if _are_words(
                text[:start], text[end:], beside_list=isinstance(value, list)
            ):
                holder.append(value)
                return part if part == text else part.strip()
    return ""


def _are_words(before: str, behind: str, *, beside_list: bool) -> bool:
    """
    Whether nothing around a JSON belongs to one; words in brackets are words.

    Args:
        beside_list: a list within it is another answer, not a number of a note.
    """
    cited = _CITED_WORDS if beside_list else _CITED
    around = cited.sub("", f"{before} {behind}")
    goes_on = behind.lstrip().startswith(('"', ",", ":")) or _KEY.search(before)
    return not goes_on and not any(sign in around for sign in "[]{}")


def _fenced(text: str) -> Iterator[tuple[int, int]]:
    """Where what stands in fences begins and ends."""
    return (found.span(1) for found in _FENCE.finditer(text))


def _bracketed(text: str) -> Iterator[tuple[int, int]]:
    """What stands in brackets that are within no others; not what is never closed."""
    begin = _BEGIN.search(text)
    while begin is not None:
        end = _end_of(text, begin.start())
        if end is None:
            return
        yield begin.start(), end
        begin = _BEGIN.search(text, end)


def _end_of(text: str, start: int) -> int | None:
    """Where the bracket that stands there is closed; brackets in strings are text."""
    depth = 0
    for found in _INSIDE.finditer(text, start):
        depth += (found[0] in ("[", "{")) - (found[0] in ("]", "}"))
        if depth == 0:
            return found.end()
    return None


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(written: str) -> float:
    number = float(written)
    if math.isinf(number):
        raise ValueError("a number is too large")
    return number


def _coerce(holder: list[Any], validator: Draft202012Validator) -> bool:
    """Have texts that spell what is asked for (`"5"`, `"true"`) be it; whether any."""
    for count in range(_MAX_COERCED):
        errors = validator.iter_errors(holder[0])
        if not any(_replace(holder, error, validator) for error in errors):
            return count > 0
    return True


def _replace(
    holder: list[Any], error: ValidationError, validator: Draft202012Validator
) -> bool:
    if error.validator not in _OF_VALUES or not isinstance(error.instance, str):
        return False
    try:
        meant = _loads(error.instance)
    except ValueError:
        return False
    if not validator.evolve(schema=error.schema).is_valid(meant):
        return False
    steps: list[Any] = [0, *error.absolute_path]
    at: Any = holder
    for step in steps[:-1]:
        at = at[step]
    if at[steps[-1]] is not error.instance:  # it is of a member's name
        return False
    at[steps[-1]] = meant
    return True


if __name__ == "__main__":
    json.dump(found(**json.load(sys.stdin)), sys.stdout)
