"""What people see of the cache, and what they have it forget."""

from typing import Any

from sidecar.core.conversation import ForgetFilter
from sidecar.core.errors import BadRequest, Unavailable
from sidecar.core.requests import short_id
from sidecar.dialects.fields import Fields
from sidecar.memory.conversation_memory import Forgotten
from sidecar.server import query
from sidecar.server.http_messages import Request, Response, json_response
from sidecar.service.cache_admin import CacheService
from sidecar.service.request_history import RequestHistory
from sidecar.service.stored_responses import StoredResponses

_FILTER_FIELDS = ("session", "key")
_CLEARS = "?model=NAME names a model, POST /admin/cache/forget takes session and key"


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
        check = query.flag(request, "check", ("model",))
        name = query.given(request, ("check", "model")).get("model", "")
        return json_response(self._caches.report(name, check=check))

    def drift(self, request: Request) -> Response:
        """GET /admin/cache/drift."""
        name = query.given(request, ("model",)).get("model", "")
        return json_response({"places": self._caches.drift(name)})

    def clear(self, request: Request) -> Response:
        """POST /admin/cache/clear; `?disk=keep` leaves what is on the disk."""
        query.require_no_body(request, _CLEARS)
        return json_response({"cleared": True, **self._forget(request, None)})

    def forget(self, request: Request) -> Response:
        """POST /admin/cache/forget: the conversations of a session, or of a key."""
        counts = self._forget(request, _forget_filter(request.json()))
        return json_response({"forgotten": any(counts.values()), **counts})

    def _forget(
        self, request: Request, forget_filter: ForgetFilter | None
    ) -> dict[str, int]:
        said = query.given(request, ("model", "disk"))
        asked = said.get("disk", "clear")
        if asked not in ("clear", "keep"):
            raise BadRequest("disk must be clear or keep", param="disk")
        if said.get("model") == "":
            raise BadRequest("model must name a model", param="model")
        try:
            gone = self._caches.clear(
                said.get("model"), forget_filter, on_disk=asked == "clear"
            )
        except Unavailable:  # of the memory it is forgotten
            self._responses.forget(forget_filter)
            self._history.forget(forget_filter)
            raise
        self._history.forget(forget_filter)
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


def _counts(gone: Forgotten) -> dict[str, int]:
    return {
        "kv_bytes": gone.kv_bytes,
        "prompts": gone.num_prompts,
        "threads": gone.num_threads,
        "disk_slots": gone.num_slots,
        "disk_bytes": gone.disk_bytes,
    }
