"""
What the client said that LiteLLM's translation loses, for the sidecar's `x_mlx`.

The proxy keeps each client's own request as `proxy_server_request` (url, headers,
body). Its dialect decides where in the body a fact stands. In the SDK there is no
such request, and LiteLLM's parameters are all there is.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from litellm_mlx import google_body, proxy_gate
from litellm_mlx.errors import refused
from litellm_mlx.extra_body import fill
from litellm_mlx.json_objects import as_object

Dialect = Literal["chat", "messages", "responses", "completions", "sdk"]
Json = Mapping[str, object]

_DIALECT_OF_PATH: tuple[tuple[str, Dialect], ...] = (
    ("/chat/completions", "chat"),
    ("/messages", "messages"),
    ("/responses", "responses"),
    ("/completions", "completions"),
)
# Dropped by LiteLLM where it translates.
_LOST_FIELDS = ("top_k", "prompt_cache_retention")
# Of a body that LiteLLM sends on as it is: what goes through, or is too much for a
# header. All else may have been cut on the way.
_SENT_ON = frozenset(
    (
        "model", "messages", "system", "input", "instructions", "tools", "tool_choice",
        "stream", "max_tokens", "max_output_tokens", "stop_sequences", "metadata",
        "litellm_metadata", "previous_response_id", "prompt_cache_key", "include",
        "store", "text", "prompt", "extra_body", "context_management", "mcp_servers",
        "output_format", "contents", "config", "systemInstruction", "generationConfig",
        "toolConfig",
        "safetySettings", "system_instruction", "generation_config", "tool_config",
    )
)  # fmt: skip
_OUR_HEADERS = frozenset(
    (
        "x-mlx", "authorization", "x-api-key", "x-request-id", "host", "content-length",
        "connection", "transfer-encoding",
    )
)  # fmt: skip
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110
_WHO_ASKS = ("session", "key", "key_checked", "user_agent")
# The user or the team where a custom authority names no key.
_KEY_NAMES = (
    "user_api_key_hash", "user_api_key", "user_api_key_user_id", "user_api_key_team_id",
)  # fmt: skip
_SESSION_HEADERS = ("session-id", "session_id")  # Codex; LiteLLM reads others
_MAX_TTFT = "mlx_max_ttft_s"
_MAX_HEADER_CHARS = 16 * 1024
_MAX_NAME_CHARS = 256  # of who asks: the sidecar keeps no more of it either
_TOO_LONG = (
    "is too long for this route: what LiteLLM cuts of a body may have 15,000 "
    "characters of ASCII JSON in all"
)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """What the client itself sent; empty and dialect `sdk` where no proxy stood."""

    dialect: Dialect = "sdk"
    headers: Json = field(default_factory=dict)
    body: Json = field(default_factory=dict)


def client_request(litellm_params: Json) -> ClientRequest:
    """Read the client's own request out of LiteLLM's parameters."""
    kept = as_object(litellm_params.get("proxy_server_request"))
    if not kept:
        return ClientRequest()
    path = urlsplit(str(kept.get("url", ""))).path.rstrip("/")
    ends = (dialect for end, dialect in _DIALECT_OF_PATH if path.endswith(end))
    return ClientRequest(
        dialect=next(ends, "chat"),
        headers=as_object(kept.get("headers")),
        body=as_object(kept.get("body")),
    )


def private_block(client: ClientRequest, litellm_params: Json, params: Json) -> Json:
    """
    Build `x_mlx`: who asks, and how the client itself asked for thinking.

    Facts the client did not state are left out.

    Args:
        params: LiteLLM's `optional_params`, the source in the SDK.
    """
    source = client.body or params
    facts: dict[str, object] = {
        "session": _session(client, litellm_params),
        "key": _key_name(litellm_params),
        "key_checked": proxy_gate.has_keys() or None,
        "user_agent": client.headers.get("user-agent"),
        "thinking": source.get("thinking"),
        "effort": _effort(source),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def native_header(kwargs: Json) -> str:
    """
    What goes beside a body that LiteLLM sends on as it is: ASCII JSON.

    Who asks, as in `x_mlx`, and under `body` the fields that LiteLLM may have cut.

    Args:
        kwargs: of the call, as its deployment hook gets them.
    Raises:
        litellm.BadRequestError: a field that LiteLLM cuts does not fit: the sidecar
            would not know that it was asked for.
    """
    metadata = as_object(kwargs.get("litellm_metadata"))
    if "user_api_key_hash" not in metadata:  # Google's route keeps it elsewhere
        metadata = as_object(kwargs.get("metadata"))
    params = {**kwargs, "metadata": metadata}
    params["litellm_session_id"] = metadata.get("session_id")
    client = client_request(params)
    block = private_block(client, params, client.body)
    # All else that the block says stands in the body itself.
    facts = {name: _bounded(name, block[name]) for name in _WHO_ASKS if name in block}
    cut = {k: v for k, v in client.body.items() if _may_be_cut(k)}
    if how := as_object(cut.pop("output_config", None)):  # its form goes through
        cut["output_config"] = {k: v for k, v in how.items() if k != "format"}
    cut |= google_body.left_out(client.body)
    cut = _with_short_ids(fill(cut, as_object(client.body.get("extra_body"))))
    cut.pop("x_mlx", None)  # ours to say
    if kwargs.get(_MAX_TTFT) is not None:  # of the deployment, if not of the client
        cut.setdefault(_MAX_TTFT, kwargs[_MAX_TTFT])
    header = json.dumps({**facts, "body": cut}, default=str)
    if len(header) > _MAX_HEADER_CHARS:
        raise refused(_longest(cut), _TOO_LONG)
    return header


def without_ours(headers: Json) -> dict[str, str]:
    """Headers that a client's body asks for, less those by which we say who asks."""
    return {
        str(name): str(value)
        for name, value in headers.items()
        if _TOKEN.fullmatch(str(name)) and str(name).lower() not in _OUR_HEADERS
    }


