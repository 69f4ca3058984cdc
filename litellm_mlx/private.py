"""
What the client said that LiteLLM's translation loses, for the sidecar's `x_mlx`.

The proxy keeps each client's own request as `proxy_server_request` (url, headers,
body). Its dialect decides where in the body a fact stands. In the SDK there is no
such request, and LiteLLM's parameters are all there is.
"""

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from litellm_mlx import proxy_gate
from litellm_mlx.extra_body import fill

Dialect = Literal["chat", "messages", "responses", "completions", "sdk"]
Json = Mapping[str, object]

_DIALECT_OF_PATH: tuple[tuple[str, Dialect], ...] = (
    ("/chat/completions", "chat"),
    ("/messages", "messages"),
    ("/responses", "responses"),
    ("/completions", "completions"),
)
# Dropped by LiteLLM on the way; all mean the same at the sidecar as at the client.
_LOST_FIELDS = (
    "user",
    "tags",
    "priority",
    "prompt_cache_retention",
    "truncation",
    "include",
    "store",
    "context_management",
    "output_config",
    "top_k",
)
_HEADERS_KEPT = {
    "user_agent": "user-agent",
    "agent": "x-claude-code-agent-id",
    "betas": "anthropic-beta",  # comma-separated, as it came
}


# Of a body that LiteLLM sends on as it is: what goes through, or is too much for a
# header. All else may have been cut on the way.
_SENT_ON = frozenset(
    (
        "model", "messages", "system", "input", "instructions", "tools", "tool_choice",
        "stream", "max_tokens", "max_output_tokens", "stop_sequences", "metadata",
        "litellm_metadata", "previous_response_id", "prompt_cache_key", "include",
        "store", "text", "prompt", "extra_body", "context_management", "mcp_servers",
        "contents", "config", "systemInstruction", "generationConfig", "toolConfig",
        "safetySettings",
    )
)  # fmt: skip
_OUR_HEADERS = frozenset(
    (
        "x-mlx", "authorization", "x-api-key", "x-request-id", "host", "content-length",
        "connection", "transfer-encoding",
    )
)  # fmt: skip
_WHO_ASKS = ("session", "key", "key_checked", "user_agent")
# The user or the team where a custom authority names no key.
_KEY_NAMES = (
    "user_api_key_hash", "user_api_key", "user_api_key_user_id", "user_api_key_team_id",
)  # fmt: skip
_MAX_TTFT = "mlx_max_ttft_s"
_MOST_HEADER_CHARS = 16 * 1024


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What the client itself sent; empty and dialect `sdk` where no proxy stood."""

    dialect: Dialect = "sdk"
    route: str | None = None
    headers: Json = field(default_factory=dict)
    body: Json = field(default_factory=dict)


def client_request(litellm_params: Json) -> ClientRequest:
    """Read the client's own request out of LiteLLM's parameters."""
    kept = as_object(litellm_params.get("proxy_server_request"))
    if not kept:
        return ClientRequest()
    route = urlsplit(str(kept.get("url", ""))).path
    path = route.rstrip("/")
    ends = (dialect for end, dialect in _DIALECT_OF_PATH if path.endswith(end))
    return ClientRequest(
        dialect=next(ends, "chat"),
        route=route,
        headers=as_object(kept.get("headers")),
        body=as_object(kept.get("body")),
    )


def private_block(client: ClientRequest, litellm_params: Json, params: Json) -> Json:
    """
    Build `x_mlx`, without the call id. Facts the client did not state are left out.

    Args:
        params: LiteLLM's `optional_params`, the source in the SDK.
    """
    source = client.body or params
    facts: dict[str, object] = {
        "session": _session(client, litellm_params),
        "key": _key_name(litellm_params),
        "key_checked": proxy_gate.has_keys() or None,
        "route": client.route,
        "dialect": client.dialect,
        "thinking": source.get("thinking"),
        "effort": _effort(source),
        "cache_control": list(_breakpoints(source)),
        "disable_parallel": _is_parallel_disabled(source) or None,
        "is_error_ids": list(_failed_tool_ids(source)),
    }
    for name, header in _HEADERS_KEPT.items():
        facts[name] = client.headers.get(header)
    return {name: fact for name, fact in facts.items() if fact not in (None, [])}


def native_header(kwargs: Json) -> str:
    """
    What goes beside a body that LiteLLM sends on as it is: ASCII JSON.

    Who asks, as in `x_mlx`, and under `body` the fields that LiteLLM may have cut.

    Args:
        kwargs: of the call, as its deployment hook gets them.
    """
    metadata = as_object(kwargs.get("litellm_metadata"))
    if "user_api_key_hash" not in metadata:  # Google's route keeps it elsewhere
        metadata = as_object(kwargs.get("metadata"))
    params = {**kwargs, "metadata": metadata}
    params["litellm_session_id"] = metadata.get("session_id")
    client = client_request(params)
    block = private_block(client, params, client.body)
    # All else that the block says stands in the body itself.
    facts = {name: block[name] for name in _WHO_ASKS if name in block}
    cut = {k: v for k, v in client.body.items() if _may_be_cut(k)}
    cut = fill(cut, as_object(client.body.get("extra_body")))
    cut.pop("x_mlx", None)  # ours to say
    if kwargs.get(_MAX_TTFT) is not None:  # of the deployment, if not of the client
        cut.setdefault(_MAX_TTFT, kwargs[_MAX_TTFT])
    for body in (cut, {}):
        header = json.dumps({**facts, "body": body}, default=str)
        if len(header) <= _MOST_HEADER_CHARS:
            return header
    session = str(facts.get("session") or "")
    short = hashlib.sha256(session.encode("utf-8", "surrogatepass")).hexdigest()
    kept = {name: facts.get(name) for name in ("key", "key_checked")}
    return json.dumps({"session": short, **kept})


def without_ours(headers: Json) -> dict[str, str]:
    """Headers that a client's body asks for, less those by which we say who asks."""
    return {
        str(name): str(value)
        for name, value in headers.items()
        if str(name).lower() not in _OUR_HEADERS
    }


