"""docs/fields.md, row by row: what it says of a field is what a server does with it."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.dialects import known_fields
from sidecar.service.turn import IGNORED as HEADER

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
Json = dict[str, Any]

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]},
    {"role": "user", "content": "Count the lamps."},
]
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 1},
    "/v1/completions": {"prompt": "one", "max_tokens": 1},
    "/v1/messages": {"messages": TALK, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
}
KNOWN = {
    "/v1/chat/completions": known_fields.CHAT_FIELDS,
    "/v1/completions": known_fields.COMPLETION_FIELDS,
    "/v1/messages": known_fields.MESSAGES_FIELDS,
    "/v1/responses": known_fields.RESPONSES_FIELDS,
}
# What an object in a list has beside the field that is tried.
AROUND: dict[str, Json] = {
    "tools[].custom": {"type": "custom", "custom": {"name": "c"}},
    "tools[].function": {"type": "function", "function": {"name": "f"}},
    "tools[].cache_control": {"type": "function", "function": {"name": "f"}},
    "tools[].type": {"function": {"name": "f"}, "name": "f"},
    "tools[]": {"name": "f", "type": "function", "input_schema": {"type": "object"}},
    "functions[]": {"name": "g"},
    "messages[].tool_calls[]": {"id": "c", "function": {"name": "f"}},
    "tool_choice": {"type": "none"},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "hi"}]},
    "system[]": {"type": "text", "text": "Be brief."},
}


@dataclass(frozen=True)
class Row:
    """A field of a route, a value of it, what becomes of that, what is refused."""

    route: str
    field: str
    example: Any
    becomes: str
    refused: Any


def rows() -> Iterator[Row]:
    routes: list[str] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            routes = re.findall(r"(/v1/[a-z/]+)", line)
        if not (routes and line.startswith("| `")):
            continue
        names, example, becomes, refused = (
            re.findall(r"`([^`]+)`", cell) or [cell.strip()]
            for cell in line.strip("|").split(" | ")
        )
        for route in routes:
            for name in names:
                wrong = json.loads(refused[0]) if refused[0].strip("|") else None
                yield Row(route, name, json.loads(example[0]), becomes[0], wrong)


def body_with(row: Row, value: Any) -> Json:
    """The route's body with a value at a field's place."""
    body = copy.deepcopy(BODIES[row.route])
    place: Any = body
    *parents, last = re.sub(r"\[\w+\]", "[].type", row.field).split(".")
    for depth, name in enumerate(parents):
        if not name.endswith("[]"):
            place = place.setdefault(name, copy.deepcopy(AROUND.get(name, {})))
            continue
        path = ".".join(parents[: depth + 1])
        around = next((AROUND[p] for p in AROUND if row.field.startswith(p)), {})
        inner = around if path == row.field.rpartition("[]")[0] + "[]" else {}
        items = place.setdefault(name[:-2], [copy.deepcopy(inner)])
        place = items[1 if path == "messages[]" else 0]
    place[last] = value
    return body


@pytest.fixture(scope="module")
def http(app: App) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=app.url, timeout=120) as client:
        yield client


def fault(http: httpx.Client, row: Row) -> str | None:
    """What is wrong with a row, if anything is."""
    answer = http.post(row.route, json=body_with(row, row.example))
    named = answer.headers.get(HEADER, "").split(", ")
    status = 400 if row.becomes == "400" else 200
    is_named = row.field in named
    if answer.status_code != status or is_named != (row.becomes == "named"):
        return f"{row}: {answer.status_code} {named} {answer.text[:200]}"
    if row.becomes == "400" and row.field not in answer.text:
        return f"{row}: the error does not name it: {answer.text[:200]}"
    if row.refused is not None:
        answer = http.post(row.route, json=body_with(row, row.refused))
        name = re.split(r"[.\[]", row.field)[0]
        if answer.status_code not in (400, 422) or name not in answer.text:
            return f"{row}: not refused: {answer.status_code} {answer.text[:200]}"
    return None


@pytest.mark.parametrize("route", BODIES)
def test_each_row_of_the_page_is_so(http: httpx.Client, route: str) -> None:
    found = [row for row in rows() if row.route == route]
    assert len(found) > 20
    assert [text for row in found if (text := fault(http, row))] == []


@pytest.mark.parametrize("route", BODIES)
def test_the_page_lists_all_that_is_read(route: str) -> None:
    """And nothing is said to be read that no dialect knows."""
    taken = {r.field for r in rows() if r.route == route and r.becomes == "taken"}
    assert taken == KNOWN[route]


@pytest.mark.parametrize("route", BODIES)
def test_what_nobody_knows_is_named(http: httpx.Client, route: str) -> None:
    """However odd its name, however many there are, and before a stream."""
    more = {f"odd{i}": 1 for i in range(40)}
    body = {**BODIES[route], "stream": True, "a\r\nX-Evil: ü, b": 1, **more}
    answer = http.post(route, json=body)
    assert answer.status_code == 200
    assert answer.headers[HEADER].startswith("a??X-Evil?????b, odd0, odd1, ")
    assert answer.headers[HEADER].endswith(", and 9 more")
    assert "x-evil" not in answer.headers
