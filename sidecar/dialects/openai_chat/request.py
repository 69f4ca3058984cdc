"""OpenAI chat completions: request in, whole response out."""

import json
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from sidecar.core.requests import (
    ChatRequest,
    Message,
    Part,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
)
from sidecar.dialects.fields import Fields
from sidecar.dialects.generation_fields import read_client, read_options, read_thinking
from sidecar.dialects.image_parts import (
    OPENAI_KINDS,
    openai_image,
    refuse,
    require_text,
)

logger = logging.getLogger(__name__)

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_THINKING_PARTS = ("thinking", "reasoning")


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """
    The conversation, at least one message.

    Raises:
        BadRequest: naming the message and the field.
    """
    messages = tuple(_message(item) for item in fields.objects("messages"))
    if not messages:
        raise BadRequest("messages must be a non-empty list", param="messages")
    return messages


def read_tools(fields: Fields) -> tuple[Tool, ...]:
    """The offered functions; tools of types unknown here are left out."""
    tools = []
    for item in fields.objects("tools"):
        kind = item.text("type") or "function"
        if kind != "function":
            logger.info("ignored a tool type=%r", kind[:40])
            continue
        if item.object("function") is None:
            raise BadRequest(
                f"{item.path('function')} must be an object",
                param=item.path("function"),
            )
        tools.append(_tool(Fields(item.raw("function"), item.path("function"))))
    tools += [_tool(item) for item in fields.objects("functions")]
    return tuple(tools)


def read_tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    """Which tools may or must be called."""
    value = fields.raw("tool_choice")
    if value is None:
        value = fields.raw("function_call")
    if value is None or value == "auto":
        return ToolChoice("auto")
    if value == "none":
        return ToolChoice("none")
    if value in ("required", "any"):
        return ToolChoice("required" if tools else "auto")
    return _named_choice(value, tools)


