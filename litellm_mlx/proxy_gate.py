"""
The ASGI app in front of LiteLLM's: refuses by the rules of access.py, and sees
which clients leave.

Installed by the provider's import, which LiteLLM's start does, so that it is there
under the launcher and under a plain `litellm --config` alike.
"""

import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from litellm_mlx import (
    google_stream,
    ignored_header,
    line_breaks,
    lost_refusals,
    response_ids,
)
from litellm_mlx.access import (
    AdmissionPolicy,
    Asked,
    given_key,
    is_model_route,
    refusal,
)
from litellm_mlx.asgi import App, Message, Receive, Scope, Send
from litellm_mlx.departures import WatchedRequest
from litellm_mlx.google_body import makes_an_answer, served_path
from litellm_mlx.head_fields import head_fault
from litellm_mlx.identity import CHALLENGE, PROOF, proof_of
from litellm_mlx.live_models import LiveModels
from litellm_mlx.model_routes import asks_a_model
from litellm_mlx.refusals import answer, is_google, readable
from litellm_mlx.request_body import (
    BadBody,
    Body,
    Disconnected,
    ProxyBodyBudget,
    ProxyBodyHead,
    is_written,
)
from litellm_mlx.settings import Settings, current_settings
from litellm_mlx.wrong_keys import Caller, WrongKeys

_SERVER = "litellm.proxy.proxy_server"
_HEALTH = "/health/liveliness"
_POLICY_VIOLATION = 1008  # RFC 6455
_TOO_MANY = "too many wrong keys come from your address: ask again in a second"
_FROM_NETWORK = b"access-control-request-private-network"
_STATUS = {"forbidden": 403, "unauthorized": 401}
# Settings of LiteLLM's that let in keys which we cannot know.
_OTHER_AUTHORITIES = (
    "enable_jwt_auth", "enable_oauth2_auth", "enable_oauth2_proxy_auth",
    "litellm_key_header_name", "custom_auth",
)  # fmt: skip


class ProxyGate:
    """
    An ASGI app before another.

    Args:
        policy: asked anew at each request: LiteLLM settles its key while it starts.
        settings: the secret by which the health route proves who answers (None: it
            does not), and how large a body may be.
    """

    def __init__(
        self, app: App, policy: Callable[[], AdmissionPolicy], settings: Settings
    ) -> None:
        self._app = app
        self._policy = policy
        self._secret = settings.instance_secret
        self._bodies = ProxyBodyBudget(settings.max_body_bytes)
        self._live = LiveModels(settings)
        self._wrong_keys = WrongKeys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer why not."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        self._live.start()  # here, as the loop runs here
        scope = {**scope, "path": served_path(scope["path"])}
        asked, policy = _asked(scope), self._policy()
        if (origin := asked.headers.get("origin")) in policy.origins:
            asks = _FROM_NETWORK.decode() in asked.headers  # LiteLLM says no to it
            kept = [item for item in scope["headers"] if item[0] != _FROM_NETWORK]
            scope = {**scope, "headers": kept}
            send = readable(str(origin), send, is_from_network=asks)
        caller = Caller((scope.get("client") or ("",))[0], given_key(asked))
        if self._wrong_keys.are_too_many(caller):
            await self._wrong_keys.wait()
            await _refuse(scope, receive, send, 429, _TOO_MANY)
            return
        if caller.key:
            is_keyed = is_model_route(asked.path)
            send = self._wrong_keys.slowed(caller, send, is_keyed=is_keyed)
        why = refusal(asked, policy)
        if why is not None:
            await _refuse(scope, receive, send, _STATUS[why.kind], why.message)
        elif scope["type"] == "websocket":
            # On the models' routes a body could come in pieces that nobody checks.
            if is_model_route(asked.path):
                await _refuse(scope, receive, send, 403, "")
            else:
                await self._app(scope, receive, send)
        elif response_ids.is_forged(asked.path):
            await answer(send, asked.path, 404, "no stored response has this id")
        else:
            watched = WatchedRequest(receive, self._proving(asked, send))
            await watched.run(self._passing_on(asked), scope)

    def _passing_on(self, asked: Asked) -> App:
        """LiteLLM's app, which is given the bodies that were read and are right."""
        kind = asked.headers.get("content-type", "")
        is_served = is_model_route(asked.path)
        asks = is_served or (is_written(asked.method) and asks_a_model(asked.path))
        head = ProxyBodyHead(asked.method, asked.path, kind, asks_a_model=asks)
        # LiteLLM parses JSON before it asks for a key. Files of a cloud's go through.
        is_json = head.is_json and is_written(asked.method)
        is_read = is_served or head.is_unchecked or is_json

        async def passing_on(scope: Scope, receive: Receive, send: Send) -> None:
            body = Body(head, self._bodies)
            send = google_stream.readable(asked.path, line_breaks.escaped(send))
            try:
                if is_served or (asks and not head.is_multipart):
                    _check_head(asked, head)
                if is_read:
                    whole = await body.read(receive)
                    receive = _replaying(whole, receive)
                    if makes_an_answer(asked.path):
                        send = ignored_header.on_googles_route(whole, send)
                await lost_refusals.run(self._app, scope, receive, send, asked.path)
            except BadBody as why:
                await answer(send, asked.path, why.status, str(why), why.param)
            except Disconnected:
                return
            finally:
                body.close()

        return passing_on

    def _proving(self, asked: Asked, send: Send) -> Send:
        given = asked.headers.get(CHALLENGE)
        if self._secret is None or given is None or asked.path != _HEALTH:
            return send
        proof = (PROOF.encode(), proof_of(self._secret, given).encode())

        async def proving(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), proof]
            await send(message)

        return proving


