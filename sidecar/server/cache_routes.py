"""What people see of the cache, and what they have it forget."""

from typing import Any
from urllib.parse import parse_qs

from sidecar.core.conversation import ForgetFilter
from sidecar.core.errors import BadRequest, Unavailable
from sidecar.core.requests import short_id
from sidecar.dialects.fields import Fields
from sidecar.memory.conversation_memory import Forgotten
from sidecar.server.http_messages import Request, Response, json_response
from sidecar.service.cache_admin import CacheService
from sidecar.service.request_history import RequestHistory
from sidecar.service.stored_responses import StoredResponses

_FILTER_FIELDS = ("session", "key")


class CacheRoutes:
    """Endpoints; they are guarded by the router. All take `?model=NAME`."""

    def __init__(
        self,
        caches: CacheService,
        responses: StoredResponses,
        history: RequestHistory,
    ) -> None:
        self._caches, self._history = caches, history
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
        return json_response({"cleared": True, **self._forget(request, None)})

    def forget(self, request: Request) -> Response:
        """POST /admin/cache/forget: the conversations of a session, or of a key."""
        counts = self._forget(request, _forget_filter(request.json()))
        return json_response({"forgotten": any(counts.values()), **counts})

    def _forget(
        self, request: Request, forget_filter: ForgetFilter | None
    ) -> dict[str, int]:
        asked = parse_qs(request.query).get("disk", ["clear"])[-1]
        if asked not in ("clear", "keep"):
            raise BadRequest("disk must be clear or keep", param="disk")
        self._history.forget(forget_filter)
        try:
            gone = self._caches.clear(
                _model(request), forget_filter, on_disk=asked == "clear"
            )
        except Unavailable:  # of the memory it is forgotten
            self._responses.forget(forget_filter)
            raise
        return {**_counts(gone), "responses": self._responses.forget(forget_filter)}


def _forget_filter(body: Any) -> ForgetFilter:
    fields = Fields(body)
    if unknown := sorted(set(body) - set(_FILTER_FIELDS)):
        raise BadRequest(
            f"{unknown[0][:64]} is not one of {', '.join(_FILTER_FIELDS)}",
            param=unknown[0][:64],
        )
    named = {
        n: fields.required_text(n) for n in _FILTER_FIELDS if body.get(n) is not None
    }
    if not named and "key" not in body:
        raise BadRequest("session or key must say whose", param="session")
    # "key": null is what the report says of conversations without one.
    session, key = (short_id(named.get(name)) for name in _FILTER_FIELDS)
    return ForgetFilter(session, key, any_key="key" not in body)


def _model(request: Request) -> str | None:
    return next(iter(parse_qs(request.query).get("model", [])), None)


def _counts(gone: Forgotten) -> dict[str, int]:
    return {
        "kv_bytes": gone.kv_bytes,
        "prompts": gone.num_prompts,
        "threads": gone.num_threads,
        "disk_slots": gone.num_slots,
        "disk_bytes": gone.disk_bytes,
    }
