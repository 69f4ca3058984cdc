"""(method, path) -> endpoint; each endpoint is parse -> service -> format."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from sidecar.config.settings import ServerConfig
from sidecar.core.errors import (
    ContextLengthExceeded,
    MethodNotAllowed,
    NotFound,
    SidecarError,
)
from sidecar.core.ports import Dialect
from sidecar.dialects.anthropic_messages.stream import AnthropicMessages
from sidecar.dialects.litellm_header import inner_id
from sidecar.dialects.openai_chat.stream import OpenAIChat, OpenAIStream
from sidecar.dialects.openai_completions import CompletionFormat, parse_completion
from sidecar.dialects.openai_responses.stream import OpenAIResponses
from sidecar.dialects.openai_tasks import (
    embedding_list,
    parse_embedding,
    parse_rerank,
    rerank_list,
)
from sidecar.dialects.problem import CONTENT_TYPE, problem
from sidecar.engine.job import Forecast
from sidecar.engine.native.memory_controls import MemoryControls
from sidecar.infra.metrics import Metrics
from sidecar.infra.recent_lines import RecentLines
from sidecar.server import access, query
from sidecar.server.admin_routes import AdminRoutes, page_file
from sidecar.server.audio_routes import AudioRoutes
from sidecar.server.audit_routes import AuditRoutes
from sidecar.server.batch_routes import BatchRoutes
from sidecar.server.cache_routes import CacheRoutes
from sidecar.server.chat_routes import ChatRoutes
from sidecar.server.http_messages import (
    Endpoint,
    EventStream,
    Request,
    Response,
    collect,
    json_response,
)
from sidecar.server.model_routes import PREFIX, PUBLIC_PREFIX, ModelRoutes
from sidecar.server.native_routes import NativeRoutes
from sidecar.server.page_files import page_files
from sidecar.service.audio import AudioService
from sidecar.service.audit import Audit
from sidecar.service.batches.batch_service import BatchService
from sidecar.service.cache_admin import CacheService
from sidecar.service.capability_probe import CapabilityProbe
from sidecar.service.chat import ChatService
from sidecar.service.encodings import EncodingService
from sidecar.service.live_settings import LiveSettings
from sidecar.service.models import ModelService
from sidecar.service.native import NativeService
from sidecar.service.rate_limits import RateLimits
from sidecar.service.request_history import RequestHistory
from sidecar.service.savings import Savings
from sidecar.service.stored_responses import StoredResponses
from sidecar.service.training import TrainingService

# LiteLLM's plugin asks for the models again and again: that is no work either.
_URGENT = ("/", "/health", "/ready", "/metrics", "/v1/models")
_ALSO_WITHOUT_V1 = (
    "/models",
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/rerank",
    "/audio/speech",
    "/audio/transcriptions",
)
_URGENT_BELOW = ("/admin/", "/v1/cancel/", "/v1/batches", "/v1/files")


@dataclass(frozen=True, slots=True)
class Services:
    """All use cases the routes serve."""

    chat: ChatService
    models: ModelService
    capabilities: CapabilityProbe
    caches: CacheService
    encodings: EncodingService
    audio: AudioService
    native: NativeService
    training: TrainingService
    memory: MemoryControls
    batches: BatchService
    responses: StoredResponses
    metrics: Metrics
    history: RequestHistory
    audit: Audit
    savings: Savings
    lines: RecentLines
    settings: LiveSettings
    limits: RateLimits


def dialects_of(services: Services) -> dict[str, Dialect]:
    """Where each wire format for chats is spoken: a new one is a row here."""
    return {
        "/v1/chat/completions": OpenAIChat(),
        "/v1/messages": AnthropicMessages(),
        "/v1/responses": OpenAIResponses(services.responses),
    }


class Routes:
    """The table of endpoints."""

    def __init__(self, services: Services, config: ServerConfig) -> None:
        self._services = services
        self._config = config
        self._chats = routes = ChatRoutes(services.chat, config, services.limits)
        audio = AudioRoutes(services.audio)
        self._models = ModelRoutes(services.models, services.capabilities.run)
        self._dialects = dialects_of(services)
        self._table: dict[str, dict[str, Endpoint]] = {
            "/": {"GET": self._health},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/v1/models": {"GET": self._models.list},
            "/v1/completions": {"POST": self._completion},
            "/v1/cache/probe": {"POST": routes.forecast(OpenAIChat(), _forecast)},
            "/v1/messages/count_tokens": {
                "POST": routes.forecast(AnthropicMessages(), _input_tokens)
            },
            "/v1/embeddings": {"POST": self._limited(self._embeddings)},
            "/v1/rerank": {"POST": self._limited(self._rerank)},
            "/v1/audio/speech": {"POST": self._limited(audio.speech)},
            "/v1/audio/transcriptions": {"POST": self._limited(audio.transcription)},
        }
        for path, dialect in self._dialects.items():
            self._table[path] = {"POST": routes.create(dialect)}
        for short in _ALSO_WITHOUT_V1:
            self._table[short] = self._table["/v1" + short]
        self._named: dict[str, dict[str, Endpoint]] = {
            "/v1/cancel": {"POST": self._cancel},
            "/v1/responses": {"GET": self._stored, "DELETE": self._unstore},
        }
        self._below_name: dict[tuple[str, str], dict[str, Endpoint]] = {}
        if config.metrics_enabled:
            self._table["/metrics"] = {"GET": self._metrics}
        native = NativeRoutes(services.native, services.training, services.memory)
        self._table |= self._native(native)
        self._add_batches(BatchRoutes(services.batches))
        self._add_admin(native)

    def use(self, config: ServerConfig) -> None:
        """Answer later requests by another configuration."""
        self._config = self._chats.config = config

    def _add_batches(self, batches: BatchRoutes) -> None:
        self._table["/v1/files"] = {"GET": batches.files, "POST": batches.upload}
        self._table["/v1/batches"] = {"GET": batches.batches, "POST": batches.create}
        self._named["/v1/files"] = {"GET": batches.file, "DELETE": batches.delete_file}
        self._named["/v1/batches"] = {"GET": batches.batch}
        self._below_name["/v1/files", "content"] = {"GET": batches.content}
        self._below_name["/v1/batches", "cancel"] = {"POST": batches.cancel}

    def _add_admin(self, native: NativeRoutes) -> None:
        """What is not for clients; all of it is guarded."""
        services, models = self._services, self._models
        caches = CacheRoutes(services.caches, services.responses, services.history)
        admin = AdminRoutes(
            services.chat,
            services.models,
            services.history,
            services.savings,
            services.lines,
            services.settings,
        )
        audit = AuditRoutes(services.audit)
        table: dict[str, tuple[str, Endpoint]] = {
            "/admin/models": ("GET", models.all),
            "/admin/models/status": ("GET", models.status),
            "/admin/models/rescan": ("POST", models.rescan),
            "/admin/cache": ("GET", caches.report),
            "/admin/cache/drift": ("GET", caches.drift),
            "/admin/cache/clear": ("POST", caches.clear),
            "/admin/cache/forget": ("POST", caches.forget),
            "/admin/state": ("GET", admin.state),
            "/admin/savings": ("GET", admin.savings),
            "/admin/logs": ("GET", admin.logs),
            "/admin/reload-config": ("POST", admin.reload),
            "/admin/code": ("POST", admin.issue_code),
            "/admin/memory/clear": ("POST", native.clear_memory),
            "/admin/audit-logs": ("GET", audit.rows),
            "/admin/audit-logs/stats": ("GET", audit.stats),
            "/admin/audit-logs/export": ("GET", audit.export),
        }
        for path, (method, endpoint) in table.items():
            self._table[path] = {method: self._admin(endpoint)}
        self._table["/admin/exchange"] = {"POST": admin.exchange}
        self._table |= {path: {"GET": page_file} for path in page_files()}
        self._table["/admin/settings"] = {
            "GET": self._admin(admin.settings),
            "POST": self._admin(admin.change_settings),
        }
        self._below_name["/admin/requests", "cancel"] = {
            "POST": self._admin(admin.cancel)
        }
        self._named["/native/train"] = {
            "GET": self._admin(native.training),
            "DELETE": self._admin(native.cancel_training),
        }

    def _native(self, native: NativeRoutes) -> dict[str, dict[str, Endpoint]]:
        """Those of one model are for all clients, those of the process are not."""
        memory = {"GET": native.memory, "POST": native.change_memory}
        return {
            "/native/classify": {"POST": self._limited(native.classify)},
            "/native/batch_generate": {"POST": self._limited(native.batch_generate)},
            "/native/attention": {"POST": self._limited(native.attention)},
            "/native/memory": {m: self._admin(e) for m, e in memory.items()},
            "/native/memory/clear": {"POST": self._admin(native.clear_memory)},
            "/native/memory/reset_peak": {"POST": self._admin(native.reset_peak)},
            "/native/device": {"GET": self._admin(native.device)},
            "/native/train": {
                "GET": self._admin(native.trainings),
                "POST": self._admin(native.train),
            },
        }

    def _limited(self, endpoint: Endpoint) -> Endpoint:
        """An endpoint whose requests count for where they come from."""

        def limited(request: Request) -> Response | EventStream:
            if self._services.limits.is_on:
                self._services.limits.begin(request.address)
            return endpoint(request)

        return limited

    def find(self, method: str, path: str) -> tuple[Endpoint, str]:
        """
        The endpoint of a path, and the last part of the path where it is a name.

        Raises:
            NotFound, MethodNotAllowed.
        """
        tail = ""
        if method == "OPTIONS":
            return _options, tail
        methods = self._table.get(path)
        if methods is None and (endpoint := self._models.find(method, path)):
            return self._admin(endpoint), tail
        if methods is None and path.startswith(PUBLIC_PREFIX):
            methods = {"GET": self._models.one}
        head, _, last = path.rpartition("/")
        if methods is None and last and head in self._named:
            methods, tail = self._named[head], unquote(last)
        above, _, name = head.rpartition("/")
        if methods is None and name and (above, last) in self._below_name:
            methods, tail = self._below_name[above, last], unquote(name)
        if methods is None:
            raise NotFound("no such path")
        if method not in methods:
            allowed = ", ".join(methods)
            raise MethodNotAllowed(f"this path takes {allowed}, not {method[:16]}")
        return methods[method], tail

    @staticmethod
    def is_urgent(path: str) -> bool:
        """Whether it is answered however many others are asking."""
        return path in _URGENT or path.startswith(_URGENT_BELOW)

    def problem(
        self, error: SidecarError, request_id: str, path: str
    ) -> tuple[str, dict[str, Any]]:
        """An error as the wire format of a path has it: content type and body."""
        for own, dialect in self._dialects.items():
            if path == own or path.startswith(f"{own}/"):
                return dialect.problem(error, request_id, path)
        return CONTENT_TYPE, problem(error, request_id, path)

    def name(self, path: str) -> str:
        """A path as a metrics label: a known one, or `other`."""
        if path in self._table:
            return path
        for prefix in (PREFIX, PUBLIC_PREFIX):
            if path.startswith(prefix):
                return prefix.rstrip("/")
        head, _, last = path.rpartition("/")
        above = head.rpartition("/")[0]
        if (above, last) in self._below_name:
            return f"{above}/{last}"
        return head if head in self._named else "other"

    def _completion(self, request: Request) -> Response | EventStream:
        asked, how = parse_completion(
            request.json(), request.request_id, request.headers.get("user-agent")
        )
        sender, address = request.sender, request.address
        asked = asked.from_key(sender, address, is_batch=request.is_batch)
        if self._services.limits.is_on:
            self._services.limits.begin(asked.client.limited_as)
        running = self._services.chat.start_completion(
            asked, self._config.timeout_completions_s
        )
        form = CompletionFormat(
            asked.model,
            running.echoes,
            include_usage=how.include_usage,
            answer_id=asked.answer_id,
        )
        if not how.stream:
            body = form.whole(collect(running, request))
            return json_response(body, headers=running.headers)
        return EventStream(
            OpenAIStream(form), running.events(), running.close, headers=running.headers
        )

    def _embeddings(self, request: Request) -> Response:
        asked = parse_embedding(request.json())
        found, num_tokens = self._services.encodings.embed(asked, request.is_connected)
        return json_response(embedding_list(asked, found, num_tokens))

    def _rerank(self, request: Request) -> Response:
        asked = parse_rerank(request.json())
        found, num_tokens = self._services.encodings.rerank(asked, request.is_connected)
        return json_response(rerank_list(asked, found, num_tokens))

    def _stored(self, request: Request) -> Response:
        found = self._services.responses.get(request.sender, request.tail)
        return json_response(found)

    def _unstore(self, request: Request) -> Response:
        self._services.responses.delete(request.sender, request.tail)
        gone = {"id": request.tail, "object": "response", "deleted": True}
        return json_response(gone)

    def _cancel(self, request: Request) -> Response:
        query.given(request, ())
        query.require_no_body(request)
        sender = request.sender
        names = (request.tail, *inner_id(request.tail))
        cancelled = [self._services.chat.cancel(name, sender) for name in names]
        return json_response({"cancelled": any(cancelled), "id": request.tail})

    def _health(self, request: Request) -> Response:
        health = self._services.models.health()
        models = [
            {"id": e.id, "kind": e.kind, "state": e.state, "error": e.load_error}
            for e in health.models
        ]
        body: dict[str, object] = {
            "status": health.status,
            "models": models,
            "memory_limit_bytes": health.memory_limit_bytes,
            "wired": health.wired,
            "failed_tests": health.failed_tests,
        }
        if health.reason:
            body["reason"] = health.reason
        if health.load:
            body["load"] = {
                "done_bytes": health.load.read_bytes,
                "total_bytes": max(health.load.size_bytes, health.load.read_bytes or 0),
            }
        if health.download:
            body["download"] = {
                "done_bytes": health.download.done_bytes,
                "total_bytes": health.download.total_bytes,
            }
        status = 200 if health.is_well else 503
        proof = access.proof(self._config.instance_secret, request.headers)
        return json_response(body, status, proof)

    def _ready(self, request: Request) -> Response:
        """Whether a request would be answered without waiting for a load."""
        health = self._services.models.health()
        headers = {} if health.is_ready else {"Retry-After": "2"}
        status = 200 if health.is_ready else 503
        said = "training" if health.is_paused and health.is_well else health.status
        return json_response({"status": said}, status, headers)

    def _admin(self, endpoint: Endpoint) -> Endpoint:
        def guarded(request: Request) -> Response | EventStream:
            access.check_admin(self._config, request.headers)
            return endpoint(request)

        return guarded

    def _metrics(self, request: Request) -> Response:
        metrics = self._services.metrics
        return Response(metrics.exposition(), content_type=metrics.content_type)


def _forecast(found: Forecast) -> dict[str, Any]:
    return found.as_dict()


def _input_tokens(found: Forecast) -> dict[str, Any]:
    if not found.is_whole:
        maximum = found.max_context_tokens
        raise ContextLengthExceeded(
            f"this model's maximum context length is {maximum} tokens, "
            f"and the prompt has more than {found.prompt_tokens}",
            param="messages",
            num_tokens=found.prompt_tokens,
        )
    return {"input_tokens": found.prompt_tokens}


def _options(request: Request) -> Response:
    return Response(b"", 204, headers={"Allow": "GET, POST, HEAD"})
