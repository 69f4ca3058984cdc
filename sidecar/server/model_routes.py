"""The list of models, and what people do with models by hand."""

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

from sidecar.core.errors import BadRequest, ModelNotFound, NotFound, SidecarError
from sidecar.core.events import Idle, Usage
from sidecar.core.json_bytes import dump_bytes
from sidecar.dialects.openai_models import model_entry, model_list
from sidecar.dialects.openai_tasks import MAX_DOCUMENTS, MAX_INPUTS
from sidecar.residents.capability_record import CapabilityRecord
from sidecar.residents.detection import TEXT_KINDS
from sidecar.residents.model_settings import check_setting
from sidecar.residents.model_state import ModelView
from sidecar.server import query
from sidecar.server.http_messages import (
    Endpoint,
    EventStream,
    Request,
    Response,
    json_response,
)
from sidecar.service.models import ModelService
from sidecar.service.probe_step import ProbeStep, Steps

PREFIX = "/admin/models/"
PUBLIC_PREFIX = "/v1/models/"
# The first two change at once, the others at the model's next load.
_SETTINGS = (
    "pinned", "ttl_seconds", "tool_parser", "reasoning_parser", "draft_model",
    "adapter_path",
)  # fmt: skip
_MAY_BE_UNSET = ("draft_model", "adapter_path")
_OF_CHATS = ("supports_function_calling", "supports_reasoning")


