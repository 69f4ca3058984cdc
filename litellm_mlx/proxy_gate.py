"""
The gate in front of LiteLLM's app: refuses before LiteLLM sees a request, and sees
which clients leave.

Installed by the provider's import, which LiteLLM's start does, so that it is there
under the launcher and under a plain `litellm --config` alike.
"""

import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from litellm_mlx.admission import Asked, Policy, refusal
from litellm_mlx.asgi import App, Message, Receive, Scope, Send
from litellm_mlx.body_gate import BodyGate
from litellm_mlx.departures import WatchedRequest
from litellm_mlx.identity import CHALLENGE, PROOF, proof_of
from litellm_mlx.refusals import answer
from litellm_mlx.settings import current_settings

_SERVER = "litellm.proxy.proxy_server"
_HEALTH = "/health/liveliness"
_POLICY_VIOLATION = 1008  # RFC 6455
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
        secret: by which the health route proves who answers; None: it does not.
    """

    def __init__(
        self, app: App, policy: Callable[[], Policy], secret: str | None
    ) -> None:
        self._app = app
        self._policy = policy
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer why not."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        asked = _asked(scope)
        why = refusal(asked, self._policy())
        if why is None and scope["type"] == "websocket":
            await self._app(scope, receive, send)
        elif why is None:
            watched = WatchedRequest(receive, self._proving(asked, send))
            await watched.run(self._app, scope)
        elif scope["type"] == "websocket":
            await receive()  # the wish to connect
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await answer(send, asked.path, why)

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

    def policy() -> Policy:
        general = server.general_settings or {}
        has_others = server.prisma_client or server.user_custom_auth
        return Policy(
            server.master_key,
            bool(has_others or any(general.get(name) for name in _OTHER_AUTHORITIES)),
            settings.origins,
            settings.hosts,
        )

    secret = settings.instance_secret
    if server.app.middleware_stack is None:
        server.app.add_middleware(BodyGate)  # the last one added is the first asked
        server.app.add_middleware(ProxyGate, policy=policy, secret=secret)
    else:  # it was started before it read its config, and so before this
        inner = BodyGate(server.app.middleware_stack)
        server.app.middleware_stack = ProxyGate(inner, policy, secret)


def _is_installed(app: Any) -> bool:
    is_inside = any(item.cls is ProxyGate for item in app.user_middleware)
    return is_inside or isinstance(app.middleware_stack, ProxyGate)


def _asked(scope: Scope) -> Asked:
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        # Two of one name: none of them may say that all is well.
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    keys = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("key", [""])
    return Asked(scope.get("method", "GET"), path, headers, keys[0])