def without_ours_within(specific: object) -> object:
    """The same of LiteLLM's headers for one provider, of which there may be several."""
    if isinstance(specific, list):
        return [without_ours_within(one) for one in specific]
    if not isinstance(specific, Mapping):
        return specific
    headers = as_object(specific.get("extra_headers"))
    return {**specific, "extra_headers": without_ours(headers)}


def _longest(body: Json) -> str:
    """The field that takes most room in a header."""
    return max(body, key=lambda name: len(json.dumps({name: body[name]}, default=str)))


def _with_short_ids(body: Json) -> dict[str, object]:
    """Sessions and their like as short as the sidecar keeps them."""
    short = {k: _short(v) if _names_who_asks(k) else v for k, v in body.items()}
    if isinstance(within := short.get("extra_body"), Mapping):
        short["extra_body"] = _with_short_ids(within)
    return short


def _names_who_asks(name: str) -> bool:
    return name.endswith("_id") or name in ("session", "conversation", "branch")


def _bounded(name: str, fact: object) -> object:
    """Who asks, in the few characters that the sidecar keeps of it."""
    if isinstance(fact, dict | list):  # a session that is no text is no other's either
        fact = json.dumps(fact, default=str)
    return str(fact)[:_MAX_NAME_CHARS] if name == "user_agent" else _short(fact)


def _short(name: object) -> object:
    """A long name as its hash, as the sidecar would have it (core.requests)."""
    if not isinstance(name, str) or len(name) <= _MAX_NAME_CHARS:
        return name
    return "sha256:" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def _may_be_cut(name: str) -> bool:
    return name not in _SENT_ON and not name.startswith(("litellm_", "_litellm"))


def lost_fields(client: ClientRequest) -> Json:
    """The fields of the client's body that LiteLLM drops."""
    return {name: client.body[name] for name in _LOST_FIELDS if name in client.body}


def _session(client: ClientRequest, litellm_params: Json) -> object:
    # LiteLLM takes the trace id for a session where there is none: new each turn.
    session = litellm_params.get("litellm_session_id")
    trace_id = str(client.headers.get("traceparent", "")).split("-")[1:2]
    if session is not None and [session] != trace_id:
        return session
    named = (client.headers.get(name) for name in _SESSION_HEADERS)
    return next(filter(None, named), None)


def _key_name(litellm_params: Json) -> str | None:
    """A name for the proxy key a request came with: values are not shared across."""
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
