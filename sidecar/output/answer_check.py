"""Whether an answer keeps to its schema: what json_check.py finds, in its process."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from sidecar.core.errors import Unavailable, UnsupportedSchema
from sidecar.core.requests import OutputFormat
from sidecar.infra.limited_child import ChildBusy, run_limited

_CHECK = Path(__file__).with_name("json_check.py")
_MAX_KNOWN = 256


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """
    What the check of an answer found.

    Args:
        text: its JSON and nothing else, letter for letter where it is of the schema.
        fault: what is wrong, with words of the answer; "": nothing is.
        keyword: which word of the schema says so; "": it is no JSON.
        path: where, from `$`, the whole.
    """

    text: str = ""
    fault: str = ""
    keyword: str = ""
    path: str = "$"


def check(form: OutputFormat, text: str) -> AnswerCheck | None:
    """
    The JSON of an answer, if it keeps to its schema; else what is wrong with it.

    None: it could not be checked, which says nothing of the answer.

    Raises:
        Unavailable: a strict one cannot be checked at the moment.
    """
    try:
        return _checked(schema_text(form), text)
    except ChildBusy:
        if form.is_strict:
            raise _busy() from None
        return None


def schema_fault(form: OutputFormat) -> str:
    """
    Why answers cannot be checked against a schema; "": they can.

    Raises:
        Unavailable: others are checked at the moment.
    """
    try:
        return _fault_of(schema_text(form))
    except ChildBusy:
        raise _busy() from None


def _busy() -> Unavailable:
    return Unavailable("JSON cannot be checked just now", retry_after_s=5)


def require_schema(form: OutputFormat) -> None:
    """
    Refuse what answers cannot be checked against, before anything is computed for it.

    Raises:
        UnsupportedSchema: naming the field, and where in the schema.
        Unavailable: others are checked at the moment.
    """
    if fault := schema_fault(form):
        message = f"{form.param} cannot be kept to: {fault}"
        raise UnsupportedSchema(message, param=form.param)


def schema_text(form: OutputFormat) -> str:
    """The schema of a form, as JSON."""
    schema = form.value if form.kind == "json_schema" else {"type": "object"}
    return json.dumps(schema)


@functools.lru_cache(maxsize=_MAX_KNOWN)
def _fault_of(schema: str) -> str:
    found = _checked(schema, None)
    if found is None:
        return "it takes too much to check, or has what Python's patterns do not know"
    return f"{found.fault} at {found.path}" if found.fault else ""


def _checked(schema: str, text: str | None) -> AnswerCheck | None:
    question = f'{{"schema": {schema}, "text": {json.dumps(text)}}}'
    said = run_limited(_CHECK, question.encode())
    return None if said is None else AnswerCheck(**json.loads(said))
