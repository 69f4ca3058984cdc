"""(method, path) -> endpoint; each endpoint is parse -> service -> format."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

from sidecar.config.settings import ServerConfig
from sidecar.core.errors import (
    MethodNotAllowed,
    NotFound,
    NotSupported,
    SidecarError,
)
from sidecar.dialects.anthropic_messages.problem import problem as messages_problem
from sidecar.dialects.litellm_header import with_client_facts
from sidecar.dialects.openai_chat.request import format_chat, parse_chat
from sidecar.dialects.openai_chat.stream import ChatChunks, OpenAIStream
from sidecar.dialects.openai_completions import CompletionFormat, parse_completion
from sidecar.dialects.openai_models import model_entry, model_list
from sidecar.dialects.problem import problem
from sidecar.infra.metrics import Metrics
from sidecar.server import access
from sidecar.server.generating import collect, streamed
from sidecar.server.messages import (
    Endpoint,
    EventStream,
    Request,
    Response,
    json_response,
)
from sidecar.server.messages_routes import MessagesRoutes
from sidecar.server.responses_routes import ResponsesRoutes
from sidecar.service.cache_admin import CacheService
from sidecar.service.chat import ChatService
from sidecar.service.models import ModelService
from sidecar.service.stored_responses import StoredResponses

_URGENT = ("/", "/health", "/metrics")
_URGENT_BELOW = ("/admin/", "/v1/cancel/")


@dataclass(frozen=True, slots=True)
class Services:
    """All use cases the routes serve."""

    chat: ChatService
    models: ModelService
    caches: CacheService
    responses: StoredResponses
    metrics: Metrics


class Routes:
    """The table of endpoints."""

    def __init__(self, services: Services, config: ServerConfig) -> None:
        self._services = services
        self._config = config
        self._table: dict[str, dict[str, Endpoint]] = {
            "/": {"GET": self._health},
            "/health": {"GET": self._health},
            "/v1/models": {"GET": self._models},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
            "/v1/cache/probe": {"POST": self._probe},
            "/v1/embeddings": {"POST": _unsupported("embeddings")},
            "/v1/rerank": {"POST": _unsupported("reranking")},
            "/admin/cache": {"GET": self._admin(self._cache)},
            "/admin/cache/drift": {"GET": self._admin(self._drift)},
            "/admin/cache/clear": {"POST": self._admin(self._clear)},
        }
        for short in ("/models", "/chat/completions", "/completions"):
            self._table[short] = self._table["/v1" + short]
        responses = ResponsesRoutes(services.chat, services.responses, config)
        self._table |= MessagesRoutes(services.chat, config).table | responses.table
        self._named: dict[str, dict[str, Endpoint]] = {
            "/v1/cancel": {"POST": self._cancel},
            "/v1/responses": responses.named,
        }
        if config.metrics_enabled:
            self._table["/metrics"] = {"GET": self._metrics}

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
        head, _, last = path.rpartition("/")
        if methods is None and last and head in self._named:
            methods, tail = self._named[head], unquote(last)
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
        if path.startswith("/v1/messages"):
            return "application/json", messages_problem(error, request_id)
        return "application/problem+json", problem(error, request_id, path)

    def name(self, path: str) -> str:
        """A path as a metrics label: a known one, or `other`."""
        if path in self._table:
            return path
        head = path.rpartition("/")[0]
        return head if head in self._named else "other"

    def _chat(self, request: Request) -> Response | EventStream:
        chat, how = parse_chat(
            with_client_facts(request.json(), request.headers),
            request.request_id,
            request.headers.get("user-agent"),
        )
        chat = chat.sent(request.path, access.key_id(request.headers))
        running = self._services.chat.start_chat(
            chat, self._config.timeout_chat_s, request.is_connected
        )
        if not how.stream:
            events = collect(running, request)
            body = format_chat(events, chat.model, chat.options.n)
            return json_response(body, headers=running.headers)
        chunks = ChatChunks(chat.model, chat.options.n, include_usage=how.include_usage)
        # Comments do not pass through LiteLLM.
        keepalive = chunks.keepalive if how.is_plugin else None
        return streamed(OpenAIStream(chunks, keepalive), running)

    def _probe(self, request: Request) -> Response:
        chat, _ = parse_chat(
            request.json(), request.request_id, request.headers.get("user-agent")
        )
        chat = chat.sent(request.path, access.key_id(request.headers))
        return json_response(
            self._services.chat.probe(chat, request.is_connected).as_dict()
        )

    def _completion(self, request: Request) -> Response | EventStream:
        asked, how = parse_completion(
            request.json(), request.request_id, request.headers.get("user-agent")
        )
        asked = asked.from_key(access.key_id(request.headers))
        running = self._services.chat.start_completion(
            asked, self._config.timeout_completions_s
        )
        form = CompletionFormat(
            asked.model, running.echoes, include_usage=how.include_usage
        )
        if not how.stream:
            return json_response(form.whole(collect(running, request)))
        return EventStream(OpenAIStream(form), running.events(), running.close)

    def _cancel(self, request: Request) -> Response:
        found = self._services.chat.cancel(request.tail, access.key_id(request.headers))
        return json_response({"cancelled": found, "id": request.tail})

    def _models(self, request: Request) -> Response:
        entries = self._services.models.entries()
        return json_response(
            model_list(
                [model_entry(e.id, e.aliases, e.max_input_tokens) for e in entries]
            )
        )

    def _health(self, request: Request) -> Response:
        health = self._services.models.health()
        models = [
            {"id": e.id, "state": e.state, "error": e.load_error} for e in health.models
        ]
        body: dict[str, object] = {
            "status": health.status,
            "models": models,
            "memory_limit_bytes": health.memory_limit_bytes,
            "failed_tests": health.failed_tests,
        }
        if health.download:
            body["download"] = {
                "done_bytes": health.download.done_bytes,
                "total_bytes": health.download.total_bytes,
            }
        status = 200 if health.status == "ok" else 503
        proof = access.proof(self._config.instance_secret, request.headers)
        return json_response(body, status, proof)

    def _admin(self, endpoint: Endpoint) -> Endpoint:
        def guarded(request: Request) -> Response | EventStream:
            access.check_admin(self._config, request.headers)
            return endpoint(request)

        return guarded

    def _cache(self, request: Request) -> Response:
        asked = parse_qs(request.query).get("check", [])
        check = bool({"1", "true"} & set(asked))
        return json_response(self._services.caches.report(check=check))

    def _drift(self, request: Request) -> Response:
        return json_response({"places": self._services.caches.drift()})

    def _clear(self, request: Request) -> Response:
        self._services.caches.clear()
        self._services.responses.clear()
        return json_response({"cleared": True})

    def _metrics(self, request: Request) -> Response:
        metrics = self._services.metrics
        return Response(metrics.exposition(), content_type=metrics.content_type)


def _options(request: Request) -> Response:
    return Response(b"", 204, headers={"Allow": "GET, POST, HEAD"})


def _unsupported(what: str) -> Endpoint:
    def endpoint(request: Request) -> Response:
        raise NotSupported(f"{what} need an engine that this server does not have")

    return endpoint
