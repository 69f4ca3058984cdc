"""Chat Completions as a dialect: events -> role, deltas, usage, finish, `[DONE]`."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sidecar.core.errors import SidecarError
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    PrefillProgress,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from sidecar.core.json_bytes import dump_line
from sidecar.core.ports import RequestFacts
from sidecar.core.requests import ChatRequest, ToolCall
from sidecar.dialects.litellm_header import with_client_facts
from sidecar.dialects.openai_chat.request import (
    StreamOptions,
    format_chat,
    logprobs_dict,
    new_id,
    parse_chat,
    usage_dict,
)
from sidecar.dialects.openai_chat.tools import call_dict, custom_names
from sidecar.dialects.problem import CONTENT_TYPE, error_object, problem

Frame = dict[str, Any]
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": keepalive\n\n"


class Chunks(Protocol):
    """The chunks of one response, in OpenAI's chat or completion form."""

    def opening(self) -> Iterator[Frame]:
        """What comes before the first event."""

    def frames_of(self, event: Event) -> Iterator[Frame]:
        """What an event comes to."""


class OpenAIStream:
    """
    Encodes chunks as server-sent events; a StreamEncoder.

    Args:
        keepalive: chunk to send after a long silence; None for a comment.
    """

    def __init__(self, chunks: Chunks, keepalive: Frame | None = None) -> None:
        self._chunks = chunks
        self._ping = _COMMENT if keepalive is None else _data(keepalive)

    def started(self, usage: Usage) -> bytes:
        """The role chunks."""
        return _all(self._chunks.opening())

    def event(self, event: Event) -> bytes:
        """An event's chunks."""
        done = _DONE if isinstance(event, Finished) else b""
        return _all(self._chunks.frames_of(event)) + done

    def ping(self) -> bytes:
        """A comment, or a chunk that says nothing."""
        return self._ping

    def failed(self, error: SidecarError) -> bytes:
        """The error, and no `[DONE]`."""
        return _data({"error": error_object(error)})


def _all(frames: Iterable[Frame]) -> bytes:
    return b"".join(map(_data, frames))


def _data(value: Frame) -> bytes:
    return b"data: " + dump_line(value) + b"\n\n"


class ChatChunks:
    """
    Makes the chunks of one response, all with one id.

    The finish chunks come last, after the usage chunk: LiteLLM throws away what
    follows a finish reason, and OpenAI's own clients do not mind the order.

    Args:
        custom: tools whose calls carry bare text.
    """

    def __init__(
        self,
        model: str,
        n: int,
        *,
        include_usage: bool,
        custom: frozenset[str] = frozenset(),
        answer_id: str = "",
    ) -> None:
        self._base = {
            "id": answer_id or new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._n = n
        self._custom = custom
        self._include_usage = include_usage
        self._finishes: list[Frame] = []
        self._is_custom = False  # the call that is being written

    @property
    def keepalive(self) -> Frame:
        """A chunk that says nothing, for a silent time."""
        return self._chunk(0, {})

    def opening(self) -> Iterator[Frame]:
        """The role of each choice."""
        for index in range(self._n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def frames_of(self, event: Event) -> Iterator[Frame]:
        """The chunks of an event; the finish reasons wait for the usage."""
        if isinstance(event, PrefillProgress):
            yield {**self._chunk(0, {}), "prompt_progress": event.as_json()}
        elif isinstance(event, ReasoningDelta):
            yield self._chunk(
                event.choice, {"reasoning_content": event.text}, event.logprobs
            )
        elif isinstance(event, TextDelta):
            yield self._chunk(event.choice, {"content": event.text}, event.logprobs)
        elif isinstance(event, ToolCallStarted | ToolCallArguments | ToolCallEnded):
            yield from self._call(event)
        elif isinstance(event, ChoiceFinished):
            self._finishes.append(self._chunk(event.choice, {}, reason=event.reason))
        elif isinstance(event, Finished):
            if self._include_usage or event.metrics or event.usage.num_rotated:
                yield {**self._base, "choices": [], "usage": usage_dict(event)}
            yield from self._finishes

    def _call(
        self, event: ToolCallStarted | ToolCallArguments | ToolCallEnded
    ) -> Iterator[Frame]:
        """A call's head and arguments as they come; that of a bare text at its end."""
        if isinstance(event, ToolCallStarted):
            self._is_custom = event.name in self._custom
            delta = call_dict(ToolCall(event.id, event.name, ""), frozenset())
        elif isinstance(event, ToolCallArguments):
            delta = {"function": {"arguments": event.text}}
        else:
            delta = call_dict(event.call, self._custom)
        if isinstance(event, ToolCallEnded) is self._is_custom:
            call = {"index": event.index, **delta}
            yield self._chunk(event.choice, {"tool_calls": [call]})

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: Any = (),
        reason: str | None = None,
    ) -> Frame:
        entry = {
            "index": choice,
            "delta": delta,
            "logprobs": logprobs_dict(logprobs),
            "finish_reason": reason,
        }
        return {**self._base, "choices": [entry]}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A body of `POST /v1/chat/completions`."""

    chat: ChatRequest
    how: StreamOptions

    def encoder(self) -> OpenAIStream:
        """Chunks."""
        chunks = ChatChunks(
            self.chat.model,
            self.chat.options.n,
            include_usage=self.how.include_usage,
            custom=custom_names(self.chat.tools),
            answer_id=self.chat.answer_id,
        )
        # Comments do not pass through LiteLLM.
        keepalive = chunks.keepalive if self.how.is_plugin else None
        return OpenAIStream(chunks, keepalive)

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """A `chat.completion` object."""
        chat = self.chat
        return format_chat(events, chat.model, chat.options.n, chat.tools)


class OpenAIChat:
    """Chat Completions."""

    def parse(self, body: Any, facts: RequestFacts) -> ChatCall:
        """Check a body; complaints name the field."""
        whole = with_client_facts(body, facts.headers)
        agent = facts.headers.get("user-agent")
        return ChatCall(*parse_chat(whole, facts.request_id, agent))

    def problem(
        self, error: SidecarError, request_id: str, path: str
    ) -> tuple[str, dict[str, Any]]:
        """problem+json that is an OpenAI error body as well."""
        return CONTENT_TYPE, problem(error, request_id, path)
