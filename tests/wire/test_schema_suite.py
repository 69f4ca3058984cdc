"""
Hundreds of schemas over HTTP: what ends as an answer has the form that was asked for.

The schemas of tests/fixtures/json_schema_suite.jsonl are those of the public JSON
Schema test suite, draft 2020-12 (MIT licence; https://github.com/json-schema-org), and
the others are the tool schemas of the recorded clients. The model is random and sampled
at temperature 1, so nothing but the grammar makes an answer fit.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from mlx_lm.utils import load_tokenizer

from testkit.servers import running_sidecar
from testkit.tiny_models import BUILTIN
from testkit.traces import TRACES, load_trace

SUITE = Path(__file__).parents[1] / "fixtures" / "json_schema_suite.jsonl"
# Python's patterns take `é` for a letter and know no `\p`: these it cannot judge.
OF_OTHER_PATTERNS = "optional/ecmascript-regex"
PARTS = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """A schema, and whether an answer must keep to all of it."""

    name: str
    schema: dict[str, Any]
    is_strict: bool


def suite() -> list[Asked]:
    """The public suite's."""
    lines = map(json.loads, SUITE.read_text("utf-8").splitlines())
    return [Asked(line["name"], line["schema"], True) for line in lines]


def recorded() -> list[Asked]:
    """Those of the tools that recorded clients offered, each once."""
    found: dict[str, Asked] = {}
    names = sorted(file.name.partition(".jsonl")[0] for file in TRACES.glob("*.gz"))
    for name in names:
        for exchange in load_trace(name):
            for tool in exchange.body.get("tools") or ():
                told = tool.get("function", tool)
                schema = told.get("parameters") or told.get("input_schema")
                if isinstance(schema, dict):
                    asked = Asked(f"{name} {told['name']}", schema, False)
                    found.setdefault(json.dumps(schema, sort_keys=True), asked)
    return list(found.values())


@pytest.fixture(scope="module")
def url(model_folder: Callable[[str], Path]) -> Iterator[str]:
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        yield app.url


@pytest.fixture(scope="module")
def biases() -> dict[str, float]:
    """A text's end is as likely as half of all other tokens together."""
    tokenizer = load_tokenizer(BUILTIN)
    quotes = [i for text, i in tokenizer.get_vocab().items() if text.startswith('"')]
    return {str(token): 6.0 for token in quotes}


def answered(url: str, asked: Asked, biases: dict[str, float]) -> tuple[int, Any]:
    """Status, and the answer's only choice or the error."""
    form = {"name": "f", "schema": asked.schema, "strict": asked.is_strict}
    body = {
        "messages": [{"role": "user", "content": "Say something."}],
        "response_format": {"type": "json_schema", "json_schema": form},
        "temperature": 1,
        "max_tokens": 250,
        "logit_bias": biases,
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    told = response.json()
    return response.status_code, told.get("error") or told["choices"][0]


@pytest.mark.parametrize("part", range(PARTS))
def test_what_ends_has_the_form(part: int, url: str, biases: dict[str, float]) -> None:
    """Four at a time: rows of one batch, each held to a form of its own."""
    schemas = (suite() + recorded())[part::PARTS]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda one: answered(url, one, biases), schemas))
    num_accepted = num_ended = 0
    for asked, (status, told) in zip(schemas, answers, strict=True):
        if status == 400:
            assert asked.is_strict, (asked.name, told)
            assert told["code"] == "unsupported_schema", (asked.name, told)
            continue
        assert status == 200, (asked.name, told)
        num_accepted += 1
        if told["finish_reason"] == "stop" and OF_OTHER_PATTERNS not in asked.name:
            num_ended += 1
            value = json.loads(told["message"]["content"])
            jsonschema.validate(value, asked.schema, jsonschema.Draft202012Validator)
    assert num_accepted >= 25
    assert num_ended >= 12
