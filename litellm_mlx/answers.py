"""
Puts LiteLLM's errors and usage chunks back into the shape that clients read.

What the sidecar refuses arrives as JSON within a sentence of LiteLLM's, without its
type, code and field; on Google's routes errors have OpenAI's shape. Who is busy does
not say when to ask again. And the chunk with a stream's usage has a choice, where
OpenAI's has none, by which clients know it.
"""

import gzip
import json
import re
from collections.abc import Iterable, Mapping

import orjson

from litellm_mlx.asgi import Message
from litellm_mlx.json_objects import as_object, json_object
from litellm_mlx.refusals import is_google, problem

_BUSY = (429, 503)
_RETRY_AFTER_S = b"5"  # where nobody says: a sidecar that died is back by then
# How the sidecar's own refusals end, or our provider's text of them.
_AGAIN_IN = re.compile(rb"(?:; again in|, retry after) (\d{1,6}) s\b")
_GZIP = b"\x1f\x8b"
# How LiteLLM begins what the sidecar said, and how a sidecar's error begins.
_OF_OURS = re.compile(  # begins with fixed letters: an error may repeat a long word
    r"MlxException - \{|Exception - \{\"type\":\s*\"urn:litellm-mlx:"
)
_BEGUN = re.compile(r"litellm\.\w+: (\w+: )?")
_USAGE_CHUNK = re.compile(rb'"choices":\[\{"index":0,"delta":\{\}\}\],"usage":\{')
_REPLACED = (b"content-length", b"content-encoding", b"content-type")

Headers = Iterable[tuple[bytes, bytes]]


def whole(held: list[Message]) -> bytes:
    """The body of an answer that was held back."""
    body: bytes = b"".join(message.get("body", b"") for message in held)
    return gzip.decompress(body) if body.startswith(_GZIP) else body


def put_right(path: str, held: list[Message]) -> list[Message]:
    """An error as the route's own clients read it; all else as it came."""
    start, body = held[0], whole(held)
    status, headers = start["status"], list(start.get("headers", ()))
    translated = _translated(path, status, body)
    if translated is not None:
        body = orjson.dumps(translated)
        headers = [pair for pair in headers if pair[0].lower() not in _REPLACED]
        headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", str(len(body)).encode()))
        held = [start, {"type": "http.response.body", "body": body}]
    if status in _BUSY:
        headers += _retry_after(headers, body)
    return [{**start, "headers": headers}, *held[1:]]


def without_choice(body: bytes) -> bytes:
    """A piece of a chat's stream; the chunk that tells the usage has no choice."""
    if b'"usage":{' not in body:
        return body
    return _USAGE_CHUNK.sub(b'"choices":[],"usage":{', body, count=1)


def _translated(path: str, status: int, body: bytes) -> Mapping[str, object] | None:
    """The error as it shall be sent; None if it is right already, or is no error."""
    answer = json_object(body)
    error = as_object(answer.get("error"))
    message = error.get("message")
    if not isinstance(message, str):
        return None
    own, rest = _of_sidecar(message) or ({}, "")
    text = f"{own.get('message')}{rest}" if own else message
    if is_google(path):
        return problem(path, status, _BEGUN.sub("", text, count=1))
    named = {name: value for name, value in own.items() if value is not None}
    return {**answer, "error": {**error, **named, "message": text}} if own else None


def _of_sidecar(message: str) -> tuple[Mapping[str, object], str] | None:
    """The sidecar's error within a message, and what LiteLLM says behind it."""
    found = _OF_OURS.search(message)
    if found is None:
        return None
    begin = message.index("{", found.start())
    try:
        decoded, end = json.JSONDecoder().raw_decode(message, begin)
    except ValueError:
        return None
    error = as_object(as_object(decoded).get("error"))
    return (error, message[end:]) if "message" in error else None


def _retry_after(headers: Headers, body: bytes) -> list[tuple[bytes, bytes]]:
    said = {name.lower(): value for name, value in headers}
    if b"retry-after" in said:
        return []
    found = _AGAIN_IN.search(body)
    seconds = found[1] if found else _RETRY_AFTER_S
    return [(b"retry-after", said.get(b"llm_provider-retry-after", seconds))]
