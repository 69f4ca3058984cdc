"""OpenAI chat completions: request in, whole response out."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.core.events import (
    CollectedAnswer,
    Event,
    Finished,
    TokenLogprob,
    Usage,
    broken_as_text,
)
from sidecar.core.requests import (
    ChatRequest,
    GenerationOptions,
    Image,
    Message,
    Part,
    Role,
    Tool,
)
from sidecar.dialects.begun_answer import with_begun_answer
from sidecar.dialects.fields import Fields, ignored_fields
from sidecar.dialects.generation_fields import (
    read_client,
    read_options,
    read_thinking,
    with_one_call,
)
from sidecar.dialects.image_parts import (
    OPENAI_KINDS,
    openai_image,
    refuse,
    require_text,
)
from sidecar.dialects.known_fields import CHAT_FIELDS
from sidecar.dialects.openai_chat.prediction import read_prediction
from sidecar.dialects.openai_chat.tools import (
    call_dict,
    custom_names,
    left_out_tools,
    read_tool_calls,
    read_tool_choice,
    read_tools,
)
from sidecar.dialects.output_format import FORM_FIELDS, read_response_format

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


def _message(item: Fields) -> Message:
    role = _ROLES.get(item.required_text("role"))
    if role is None:
        raise BadRequest(
            f"{item.path('role')} must be one of {', '.join(_ROLES)}",
            param=item.path("role"),
        )
    parts, thoughts = _content(item)
    if any(isinstance(part, Image) for part in parts):
        require_text(parts, role)
    refusal = item.text("refusal")  # of an assistant, in place of an answer
    return Message(
        role=role,
        parts=(*parts, refusal) if refusal else parts,
        reasoning=_reasoning(item, thoughts) if role == "assistant" else None,
        tool_calls=read_tool_calls(item) if role == "assistant" else (),
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


# Arguments of the template call itself; a client may set only the template's own.
_RESERVED_KWARGS = frozenset(
    (
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "return_dict",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "tokenizer_kwargs",
        "return_assistant_tokens_mask",
    )
)


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
    if fields.raw("modalities") not in (None, [], ["text"]):
        raise BadRequest('modalities must be ["text"]', param="modalities")
    how = read_stream_options(fields)
    asks_for_form = not FORM_FIELDS.isdisjoint(body)
    request = ChatRequest(
        request_id=request_id,
        model=fields.text("model") or "",
        messages=read_messages(fields),
        tools=tools,
        tool_choice=with_one_call(read_tool_choice(fields, tools), fields),
        output_format=read_response_format(fields) if asks_for_form else None,
        thinking=read_thinking(body),
        template_kwargs={k: v for k, v in kwargs.items() if k != "enable_thinking"},
        options=_options(fields),
        client=read_client(body, user_agent),
        is_streamed=how.stream,
        ignored=(*ignored_fields(body, CHAT_FIELDS), *left_out_tools(fields)),
        answer_id=new_id("chatcmpl-"),
    )
    begun_by = _begun_by(fields)
    return with_begun_answer(request, begun_by) if begun_by else request, how


def _options(fields: Fields) -> GenerationOptions:
    options = read_options(fields, _top_logprobs(fields))
    if fields.boolean("include_metrics", False):
        options = replace(options, wants_metrics=True)
    if fields.raw("prediction") is None:
        return options
    return replace(options, prediction=read_prediction(fields))


def _begun_by(fields: Fields) -> str | None:
    """The field that asks to go on with the last message: vLLM's, or DeepSeek's."""
    continues = fields.boolean("continue_final_message", False)
    if not continues and not fields.boolean("add_generation_prompt", True):
        raise BadRequest(
            "add_generation_prompt may be false beside continue_final_message only",
            param="add_generation_prompt",
        )
    begun = [m.path("prefix") for m in fields.objects("messages") if _has_prefix(m)]
    last = f"messages[{len(fields.items('messages')) - 1}].prefix"
    for path in begun:
        if path != last:
            raise BadRequest(f"{path} may be true of the last message only", param=path)
    return "continue_final_message" if continues else next(iter(begun), None)


def _has_prefix(message: Fields) -> bool:
    return message.boolean("prefix", False)


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


def format_chat(
    events: Sequence[Event], model: str, n: int, tools: tuple[Tool, ...] = ()
) -> dict[str, Any]:
    """The `chat.completion` object of a finished generation."""
    answers, custom = [CollectedAnswer() for _ in range(n)], custom_names(tools)
    usage = None
    for event in broken_as_text(events):
        if isinstance(event, Finished):
            usage = usage_dict(event)
        elif not hasattr(event, "choice"):
            continue
        else:
            answers[event.choice].take(event)
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(i, answer, custom) for i, answer in enumerate(answers)],
        "usage": usage,
    }


def _choice(
    index: int, answer: CollectedAnswer, custom: frozenset[str]
) -> dict[str, Any]:
    text: str | None = "".join(answer.text)
    if not text and answer.calls:
        text = None  # an empty text would be a part of its own
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if answer.reasoning:
        message["reasoning_content"] = "".join(answer.reasoning)
    if answer.calls:
        message["tool_calls"] = [call_dict(call, custom) for call in answer.calls]
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs_dict(answer.logprobs),
        "finish_reason": answer.end.reason if answer.end else "stop",
    }


def new_id(prefix: str) -> str:
    """A random id of 24 hex digits."""
    return prefix + secrets.token_hex(12)


def usage_dict(finished: Finished) -> dict[str, Any]:
    """Token counts in OpenAI's form, and what it took if that was asked for."""
    usage, metrics = finished.usage, finished.metrics
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": _completion_details(usage),
        **usage.rotated_field,
        **({"x_metrics": asdict(metrics)} if metrics else {}),
    }


def _completion_details(usage: Usage) -> dict[str, int]:
    drafted = {
        "accepted_prediction_tokens": usage.accepted_tokens,
        "rejected_prediction_tokens": usage.rejected_tokens,
    }
    was_drafted = any(drafted.values())
    return {
        "reasoning_tokens": usage.reasoning_tokens,
        **(drafted if was_drafted else {}),
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
