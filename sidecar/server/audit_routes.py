"""The audit over HTTP: rows by page or by cursor, sums, and files."""

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from sidecar.core.errors import BadRequest, NotFound, Unavailable
from sidecar.infra.audit_store import COLUMNS, AuditFilter, AuditStore
from sidecar.server import query
from sidecar.server.http_messages import Request, Response, json_response
from sidecar.service.audit import Audit

_MAX_ROWS, _MAX_EXPORTED = 1000, 100_000
_FORMATS = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8"}
_FILTERS = ("model", "status", "since", "until", "after")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a table calculator would run it


class AuditRoutes:
    """Endpoints; they are guarded by the router."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    def rows(self, request: Request) -> Response:
        """GET /admin/audit-logs: `limit`, `offset`, and the filters."""
        asked = query.given(request, (*_FILTERS, "limit", "offset"))
        limit = _number(asked, "limit", 1, _MAX_ROWS) or 100
        offset = _number(asked, "offset", 0, 1 << 40) or 0
        rows = self._read(lambda store: store.rows(_filter(asked), limit, offset))
        return json_response({"schema": 1, "rows": rows})

    def stats(self, request: Request) -> Response:
        """GET /admin/audit-logs/stats: sums by model, endpoint and status."""
        asked = query.given(request, _FILTERS)
        rows = self._read(lambda store: store.stats(_filter(asked)))
        return json_response({"schema": 1, "rows": rows})

    def export(self, request: Request) -> Response:
        """GET /admin/audit-logs/export: at most 100,000 rows, as `format` says."""
        asked = query.given(request, (*_FILTERS, "limit", "format"))
        form = asked.get("format", "jsonl")
        if form not in _FORMATS:
            raise BadRequest("format must be jsonl or csv", param="format")
        limit = _number(asked, "limit", 1, _MAX_EXPORTED) or _MAX_EXPORTED
        rows = self._read(lambda store: store.rows(_filter(asked), limit))
        text = _csv(rows) if form == "csv" else _jsonl(rows)
        named = {"Content-Disposition": f'attachment; filename="audit.{form}"'}
        return Response(text.encode(), 200, _FORMATS[form], named)

    def _read(self, ask: Any) -> list[dict[str, Any]]:
        store: AuditStore | None = self._audit.store
        if store is None:
            raise NotFound("no audit is kept: AUDIT_ENABLED=false")
        try:
            found: list[dict[str, Any]] = ask(store)
        except OSError as error:
            raise Unavailable(f"the audit cannot be read: {error}") from error
        return found


def _filter(given: Mapping[str, str]) -> AuditFilter:
    return AuditFilter(
        given.get("model"),
        _number(given, "status", 100, 599),
        _number(given, "since", 0, 1 << 40),
        _number(given, "until", 0, 1 << 40),
        _number(given, "after", 0, 1 << 60),
    )


def _number(given: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    if name not in given:
        return None
    text = given[name]
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise BadRequest(f"{name} must be a whole number", param=name)
    if not low <= int(text) <= high:
        raise BadRequest(f"{name} must be in {low}..{high}", param=name)
    return int(text)


def _jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _csv(rows: list[dict[str, Any]]) -> str:
    written = io.StringIO()
    table = csv.DictWriter(written, ("id", *COLUMNS))
    table.writeheader()
    for row in rows:
        table.writerow({name: _cell(value) for name, value in row.items()})
    return written.getvalue()


def _cell(value: Any) -> Any:
    is_formula = isinstance(value, str) and value.startswith(_FORMULA)
    return f"'{value}" if is_formula else value