def _named_choice(value: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise BadRequest(
            "tool_choice must be none, auto, required or name a function",
            param="tool_choice",
        )
    if name not in {tool.name for tool in tools}:
        raise BadRequest(
            f"tool_choice names {name[:64]!r}, which is not among the tools",
            param="tool_choice",
        )
    return ToolChoice("named", name)


def _tool(function: Fields) -> Tool:
    name = function.required_text("name")
    parameters = function.printable_object("parameters") or {
        "type": "object",
        "properties": {},
    }
    raw = {
        "name": name,
        "description": function.text("description") or "",
        "parameters": parameters,
    }
    return Tool(name, parameters, {"type": "function", "function": raw})


def _message(item: Fields) -> Message:
    role = _ROLES.get(item.required_text("role"))
    if role is None:
        raise BadRequest(
            f"{item.path('role')} must be one of {', '.join(_ROLES)}",
            param=item.path("role"),
        )
    parts, thoughts = _content(item)
    require_text(parts, role)
    return Message(
        role=role,
        parts=parts,
        reasoning=_reasoning(item, thoughts) if role == "assistant" else None,
        tool_calls=_tool_calls(item) if role == "assistant" else (),
        tool_call_id=item.text("tool_call_id") if role == "tool" else None,
    )


def _content(item: Fields) -> tuple[tuple[Part, ...], list[str]]:
    """Texts and images, and thinking that came as parts."""
    value = item.raw("content")
    if value is None:
        return (), []
    if isinstance(value, str):
        return (value,), []
    if not isinstance(value, list):
        raise BadRequest(
            f"{item.path('content')} must be a string or a list of parts",
            param=item.path("content"),
        )
    parts: list[Part] = []
    thoughts: list[str] = []
    for index, part in enumerate(value):
        path = f"{item.path('content')}[{index}]"
        if isinstance(part, str):
            parts.append(part)
        else:
            _part(Fields(part, path), parts, thoughts)
    return tuple(parts), thoughts


def _part(part: Fields, parts: list[Part], thoughts: list[str]) -> None:
    kind = part.text("type") or "text"
    if kind in _TEXT_PARTS:
        parts.append(part.text("text") or part.text("refusal") or "")
    elif kind in _THINKING_PARTS:
        thoughts.append(part.text("thinking") or part.text("text") or "")
    elif kind in OPENAI_KINDS:
        parts.append(openai_image(part))
    elif kind != "redacted_thinking":
        refuse(part, kind)


def _reasoning(item: Fields, thoughts: list[str]) -> str | None:
    for name in ("reasoning_content", "reasoning"):
        value = item.raw(name)
        if isinstance(value, str):
            return value
    blocks = [
        block.text("thinking") or ""
        for block in item.objects("thinking_blocks")
        if block.raw("type") in (None, "thinking")
    ]
    found = [text for text in (blocks or thoughts) if text]
    return "\n".join(found) if found else None


def _tool_calls(item: Fields) -> tuple[ToolCall, ...]:
    calls = []
    for call in item.objects("tool_calls"):
        function = Fields(call.raw("function"), call.path("function"))
        arguments = function.raw("arguments")
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = function.required_text("name")
        calls.append(ToolCall(call.text("id") or "", name, arguments))
    return tuple(calls)


# Arguments of the template call itself; a client may set only the template's own.
_RESERVED_KWARGS = frozenset(
    (
        "messages", "conversation", "tools", "documents", "chat_template", "tokenize",
        "return_dict", "add_generation_prompt", "continue_final_message", "padding",
        "truncation", "max_length", "return_tensors", "tokenizer_kwargs",
        "return_assistant_tokens_mask",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a response is delivered."""

    stream: bool
    include_usage: bool
    is_plugin: bool  # the LiteLLM plugin: comments do not pass through LiteLLM


def parse_chat(
    body: Any, request_id: str, user_agent: str | None
) -> tuple[ChatRequest, StreamOptions]:
    """
    Check a request body.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    tools = read_tools(fields)
    kwargs = fields.printable_object("chat_template_kwargs") or {}
    bad = sorted(_RESERVED_KWARGS.intersection(kwargs))
    if bad:
        raise BadRequest(
            f"chat_template_kwargs must not set {', '.join(bad)}",
            param="chat_template_kwargs",
        )
    how = read_stream_options(fields)
    request = ChatRequest(
        request_id=request_id,
        model=fields.text("model") or "",
        messages=read_messages(fields),
        tools=tools,
        tool_choice=read_tool_choice(fields, tools),
        thinking=read_thinking(body),
        template_kwargs={k: v for k, v in kwargs.items() if k != "enable_thinking"},
        options=read_options(fields, _top_logprobs(fields)),
        client=read_client(body, user_agent),
        is_streamed=how.stream,
        answer_id=new_id("chatcmpl-"),
    )
    return request, how


def read_stream_options(fields: Fields) -> StreamOptions:
    """`stream`, `stream_options.include_usage`, and whether the plugin asks."""
    options = Fields(fields.object("stream_options") or {}, "stream_options")
    is_plugin = fields.raw("x_mlx") is not None
    return StreamOptions(
        stream=fields.boolean("stream", False),
        include_usage=is_plugin or options.boolean("include_usage", False),
        is_plugin=is_plugin,
    )


def _top_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, 20)
    return (top or 0) if wanted or top else None


@dataclass(slots=True)
class _Answer:
    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "stop"

    def take(self, event: Event) -> None:
        if isinstance(event, ReasoningDelta):
            self.reasoning.append(event.text)
            self.logprobs += event.logprobs
        elif isinstance(event, TextDelta):
            self.text.append(event.text)
            self.logprobs += event.logprobs
        elif isinstance(event, ToolCallDelta):
            self.calls.append(event.call)
        elif isinstance(event, ChoiceFinished):
            self.finish_reason = event.reason


def format_chat(events: Sequence[Event], model: str, n: int) -> dict[str, Any]:
    """The `chat.completion` object of a finished generation."""
    answers = [_Answer() for _ in range(n)]
    usage = None
    for event in events:
        if isinstance(event, Finished):
            usage = usage_dict(event.usage)
        elif not hasattr(event, "choice"):
            continue
        else:
            answers[event.choice].take(event)
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(i, answer) for i, answer in enumerate(answers)],
        "usage": usage,
    }


def _choice(index: int, answer: _Answer) -> dict[str, Any]:
    text: str | None = "".join(answer.text)
    if not text and answer.calls:
        text = None  # an empty text would be told as a part of its own
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if answer.reasoning:
        message["reasoning_content"] = "".join(answer.reasoning)
    if answer.calls:
        message["tool_calls"] = [call_dict(call) for call in answer.calls]
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs_dict(answer.logprobs),
        "finish_reason": answer.finish_reason,
    }


def new_id(prefix: str) -> str:
    """A random id of 24 hex digits."""
    return prefix + secrets.token_hex(12)


def call_dict(call: ToolCall) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Token counts in OpenAI's form."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def logprobs_dict(logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """Log-probabilities in OpenAI's chat form; None if there are none."""
    if not logprobs:
        return None
    return {
        "content": [
            {
                **_token(item.token, item.logprob),
                "top_logprobs": [_token(text, value) for text, _, value in item.top],
            }
            for item in logprobs
        ]
    }


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
