"""Whether an answer keeps to its schema: what json_check.py finds, in its process."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sidecar.core.errors import UnsupportedSchema
from sidecar.core.requests import OutputFormat

_WAIT_S = 30.0  # the check's processor time is what is limited
_CHECK = Path(__file__).with_name("json_check.py")


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """
    What the check of an answer found.

    Args:
        text: its JSON and nothing else; as it was written, where it was that.
        fault: what is wrong, with words of the answer; "": nothing is.
        keyword: which word of the schema says so; "": it is no JSON, or not checked.
        path: where, from `$`, the whole.
    """

    text: str = ""
    fault: str = ""
    keyword: str = ""
    path: str = "$"


def check(form: OutputFormat, text: str | None) -> AnswerCheck:
    """
    The JSON of an answer, if it keeps to its schema; else what is wrong with it.

    Args:
        text: None: what is wrong with the schema.
    """
    schema = form.value if form.kind == "json_schema" else {"type": "object"}
    question = json.dumps({"schema": schema, "text": text}).encode()
    try:
        done = subprocess.run(
            [sys.executable, str(_CHECK)], input=question,
            capture_output=True, timeout=_WAIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return AnswerCheck(fault="it could not be checked in time")
    if done.returncode != 0:
        return AnswerCheck(fault="it takes too much to check")
    return AnswerCheck(**json.loads(done.stdout))


def require_schema(form: OutputFormat) -> None:
    """
    Refuse what is no schema, before anything is computed for it.

    Raises:
        UnsupportedSchema: naming the field, and where in the schema.
    """
    if (found := check(form, None)).fault:
        message = f"{form.param} cannot be kept to: {found.fault} at {found.path}"
        raise UnsupportedSchema(message, param=form.param)
