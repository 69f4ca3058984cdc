"""
Answers on Google's routes, in a form that Google's own SDKs take.

They drop a streamed turn without a word, and the message before it, if one of its
chunks has no content, or a content without parts; a part may be an empty text. They
take each line that does not begin with `data: ` for JSON, comments too (google-genai
3.4.0, @google/genai 3.1.0: `chats`). LiteLLM ends a stream with an empty list of parts
and with zeros for usage, of which it knows three counts only, and pings with comments.
"""

import functools
import importlib
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from litellm_mlx import ignored_header
from litellm_mlx.asgi import Message, Send
from litellm_mlx.extra_body import with_all_stops
from litellm_mlx.json_objects import as_object
from litellm_mlx.refusals import problem

_ADAPTERS = "litellm.google_genai.adapters"
_KNOWN_PROVIDER = "hosted_vllm"  # as which the hook has LiteLLM ask the sidecar
_STREAM = ":streamGenerateContent"
_COMMENTS = re.compile(rb"(?::[^\r\n]*[\r\n]+)+")
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_ERROR = b'data: {"error"'
_DONE = b"data: [DONE]\n\n"  # which is no JSON
_NOTHING_YET = {
    "candidates": [{"content": {"parts": [{"text": ""}], "role": "model"}, "index": 0}]
}
_KEEP_ALIVE = f"data: {json.dumps(_NOTHING_YET)}\n\n".encode()

logger = logging.getLogger(__name__)


def install() -> None:
    """Have LiteLLM translate answers so. Doing it twice does no harm."""
    try:
        handler = importlib.import_module(f"{_ADAPTERS}.handler")
        adapter: Any = handler.GoogleGenAIAdapter
        calls: Any = handler.GenerateContentToCompletionHandler
        if hasattr(adapter, "is_readable"):
            return
        wraps = [
            (adapter, "translate_completion_output_params_streaming", _with_usage),
            (
                adapter,
                "translate_streaming_completion_to_generate_content",
                _with_parts,
            ),
            (adapter, "translate_completion_to_generate_content", _noting_headers),
            (adapter, "_map_usage", _with_all_counts),
        ]
        wrapped = [(on, name, wrap(getattr(on, name))) for on, name, wrap in wraps]
        prepared = _asking_for_usage(calls._prepare_completion_kwargs)
    except (ImportError, AttributeError):
        logger.warning("this LiteLLM ends streams on Google's route in its own way")
        return
    for on, name, method in wrapped:
        setattr(on, name, method)
    calls._prepare_completion_kwargs = staticmethod(prepared)
    adapter.is_readable = True


def readable(path: str, send: Send) -> Send:
    """
    What sends an answer, in events that Google's SDKs read.

    Chunks that say nothing stand in place of comments, and an error that LiteLLM tells
    within a stream, in OpenAI's shape with a text for its code, is rewritten in
    Google's.
    """
    if not path.endswith(_STREAM):
        return send
    is_between = True  # no event is half sent

    async def sending(message: Message) -> None:
        nonlocal is_between
        body = message.get("body", b"")
        if _COMMENTS.fullmatch(body):
            message = {**message, "body": _KEEP_ALIVE if is_between else b""}
        elif body:
            is_between = body.endswith(_EVENT_ENDS)
            if body.startswith(_ERROR):
                message = {**message, "body": _as_googles(path, body)}
        await send(message)

    return sending


def _as_googles(path: str, body: bytes) -> bytes:
    """An event with an error, and what LiteLLM sends with it."""
    event, end, rest = body.partition(b"\n\n")
    try:
        error = json.loads(event.removeprefix(b"data: "))["error"]
        code = str(error["code"])
        status = int(code) if code.isdigit() else 500
        error_body = problem(path, status, str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return body
    return b"data: " + json.dumps(error_body).encode() + end + rest.replace(_DONE, b"")


def _asking_for_usage(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepared(*args: Any, **call: Any) -> Any:
        made = original(*args, **call)
        if made.get("stream") and made.get("custom_llm_provider") == _KNOWN_PROVIDER:
            made.setdefault("stream_options", {"include_usage": True})
        if made.get("custom_llm_provider") == _KNOWN_PROVIDER:
            made = with_all_stops(made)
        return made

    return prepared


def _with_usage(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def translated(self: Any, completion_stream: Any) -> Any:
        ignored_header.note_of(completion_stream)
        return original(self, _ended_by_usage(completion_stream))

    return translated


async def _ended_by_usage(chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Chunks, of which the one that ends the answer waits for its usage."""
    last: Any = None
    async for chunk in chunks:
        if last is not None:
            last.usage = getattr(chunk, "usage", None) or getattr(last, "usage", None)
        elif any(choice.finish_reason for choice in getattr(chunk, "choices", ())):
            last = chunk
        else:
            yield chunk
    if last is not None:
        yield last


def _noting_headers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def translated(self: Any, response: Any, *args: Any, **named: Any) -> Any:
        ignored_header.note_of(response)
        return original(self, response, *args, **named)

    return translated


def _with_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def translated(self: Any, response: Any, wrapper: Any) -> Any:
        chunk = original(self, response, wrapper)
        for candidate in (chunk or {}).get("candidates", ()):
            candidate["content"]["parts"] = candidate["content"]["parts"] or [
                {"text": ""}
            ]
            if candidate["finishReason"] is None:  # null ends an answer, too
                del candidate["finishReason"]
        return chunk

    return translated


def _with_all_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mapped(self: Any, usage: Any) -> dict[str, int]:
        counts = dict(original(self, usage))
        cached = _detail(usage, "prompt_tokens_details", "cached_tokens")
        thoughts = _detail(usage, "completion_tokens_details", "reasoning_tokens")
        if cached:
            counts["cachedContentTokenCount"] = cached
        if thoughts:  # which Google counts apart
            counts["candidatesTokenCount"] -= thoughts
            counts["thoughtsTokenCount"] = thoughts
        return counts

    return mapped


def _detail(usage: Any, details: str, name: str) -> int:
    held = getattr(usage, details, None)
    value = getattr(held, name, None) or as_object(held).get(name)
    return value if isinstance(value, int) else 0
