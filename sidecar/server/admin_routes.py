"""What the admin page polls: all that a person wants to see of the server at once."""

import importlib.metadata
import time
from typing import Any
from urllib.parse import parse_qs

from sidecar.core.errors import BadRequest, NotFound
from sidecar.infra.recent_lines import RecentLines
from sidecar.server.http_messages import Request, Response, json_response
from sidecar.service.chat import ChatService
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
    ) -> None:
        self._chat, self._models = chat, models
        self._history, self._savings, self._lines = history, savings, lines
        self._started_at = time.time()

    def state(self, request: Request) -> Response:
        """GET /admin/state."""
        health = self._models.health()
        body: dict[str, Any] = {
            "schema": SCHEMA,
            "at": time.time(),
            "started_at": self._started_at,
            "version": importlib.metadata.version("litellm-mlx"),
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

    def savings(self, request: Request) -> Response:
        """GET /admin/savings."""
        return json_response({"schema": SCHEMA, **self._savings.as_dict()})

    def logs(self, request: Request) -> Response:
        """GET /admin/logs; `?after=N` leaves out lines up to that number."""
        text = parse_qs(request.query).get("after", ["0"])[-1]
        if not (text.isascii() and text.isdecimal()) or len(text) > 18:
            raise BadRequest("after must be a whole number from 0", param="after")
        lines = self._lines.after(int(text), _MAX_LINES)
        return json_response({"schema": SCHEMA, "lines": lines})

    def cancel(self, request: Request) -> Response:
        """POST /admin/requests/ID/cancel: whoever sent it."""
        if not self._chat.stop_any(request.tail):
            raise NotFound("no such request runs")
        return json_response({"cancelled": request.tail})


def _with_places(running: list[RunView]) -> list[dict[str, Any]]:
    """Each with its place among those that wait; 0: it has begun."""
    rows, place = [], 0
    for view in running:
        place += view.state == "queued"
        rows.append({**view.as_dict(), "place": place * (view.state == "queued")})
    return rows
