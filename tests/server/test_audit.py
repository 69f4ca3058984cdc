"""The audit of a running server."""

import csv
import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.core.errors import Busy, SidecarError
from sidecar.infra.audit_store import AuditFilter, AuditStore
from sidecar.service.audit import AnsweredCall, Audit
from testkit.raw_http import eventually
from testkit.servers import running_sidecar

SECRET = "rhubarb-and-custard"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def app(home: Path) -> Iterator[App]:
    settings = {"DATABASE_PATH": str(home / "sidecar.db"), "ADMIN_TOKEN": "token"}
    with running_sidecar(settings) as served:
        yield served


def get(app: App, path: str) -> httpx.Response:
    headers = {"Authorization": "Bearer token"}
    return httpx.get(f"{app.url}{path}", headers=headers, timeout=60)


def rows(app: App, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(app, f"/admin/audit-logs?{query}").json()["rows"]
    return found


def ask(app: App, request_id: str, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2, **more}
    headers = {"X-Request-ID": request_id, "User-Agent": "test/1"}
    headers["traceparent"] = f"00-{TRACE}-b7ad6b7169203331-01"
    url = f"{app.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60)


def row_of(app: App, request_id: str) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [row for row in rows(app) if row["request_id"] == request_id]

    assert eventually(lambda: bool(found()))
    (row,) = found()
    return row


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_chat_is_a_row(app: App, is_streamed: bool) -> None:
    name = f"chat-{is_streamed}"
    assert ask(app, name, stream=is_streamed).status_code == 200
    row = row_of(app, name)
    assert row["endpoint"] == "/v1/chat/completions"
    assert (row["kind"], row["status"], row["outcome"]) == ("request", 200, "finished")
    assert row["prompt_tokens"] > row["cached_tokens"] >= 0
    assert row["completion_tokens"] == 2
    assert row["duration_ms"] >= row["ttft_ms"] > 0
    assert (row["client"], row["trace_id"]) == ("test/1", TRACE)
    assert row["model"]
    assert row["address"] == "127.0.0.1"


def test_a_refusal_is_a_row_without_its_words(app: App) -> None:
    assert ask(app, "refused", temperature=f"{SECRET}").status_code == 400
    row = row_of(app, "refused")
    assert (row["status"], row["error_type"]) == (400, "invalid_request")
    assert row["outcome"] == "error"
    assert row["prompt_tokens"] is None


def test_names_of_fields_and_paths_are_words_too(app: App, home: Path) -> None:
    """Unknown ones are a client's own."""
    admin = {"Authorization": "Bearer token", "X-Admin": "1"}
    headers = {"X-Request-ID": "fields"}
    body = {"model": "local", f"my {SECRET}": 1, "prompt": "x", "labels": ["a"]}
    url = f"{app.url}/native/classify"
    assert httpx.post(url, json=body, headers=headers).status_code == 400
    unknown = ("", "requests/", "models/")
    paths = [f"/admin/{part}{SECRET}/cancel" for part in unknown]
    for path in (*paths, f"/admin/models/{SECRET}/load", f"/{SECRET}"):
        httpx.post(f"{app.url}{path}", json={}, headers=admin)
    httpx.delete(f"{app.url}/native/train/{SECRET}", headers=admin)
    ask(app, "last")
    row_of(app, "last")
    assert row_of(app, "fields")["error_type"] == "invalid_request"
    assert SECRET.encode() not in b"".join(f.read_bytes() for f in home.iterdir())


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/messages", "/v1/responses"])
def test_all_doors_lead_past_it(app: App, path: str) -> None:
    """Those without /v1 as well."""
    name = path.replace("/", "-")
    body = {"model": "local", "max_tokens": 2, "input": "hi"}
    if path != "/v1/responses":
        body = {**body, "messages": [{"role": "user", "content": "hi"}]}
        body.pop("input")
    else:
        body = {"model": "local", "max_output_tokens": 2, "input": "hi"}
    answer = httpx.post(
        f"{app.url}{path}", json=body, headers={"X-Request-ID": name}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    assert row_of(app, name)["prompt_tokens"] > 0


def test_what_changes_the_server_is_a_row(app: App) -> None:
    headers = {"Authorization": "Bearer token", "X-Admin": "1", "X-Request-ID": "clear"}
    url = f"{app.url}/admin/cache/clear"
    assert httpx.post(url, json={}, headers=headers, timeout=60).status_code == 200
    row = row_of(app, "clear")
    assert (row["kind"], row["endpoint"]) == ("admin", "/admin/cache/clear")
    assert row["key_id"]
    assert "token" not in row["key_id"]


def test_no_word_of_a_prompt_and_no_key_is_kept(app: App, home: Path) -> None:
    """Neither in the rows nor elsewhere in the files."""
    ask(app, "words")
    row_of(app, "words")
    kept = b"".join(file.read_bytes() for file in home.iterdir())
    assert b"words" in kept
    assert SECRET.encode() not in kept
    assert b"Bearer" not in kept


def test_nobody_reads_it_without_the_token(app: App) -> None:
    for path in ("", "/stats", "/export"):
        assert httpx.get(f"{app.url}/admin/audit-logs{path}").status_code == 401


def test_it_is_exported(app: App) -> None:
    ask(app, "=cmd|' /C calc'!A0")
    ask(app, "exported")
    row_of(app, "exported")
    lines = get(app, "/admin/audit-logs/export").text.splitlines()
    assert "exported" in [json.loads(line)["request_id"] for line in lines]
    text = get(app, "/admin/audit-logs/export?format=csv&limit=5").text
    table = [*csv.DictReader(io.StringIO(text))]
    assert len(table) <= 5
    assert not [cell for line in table for cell in line.values() if cell[:1] == "="]
    stats = get(app, "/admin/audit-logs/stats").json()["rows"]
    assert sum(row["calls"] for row in stats) >= len(table)


def test_a_cursor_follows_it(app: App) -> None:
    ask(app, "before")
    last = row_of(app, "before")["id"]
    assert rows(app, f"after={last}") == []
    ask(app, "behind")
    assert eventually(lambda: bool(rows(app, f"after={last}")))
    assert [row["request_id"] for row in rows(app, f"after={last}")] == ["behind"]


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=x", "status=9", "since=-1", "offset=1.5", "foo=1",
     "limit=1&limit=2", "after=99999999999999999999", "model=a&model=b"],
)  # fmt: skip
def test_a_bad_query_is_refused_by_name(app: App, query: str) -> None:
    answer = get(app, f"/admin/audit-logs?{query}")
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.json()["detail"]
    assert get(app, "/admin/audit-logs/export?format=xml").status_code == 400


