"""
LiteLLM's call as the sidecar's request, and the sidecar's JSON as LiteLLM's objects.

Pure: what is sent and what comes back are values here; client.py moves the bytes.
"""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import quote

import httpx
import litellm
import orjson

from litellm_mlx import errors
from litellm_mlx.extra_body import fill
from litellm_mlx.ignored_header import IGNORED
from litellm_mlx.json_objects import as_object
from litellm_mlx.private import (
    ClientRequest,
    client_request,
    lost_fields,
    private_block,
    without_ours,
)
from litellm_mlx.settings import Settings

Json = Mapping[str, object]

# Transport matters between LiteLLM and a provider; none is the model's business.
_NOT_FORWARDED = frozenset(
    {"stream", "stream_options", "max_retries", "extra_body", "extra_headers", "x_mlx"}
)
_NOT_FROM_EXTRA_BODY = _NOT_FORWARDED | {"model", "messages", "input"}
# Keys that LiteLLM adds to a client's metadata: in the proxy; by Router and SDK.
_PROXY_METADATA = r"headers|used_client_oauth_token|litellm_.*|user_api_key.*|trace_id"
_SDK_METADATA = (
    r"requester_.*|hidden_.*|model_group.*|deployment.*|model_info|api_base"
    r"|caching_groups|endpoint|previous_models|attempted_.*|max_retries|_.*"
)
_INTERNAL_METADATA = re.compile(_PROXY_METADATA)
_INTERNAL_SDK_METADATA = re.compile(f"{_PROXY_METADATA}|{_SDK_METADATA}")
_OUR_HEADERS = ("x-mlx-", IGNORED)
_UNSAFE_IN_ID = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class SidecarCall:
    """
    One POST to the sidecar.

    Args:
        call_id: names this attempt alone, in `X-Request-ID` and for its cancel.
        read_timeout_s: longest silence while the answer is awaited or read.
        can_take_empty: an empty delta reaches the client as one. Translated to
            other dialects it would end a thinking block and open an empty text.
    """

    model: str
    url: str
    cancel_url: str
    call_id: str
    headers: Mapping[str, str]
    content: bytes
    read_timeout_s: float
    can_take_empty: bool = False


def chat_call(call: Json, settings: Settings, *, stream: bool) -> SidecarCall:
    """
    Translate what LiteLLM hands to a chat hook; does not change it.

    A text completion comes as a chat, each prompt a user's message: it is none.
    """
    litellm_params = as_object(call.get("litellm_params"))
    params = as_object(call.get("optional_params"))
    client = client_request(litellm_params)
    call_id = attempt_id(litellm_params)
    said = {**lost_fields(client), **_forwarded(params, client)}
    is_text = litellm_params.get("text_completion") is True
    body: dict[str, object] = {
        "model": call["model"],
        **(_prompts(call["messages"]) if is_text else {"messages": call["messages"]}),
        "stream": stream,
        **fill(said, _literal(client)),
    }
    if stream:
        wanted = as_object(params.get("stream_options"))
        body["stream_options"] = {**wanted, "include_usage": True}
    metadata = _client_metadata(client, litellm_params)
    if metadata:
        body["metadata"] = metadata
    private = private_block(client, litellm_params, _forwarded(params, client))
    body["x_mlx"] = private
    path = "/completions" if is_text else "/chat/completions"
    sent = _sidecar_call(call, settings, path, call_id, body)
    return replace(sent, can_take_empty=client.dialect in ("chat", "sdk"))


def embedding_call(call: Json, settings: Settings) -> SidecarCall:
    """Translate what LiteLLM hands to an embedding hook; does not change it."""
    call_id = attempt_id(as_object(call.get("litellm_params")))
    params = _forwarded(as_object(call.get("optional_params")), ClientRequest())
    body = {"model": call["model"], "input": call["input"], **params}
    return _sidecar_call(call, settings, "/embeddings", call_id, body)


def completion_from(
    response: httpx.Response, model: str
) -> litellm.ModelResponse | litellm.TextCompletionResponse:
    """Read a whole answer; the sidecar's own headers go to the client too."""
    answer = _answer_object(response, model)
    if not answer.get("choices"):
        raise errors.malformed(model, "an answer without choices")
    is_text = answer.get("object") == "text_completion"
    kind = litellm.TextCompletionResponse if is_text else litellm.ModelResponse
    result = kind(**answer)
    ours = {k: v for k, v in response.headers.items() if k.startswith(_OUR_HEADERS)}
    if ours:
        result._hidden_params["additional_headers"] = ours
    return result