def _may_be_cut(name: str) -> bool:
    return name not in _SENT_ON and not name.startswith(("litellm_", "_litellm"))


def lost_fields(client: ClientRequest) -> Json:
    """The fields of the client's body that LiteLLM drops, under their chat names."""
    found = {name: client.body[name] for name in _LOST_FIELDS if name in client.body}
    verbosity = as_object(client.body.get("text")).get("verbosity")
    if client.dialect == "responses" and verbosity is not None:
        found["verbosity"] = verbosity
    return found


def as_object(value: object) -> Json:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _session(client: ClientRequest, litellm_params: Json) -> object:
    # LiteLLM takes the trace id for a session where there is none: new each turn.
    session = litellm_params.get("litellm_session_id")
    trace_id = str(client.headers.get("traceparent", "")).split("-")[1:2]
    if session is None or [session] == trace_id:
        return client.body.get("prompt_cache_key")
    return session


def _key_name(litellm_params: Json) -> str | None:
    """A name for the proxy key a request came with: values are not lent across."""
    metadata = as_object(litellm_params.get("metadata"))
    for name in _KEY_NAMES:
        key = metadata.get(name)
        if isinstance(key, str) and key:
            return hashlib.sha256(key.encode()).hexdigest()[:16]
    # A key that LiteLLM knows by no name is nobody's: not even its own next request's.
    return secrets.token_hex(8) if proxy_gate.has_keys() else None


def _effort(source: Json) -> object:
    for name in ("output_config", "reasoning"):
        effort = as_object(source.get(name)).get("effort")
        if effort is not None:
            return effort
    effort = source.get("reasoning_effort")
    return as_object(effort).get("effort") or effort


def _is_parallel_disabled(source: Json) -> bool:
    choice = as_object(source.get("tool_choice"))
    if choice.get("disable_parallel_tool_use") is True:
        return True
    return source.get("parallel_tool_calls") is False


def _breakpoints(source: Json) -> Iterator[Json]:
    for place in ("tools", "system", "messages"):
        for index, item in enumerate(_objects(source.get(place))):
            yield from _mark(item, {"in": place, "index": index})
            if place == "messages":
                for part, block in enumerate(_objects(item.get("content"))):
                    yield from _mark(block, {"in": place, "index": index, "part": part})


def _mark(item: Json, place: Json) -> Iterator[Json]:
    mark = as_object(item.get("cache_control"))
    if mark:
        ttl = {"ttl": mark["ttl"]} if "ttl" in mark else {}
        yield {**place, **ttl}


def _failed_tool_ids(source: Json) -> Iterator[object]:
    for message in _objects(source.get("messages")):
        for block in _objects(message.get("content")):
            if block.get("type") == "tool_result" and block.get("is_error") is True:
                yield block.get("tool_use_id")


def _objects(value: object) -> Iterator[Json]:
    # Places are counted, so whatever is no object still takes its place.
    yield from (as_object(item) for item in value) if isinstance(value, list) else ()
