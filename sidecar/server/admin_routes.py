"""What the admin page polls: all that a person wants to see of the server at once."""

import time
from dataclasses import asdict
from typing import Any

from sidecar.core.errors import BadRequest, Forbidden, NotFound
from sidecar.infra.package_version import package_version
from sidecar.infra.recent_lines import RecentLines
from sidecar.server import query
from sidecar.server.access import given_key
from sidecar.server.admin_codes import AdminCodes
from sidecar.server.http_messages import Request, Response, json_response
from sidecar.server.page_files import HEADERS, page_files
from sidecar.service.chat import ChatService
from sidecar.service.live_settings import Changed, LiveSettings
from sidecar.service.models import ModelService
from sidecar.service.request_history import RequestHistory
from sidecar.service.run_view import RunView
from sidecar.service.savings import Savings

SCHEMA = 1
_MAX_LINES = 500


class AdminRoutes:
    """
    Endpoints; they are guarded by the router. None waits for the GPU.

    Args:
        history: of the chats that ended. lines: of the log.
    """

    def __init__(
        self,
        chat: ChatService,
        models: ModelService,
        history: RequestHistory,
        savings: Savings,
        lines: RecentLines,
        settings: LiveSettings,
    ) -> None:
        self._chat, self._models = chat, models
        self._history, self._savings, self._lines = history, savings, lines
        self._settings, self._codes = settings, AdminCodes()
        self._started_at = time.time()
        self._version = package_version("litellm-mlx")

    def state(self, request: Request) -> Response:
        """GET /admin/state."""
        query.given(request, ())
        health = self._models.health()
        body: dict[str, Any] = {
            "schema": SCHEMA,
            "at": time.time(),
            "started_at": self._started_at,
            "version": self._version,
            "status": health.status,
            "reason": health.reason,
            "failed_tests": health.failed_tests,
            "models": [view.as_dict() for view in health.models],
            "memory": self._models.memory(),
            "running": _with_places(self._chat.running()),
            "ended": self._history.ended(),
            "causes": self._history.causes(),
            "savings": self._savings.as_dict(),
        }
        if health.download:
            done, total = health.download.done_bytes, health.download.total_bytes
            body["download"] = {"done_bytes": done, "total_bytes": total}
        return json_response(body)

    def issue_code(self, request: Request) -> Response:
        """POST /admin/code: opens the page once, within a minute."""
        query.given(request, ())
        query.require_no_body(request)
        return json_response({"code": self._codes.issue(given_key(request.headers))})

    def exchange(self, request: Request) -> Response:
        """POST /admin/exchange: the key that a code stands for; without a key."""
        query.given(request, ())
        body = request.json()
        code = body.get("code") if isinstance(body, dict) else None
        if not isinstance(code, str):
            raise BadRequest("code must be a text", param="code")
        if others := sorted(body.keys() - {"code"}):
            raise BadRequest(f"{others[0][:64]} is not code", param=others[0][:64])
        key = self._codes.exchange(code)
        if key is None:
            raise Forbidden("this code is not good, or not any more")
        return json_response({"key": key})

    def savings(self, request: Request) -> Response:
        """GET /admin/savings."""
        query.given(request, ())
        return json_response({"schema": SCHEMA, **self._savings.as_dict()})

    def logs(self, request: Request) -> Response:
        """GET /admin/logs; `?after=N` leaves out lines up to that number."""
        text = query.given(request, ("after",)).get("after", "0")
        if not (text.isascii() and text.isdecimal()) or len(text) > 18:
            raise BadRequest("after must be a whole number from 0", param="after")
        lines = self._lines.after(int(text), _MAX_LINES)
        return json_response({"schema": SCHEMA, "lines": lines})

    def cancel(self, request: Request) -> Response:
        """POST /admin/requests/ID/cancel: whoever sent it."""
        query.given(request, ())
        query.require_no_body(request)
        if not self._chat.stop_any(request.tail):
            raise NotFound("no such request runs")
        return json_response({"cancelled": request.tail})

    def settings(self, request: Request) -> Response:
        """GET /admin/settings."""
        query.given(request, ())
        return json_response({"schema": SCHEMA, "settings": self._settings.rows()})

    def change_settings(self, request: Request) -> Response:
        """POST /admin/settings: names and values; null takes back what was saved."""
        query.given(request, ())
        body = request.json()
        if not isinstance(body, dict) or not body:
            raise BadRequest("the body must be an object of settings")
        return _changes(self._settings.change(body))

    def reload(self, request: Request) -> Response:
        """POST /admin/reload-config: the files are read again."""
        query.given(request, ())
        query.require_no_body(request, "POST /admin/settings takes settings")
        return _changes(self._settings.reload())


def _changes(found: list[Changed]) -> Response:
    return json_response({"schema": SCHEMA, "changed": [asdict(one) for one in found]})


def _with_places(running: list[RunView]) -> list[dict[str, Any]]:
    """Each with its place among those that wait; 0: it has begun."""
    rows, place = [], 0
    for view in running:
        place += view.state == "queued"
        rows.append({**view.as_dict(), "place": place * (view.state == "queued")})
    return rows


def page_file(request: Request) -> Response:
    """GET of a file of the page; 304 where nothing changed."""
    found = page_files()[request.path]
    headers = {**HEADERS, "ETag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(b"", 304, headers=headers)
    return Response(found.body, 200, found.content_type, headers)