def embeddings_from(response: httpx.Response, model: str) -> litellm.EmbeddingResponse:
    """Read an embedding answer."""
    return litellm.EmbeddingResponse(**_answer_object(response, model))


def attempt_id(litellm_params: Json) -> str:
    """A name for one attempt at a call, for its cancel."""
    # LiteLLM's own id comes again with each retry, and a client may choose it: a
    # late cancel must not hit another request.
    given = str(litellm_params.get("litellm_call_id") or "call")
    return f"{_UNSAFE_IN_ID.sub('_', given)[:80]}-{uuid.uuid4().hex[:12]}"


def cancel_url(api_base: object, settings: Settings, call_id: str) -> str:
    """Where the sidecar is asked to stop: nobody waits for a call any more."""
    base = str(api_base or settings.api_base).rstrip("/")
    return f"{base.removesuffix('/v1')}/v1/cancel/{quote(call_id, safe='')}"


def authorization(api_key: object, settings: Settings) -> dict[str, str]:
    """The header by which the sidecar lets a call in; none if it asks for none."""
    key = api_key or settings.api_key
    return {"Authorization": f"Bearer {key}"} if key else {}


def _answer_object(response: httpx.Response, model: str) -> Json:
    try:
        answer = as_object(orjson.loads(response.content))
    except ValueError:
        answer = {}
    if answer.get("error"):
        raise errors.from_delimiters(answer["error"], model)
    if not answer:
        raise errors.malformed(model, "an answer that is no JSON object")
    return answer


def _sidecar_call(
    call: Json, settings: Settings, path: str, call_id: str, body: Json
) -> SidecarCall:
    base = str(call.get("api_base") or settings.api_base).rstrip("/")
    headers = {
        **without_ours(as_object(call.get("headers"))),
        "Content-Type": "application/json",
        "X-Request-ID": call_id,
        **authorization(call.get("api_key"), settings),
    }
    return SidecarCall(
        model=str(call["model"]),
        url=base + path,
        cancel_url=cancel_url(base, settings, call_id),
        call_id=call_id,
        headers=headers,
        content=_encoded(body),
        read_timeout_s=_read_timeout_s(call.get("timeout"), settings),
    )


def _prompts(messages: object) -> Json:
    texts = [as_object(message).get("content") for message in _items(messages)]
    return {"prompt": texts[0] if len(texts) == 1 else texts}


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _forwarded(params: Json, client: ClientRequest) -> dict[str, object]:
    said = {k: v for k, v in params.items() if v is not None}
    found = {k: v for k, v in said.items() if k not in _NOT_FORWARDED}
    extra = as_object(params.get("extra_body"))
    literal = _literal(client)
    for name in extra.keys() - literal.keys() - _NOT_FROM_EXTRA_BODY:
        found.setdefault(name, extra[name])  # of the deployment, or of an SDK's caller
    return {k: v for k, v in found.items() if v is not None}


def _literal(client: ClientRequest) -> Json:
    """What the client's body says under `extra_body`, less what it does not settle."""
    extra = as_object(client.body.get("extra_body"))
    return {k: v for k, v in extra.items() if k not in _NOT_FROM_EXTRA_BODY}


def _client_metadata(client: ClientRequest, litellm_params: Json) -> Json:
    ours = as_object(litellm_params.get("metadata"))
    requested = as_object(ours.get("requester_metadata"))
    internal = _INTERNAL_METADATA
    if not requested and client.dialect == "sdk":
        requested, internal = ours, _INTERNAL_SDK_METADATA
    found = requested or as_object(client.body.get("metadata"))
    return {k: v for k, v in found.items() if not internal.fullmatch(k)}


def _read_timeout_s(timeout: object, settings: Settings) -> float:
    wanted = timeout.read if isinstance(timeout, httpx.Timeout) else timeout
    if not isinstance(wanted, int | float):
        return settings.request_timeout_s
    return min(float(wanted), settings.request_timeout_s)


def _encoded(body: Json) -> bytes:
    try:
        return orjson.dumps(body, default=_plain)
    except TypeError:  # a lone surrogate, or an integer beyond 64 bits
        return json.dumps(body, default=_plain).encode()


def _plain(value: object) -> object:
    dump = getattr(value, "model_dump", None)
    if dump is None:
        # Only callers in the same process can get here: JSON has no other types.
        raise TypeError(f"cannot send a {type(value).__name__} to the sidecar")
    return dump(exclude_none=True)
