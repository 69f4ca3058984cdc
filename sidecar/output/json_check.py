"""
Checks an answer against a JSON Schema: reads a question from stdin, writes its answer.

    python json_check.py < QUESTION

A question is a JSON object of `schema` and `text`, what a model wrote; a text of null
asks whether the schema is one. Its answer has `text`, the JSON of that text and nothing
else, `fault`, what is wrong ("": nothing), `keyword`, which word of the schema says so,
and `path`, where, from `$`, the whole.

A client chooses the schema, and a pattern of twenty characters can be matched for
hours; nothing ends that within a process. So this is run as a file, in one of its own
that has two seconds of processor time, and imports the library alone.
"""

import contextlib
import json
import re
import resource
import sys
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

CPU_S, MEMORY_BYTES = 2, 1 << 30
_MAX_SAID = 500  # characters of what is wrong
_MAX_COERCED = 256  # values of one answer
_BEGIN = re.compile(r"[\[{]")
Found = dict[str, str]


def found(schema: Any, text: str | None) -> Found:
    """What is said of an answer, or of the schema itself."""
    whole = DRAFT202012.create_resource(schema)
    registry: Registry[Any] = Registry().with_resource("", whole)
    if text is None:
        return _of_schema(schema, registry)
    holder: list[Any] = []  # of the value, so that it can be put in place of another
    is_all = _read(text, holder)
    if not holder:
        return _fault("there is no JSON in it")
    formats = Draft202012Validator.FORMAT_CHECKER
    validator = Draft202012Validator(schema, registry=registry, format_checker=formats)
    is_changed = _coerce(holder, validator)
    if (error := best_match(validator.iter_errors(holder[0]))) is not None:
        return _fault(error.message, error)
    is_same = is_all and not is_changed
    return {"text": text if is_same else json.dumps(holder[0], ensure_ascii=False)}


def _fault(said: str, error: ValidationError | SchemaError | None = None) -> Found:
    found = {"fault": said[:_MAX_SAID]}
    if error is not None:
        found |= {"keyword": str(error.validator), "path": error.json_path}
    return found


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
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _read(text: str, holder: list[Any]) -> bool:
    """Read the first JSON of a text; whether it is all of it."""
    with contextlib.suppress(ValueError):
        holder.append(json.loads(text, parse_constant=_refuse))
        return True
    decoder = json.JSONDecoder(parse_constant=_refuse)
    for begin in _BEGIN.finditer(text):
        with contextlib.suppress(ValueError):
            holder.append(decoder.raw_decode(text, begin.start())[0])
            break
    return False


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


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
    if error.validator != "type" or not isinstance(error.instance, str):
        return False
    try:
        meant = json.loads(error.instance, parse_constant=_refuse)
    except ValueError:
        return False
    kinds = error.validator_value
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(validator.is_type(meant, kind) for kind in kinds):
        return False
    at: Any = holder
    steps: list[Any] = [0, *error.absolute_path]
    for step in steps[:-1]:
        at = at[step]
    at[steps[-1]] = meant
    return True


def _limit() -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS knows no limit of memory
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))


if __name__ == "__main__":
    _limit()
    json.dump(found(**json.load(sys.stdin)), sys.stdout)