class ModelRoutes:
    """
    Endpoints; those below `/admin` are guarded by the router.

    Args:
        probe: asks a model of a name what it can do, while its client is there.
    """

    def __init__(
        self, models: ModelService, probe: Callable[[str, Callable[[], bool]], Steps]
    ) -> None:
        self._models, self._probe = models, probe
        self._actions: dict[tuple[str, str], Endpoint] = {
            ("POST", "load"): self._load,
            ("POST", "unload"): self._unload,
            ("POST", "settings"): self._change,
            ("GET", "loading-progress"): self._progress,
            ("POST", "capabilities"): self._capabilities,
        }

    def list(self, request: Request) -> Response:
        """GET /v1/models; 304 where nothing changed."""
        body = dump_bytes(model_list([*self._entries()]))
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers = {"ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(b"", 304, headers=headers)
        return Response(body, headers=headers)

    def one(self, request: Request) -> Response:
        """GET /v1/models/NAME, with what its files say of it once it is loaded."""
        name = unquote(request.path.removeprefix(PUBLIC_PREFIX))
        for entry in self._entries():
            if name in (entry["id"], *entry["aliases"]):
                base = entry["id"].removesuffix(f":{entry.get('adapter', '')}")
                details = self._models.details(base)
                return json_response({**entry, "details": details})
        raise ModelNotFound(f"no model named {name[:200]!r} is served", param="model")

    def _entries(self) -> Sequence[dict[str, Any]]:
        """All models, each with its adapters behind it."""
        adapters = self._models.adapters()
        return [
            listed
            for entry in self._models.entries()
            for listed in _with_adapters(
                _listed(entry, self._models.capabilities(entry.id)),
                adapters.get(entry.id, ()),
            )
        ]

    def all(self, request: Request) -> Response:
        """GET /admin/models: those as well that cannot be loaded, and why."""
        query.given(request, ())
        entries = self._models.all_entries()
        return json_response({"models": [self._described(e) for e in entries]})

    def _described(self, entry: ModelView) -> dict[str, Any]:
        found = self._models.capabilities(entry.id)
        return {**entry.as_dict(), "capabilities": _shown(found)}

    def status(self, request: Request) -> Response:
        """GET /admin/models/status: what is loaded, and where the memory is."""
        query.given(request, ())
        loaded = [e.as_dict() for e in self._models.all_entries() if e.actual_bytes]
        return json_response({"loaded": loaded, "memory": self._models.memory()})

    def rescan(self, request: Request) -> Response:
        """POST /admin/models/rescan."""
        query.require_no_body(request)
        query.given(request, ())
        entries = self._models.rescan()
        return json_response({"models": [entry.as_dict() for entry in entries]})

    def find(self, method: str, path: str) -> Endpoint | None:
        """The endpoint of /admin/models/ID/ACTION; an id may have slashes in it."""
        if not path.startswith(PREFIX):
            return None
        name, _, action = path.removeprefix(PREFIX).rpartition("/")
        endpoint = self._actions.get((method, action))
        if endpoint is None or not name:
            return None
        return endpoint

    def _load(self, request: Request) -> Response:
        query.require_no_body(request, "?pin=true pins it")
        entry = self._models.load(_name(request), pin=query.flag(request, "pin"))
        return json_response(entry.as_dict())

    def _unload(self, request: Request) -> Response:
        query.require_no_body(request, "?force=true does not wait")
        force = query.flag(request, "force")
        freed = self._models.unload(_name(request), force=force)
        return json_response({"freed_bytes": freed})

    def _change(self, request: Request) -> Response:
        body = request.json()
        if not isinstance(body, dict):
            raise BadRequest("the body must be an object")
        for name, value in body.items():
            _check_setting(name, value)
        fault = self._models.change(_name(request), body)
        notice = {} if fault is None else {"until_the_next_start": fault}
        return json_response({"changed": sorted(body), **notice})

    def _capabilities(self, request: Request) -> EventStream:
        steps = _as_events(self._probe(_name(request), request.is_connected))
        return EventStream(_ProbeEvents(), steps, steps.close)

    def _progress(self, request: Request) -> EventStream:
        steps = self._models.progress(_name(request))
        events = _as_events(steps)
        return EventStream(_LoadEvents(), events, events.close)


def _shown(record: CapabilityRecord | None) -> dict[str, Any] | str:
    return "not probed" if record is None else record.as_dict()


def _listed(entry: ModelView, record: CapabilityRecord | None) -> dict[str, Any]:
    found = model_entry(entry.id, entry.aliases, entry.max_input_tokens)
    found["kind"] = entry.kind
    if entry.kind not in TEXT_KINDS:
        found |= dict.fromkeys(_OF_CHATS, False)
    elif record is not None:
        known = (record.supports_tools, record.supports_thinking)
        said = zip(_OF_CHATS, known, strict=True)
        found |= {name: can for name, can in said if can is not None}
    found["capabilities"] = _shown(record)
    found["supports_vision"] = entry.takes_images
    if entry.kind == "embedding":
        found["embedding_dimensions"] = entry.vector_len
        found["max_inputs"] = MAX_INPUTS
    elif entry.kind == "reranker":
        found["max_documents"] = MAX_DOCUMENTS
    found["state"] = entry.state
    found["estimated_load_s"] = entry.estimated_load_s
    return found


def _with_adapters(
    listed: dict[str, Any], adapters: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A model, then the same with each of its adapters."""
    yield listed
    names = [listed["id"], *listed["aliases"]]
    for adapter in adapters:
        own_id, *aliases = [f"{name}:{adapter}" for name in names]
        yield {**listed, "id": own_id, "aliases": aliases, "adapter": adapter}


def _check_setting(name: str, value: object) -> None:
    if name not in _SETTINGS:
        raise BadRequest(f"{name} is not one of {', '.join(_SETTINGS)}", param=name)
    if name in _MAY_BE_UNSET and value is None:
        return  # as DRAFT_MODEL says again, and no adapter
    try:
        check_setting(name, value)
    except ValueError as error:
        raise BadRequest(str(error), param=name) from None


def _name(request: Request) -> str:
    name = unquote(request.path.removeprefix(PREFIX).rpartition("/")[0])
    if not name:
        raise NotFound("no such path")
    return name


class _StepEvents:
    """What streams of steps have in common."""

    def started(self, usage: Usage) -> bytes:
        """Nothing yet."""
        return b""

    def ping(self) -> bytes:
        """A comment."""
        return b": waiting\n\n"


class _ProbeEvents(_StepEvents):
    """Server-sent events of a probe."""

    def event(self, event: Any) -> bytes:
        """A step."""
        return b"data: %s\n\n" % dump_bytes(event.as_dict())

    def failed(self, error: SidecarError) -> bytes:
        """The last event."""
        return self.event(ProbeStep("probe", "failed", error=error.message))


def _as_events(steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
    with contextlib.closing(steps):
        for step in steps:
            yield Idle() if step is None else step


class _LoadEvents(_StepEvents):
    """Server-sent events of a load."""

    def event(self, event: Any) -> bytes:
        """A step, and why it failed."""
        step, why = event
        body = {"step": step} if why is None else {"step": step, "message": why}
        return b"event: %s\ndata: %s\n\n" % (step.encode(), dump_bytes(body))

    def failed(self, error: SidecarError) -> bytes:
        """The last event."""
        return self.event(("error", error.message))