def has_keys() -> bool:
    """Whether a LiteLLM proxy runs here that asks for keys: else they are made up."""
    server = sys.modules.get(_SERVER)
    return server is not None and bool(
        server.master_key or server.prisma_client or server.user_custom_auth
    )


def install() -> None:
    """Put the gate before LiteLLM's app, once; nothing outside its proxy."""
    server = sys.modules.get(_SERVER)
    if server is None or _is_installed(server.app):
        return
    settings = current_settings()

    def policy() -> AdmissionPolicy:
        general = server.general_settings or {}
        has_others = server.prisma_client or server.user_custom_auth
        return AdmissionPolicy(
            server.master_key,
            bool(has_others or any(general.get(name) for name in _OTHER_AUTHORITIES)),
            settings.origins,
            settings.hosts,
        )

    if server.app.middleware_stack is None:
        server.app.add_middleware(ProxyGate, policy=policy, settings=settings)
    else:  # it was started before it read its config, and so before this
        gate = ProxyGate(server.app.middleware_stack, policy, settings)
        server.app.middleware_stack = gate


def _is_installed(app: Any) -> bool:
    is_inside = any(item.cls is ProxyGate for item in app.user_middleware)
    return is_inside or isinstance(app.middleware_stack, ProxyGate)


async def _refuse(
    scope: Scope, receive: Receive, send: Send, status: int, message: str
) -> None:
    """Answer why not, by status and words; a web socket is closed without any."""
    if scope["type"] == "websocket":
        await receive()  # the wish to connect
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
    else:
        await answer(send, scope["path"], status, message)


def _check_head(asked: Asked, head: ProxyBodyHead) -> None:
    """
    Let no head of a request for a model hold or mislead LiteLLM.

    Raises:
        BadBody: saying which field, and what it must be.
    """
    fault = head_fault(asked.path, asked.models_in_query, asked.headers)
    if fault is not None:
        name, why = fault
        raise BadBody(400, why, name)
    if head.is_form:
        raise BadBody(400, "the content type must be application/json")


def _asked(scope: Scope) -> Asked:
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        # Two of one name: none of them may say that all is well.
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    text = scope.get("query_string", b"").decode("latin-1")
    query = parse_qs(text, keep_blank_values=True)
    # On other routes LiteLLM does not look there: it would find no key at all.
    key = query.get("key", [""])[0] if is_google(path) else ""
    models = tuple(query.get("model", ()))
    return Asked(scope.get("method", "GET"), path, headers, key, models)


def _replaying(whole: bytes, receive: Receive) -> Receive:
    """A body that was read, once, and then whatever comes."""
    messages: list[Message] = [
        {"type": "http.request", "body": whole, "more_body": False}
    ]

    async def replaying() -> Message:
        return messages.pop() if messages else await receive()

    return replaying