def test_it_can_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "none.db"
    off = {"AUDIT_ENABLED": "false", "DATABASE_PATH": str(file)}
    with running_sidecar(off) as app:
        assert ask(app, "unseen").status_code == 200
        answer = httpx.get(f"{app.url}/admin/audit-logs")
        assert answer.status_code == 404
        assert "AUDIT_ENABLED" in answer.json()["detail"]
    assert not file.exists()


def test_a_locked_file_harms_no_request(tmp_path: Path) -> None:
    """U21: neither an answer nor /health."""
    file = tmp_path / "locked.db"
    with running_sidecar({"DATABASE_PATH": str(file)}) as app:
        ask(app, "first")
        assert eventually(file.exists)
        assert eventually(lambda: bool(rows(app)))
        lock = sqlite3.connect(file, isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        assert ask(app, "second").status_code == 200
        assert httpx.get(f"{app.url}/health", timeout=60).status_code == 200
        lock.execute("ROLLBACK")
        lock.close()


@pytest.mark.parametrize(
    ("status", "error", "outcome"),
    [(499, None, "client_gone"), (499, Busy("late"), "error"), (200, None, "success")],
)
def test_who_left_is_no_error(
    tmp_path: Path, status: int, error: SidecarError | None, outcome: str
) -> None:
    store = AuditStore(tmp_path / "audit.db", 30, 1 << 30)
    audit = Audit(store, lambda lost: None)
    audit.answered(
        AnsweredCall(
            "r", "POST", "/v1/embeddings", "/v1/embeddings", "127.0.0.1", status, 0.1,
            None, None, "", error,
        )
    )  # fmt: skip
    audit.close()
    assert [row["outcome"] for row in store.rows(AuditFilter(), 9)] == [outcome]
