"""The audit over HTTP: rows by page or by cursor, sums, and files."""

import csv
import io
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from sidecar.core.errors import BadRequest, NotFound, Unavailable
from sidecar.infra.audit_store import COLUMNS, AuditFilter, AuditStore
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
        given = _given(request, (*_FILTERS, "limit", "offset"))
        limit = _number(given, "limit", 1, _MAX_ROWS) or 100
        offset = _number(given, "offset", 0, 1 << 40) or 0
        rows = self._read(lambda store: store.rows(_filter(given), limit, offset))
        return json_response({"schema": 1, "rows": rows})

    def stats(self, request: Request) -> Response:
        """GET /admin/audit-logs/stats: sums by model, endpoint and status."""
        given = _given(request, _FILTERS)
        rows = self._read(lambda store: store.stats(_filter(given)))
        return json_response({"schema": 1, "rows": rows})

    def export(self, request: Request) -> Response:
        """GET /admin/audit-logs/export: at most 100,000 rows, as `format` says."""
        given = _given(request, (*_FILTERS, "limit", "format"))
        form = given.get("format", "jsonl")
        if form not in _FORMATS:
            raise BadRequest("format must be jsonl or csv", param="format")
        limit = _number(given, "limit", 1, _MAX_EXPORTED) or _MAX_EXPORTED
        rows = self._read(lambda store: store.rows(_filter(given), limit))
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


def _given(request: Request, known: tuple[str, ...]) -> dict[str, str]:
    """
    What the query says.

    Raises:
        BadRequest: a name is unknown, or given twice.
    """
    given = parse_qs(request.query, keep_blank_values=True)
    for name, values in given.items():
        if name not in known:
            raise BadRequest(f"{name[:64]} is not one of {', '.join(known)}")
        if len(values) > 1:
            raise BadRequest(f"{name} may be given once", param=name)
    return {name: values[0] for name, values in given.items()}


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
