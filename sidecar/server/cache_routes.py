"""What people see of the cache, and what they have it forget."""

from typing import Any
from urllib.parse import parse_qs

from sidecar.core.errors import BadRequest
from sidecar.core.forgetting import Whose
from sidecar.core.requests import short_id
from sidecar.dialects.fields import Fields
from sidecar.memory.conversation_memory import Forgotten
from sidecar.server.messages import Request, Response, json_response
from sidecar.service.cache_admin import CacheService
from sidecar.service.stored_responses import StoredResponses

_WHOSE = ("session", "key")


class CacheRoutes:
    """Endpoints; they are guarded by the router. All take `?model=NAME`."""

    def __init__(self, caches: CacheService, responses: StoredResponses) -> None:
        self._caches = caches
        self._responses = responses

    def report(self, request: Request) -> Response:
        """GET /admin/cache; `?check=1` looks for broken invariants as well."""
        asked = parse_qs(request.query).get("check", [])
        check = bool({"1", "true"} & set(asked))
        return json_response(self._caches.report(_model(request) or "", check=check))

    def drift(self, request: Request) -> Response:
        """GET /admin/cache/drift."""
        return json_response({"places": self._caches.drift(_model(request) or "")})

    def clear(self, request: Request) -> Response:
        """POST /admin/cache/clear; `?disk=keep` leaves what is on the disk."""
        asked = parse_qs(request.query).get("disk", ["clear"])[-1]
        if asked not in ("clear", "keep"):
            raise BadRequest("disk must be clear or keep", param="disk")
        self._responses.forget()
        gone = self._caches.clear(_model(request), on_disk=asked == "clear")
        return json_response({"cleared": True, **_told(gone)})

    def forget(self, request: Request) -> Response:
        """POST /admin/cache/forget: the conversations of a session, or of a key."""
        whose = _whose(request.json())
        self._responses.forget(whose)
        gone = self._caches.clear(_model(request), whose)
        return json_response({"forgotten": True, **_told(gone)})


def _whose(body: Any) -> Whose:
    fields = Fields(body)
    if unknown := sorted(set(body) - set(_WHOSE)):
        raise BadRequest(
            f"{unknown[0][:64]} is not one of {', '.join(_WHOSE)}",
            param=unknown[0][:64],
        )
    named = {n: fields.required_text(n) for n in _WHOSE if body.get(n) is not None}
    if not named:
        raise BadRequest("session or key must say whose", param="session")
    return Whose(short_id(named.get("session")), short_id(named.get("key")))


def _model(request: Request) -> str | None:
    return next(iter(parse_qs(request.query).get("model", [])), None)


def _told(gone: Forgotten) -> dict[str, int]:
    return {
        "kv_bytes": gone.kv_bytes,
        "prompts": gone.num_prompts,
        "threads": gone.num_threads,
        "disk_slots": gone.num_slots,
        "disk_bytes": gone.disk_bytes,
    }
