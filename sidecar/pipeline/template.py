"""
Calls of the model's own chat template.

What a template can do is found out once, at load, by rendering small conversations;
what it cannot take is then said in words it can.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.core.prompt import ChatTokenizer
from sidecar.core.requests import ChatRequest, Message, Tool, ToolCall

logger = logging.getLogger(__name__)

_TOOL = {
    "type": "function",
    "function": {
        "name": "zq_probe",
        "description": "zq",
        "parameters": {"type": "object", "properties": {}},
    },
}
_NO_TEMPLATE = "the model has no chat template: it gets `role: content` lines"
_SYSTEM = {"role": "system", "content": "zq system"}
_USER = {"role": "user", "content": "zq user"}
_ASSISTANT = {"role": "assistant", "content": "zq answer"}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template takes, found by probing it."""

    exists: bool = True
    system: bool = True  # a system message at all
    later_system: bool = True  # one that is not the first message
    repeated_user: bool = True  # two user messages in a row
    tool_role: bool = True
    tools: bool = True  # prints the offered tools
    tool_calls: bool = True  # prints past calls
    reasoning_effort: bool = False


class ChatTemplate:
    """
    Renders conversations for one model. Safe from any thread.

    Templates run in jinja's sandbox, as transformers sets it up.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.traits = _probe(tokenizer)
        if not self.traits.exists:
            logger.warning(_NO_TEMPLATE)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """
        The prompt text.

        Raises:
            BadRequest: the template refuses this conversation.
        """
        prepared = adapt(messages, tools, self.traits)
        if not self.traits.exists:
            lines = [f"{m.role}: {m.text}\n" for m in prepared]
            return "".join([*lines, "assistant:" if add_generation_prompt else ""])
        offered = [dict(tool.raw) for tool in tools] if self.traits.tools else []
        try:
            text = self._tokenizer.apply_chat_template(
                [to_dict(m) for m in prepared],
                tools=offered or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        except Exception as error:
            logger.warning("template refused the conversation", exc_info=True)
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}",
                param="messages",
            ) from error
        return str(text)


def adapt(
    messages: Sequence[Message], tools: Sequence[Tool], traits: TemplateTraits
) -> list[Message]:
    """Say what the template cannot take in words it can; nothing is lost."""
    adapted = list(messages)
    if tools and not traits.tools:
        adapted.insert(0, Message("system", (_describe(tools),)))
        adapted = _merge_leading_system(adapted)
    if not traits.tool_calls:
        adapted = [_spell_calls(m) for m in adapted]
    if not traits.tool_role:
        adapted = [_spell_result(m) for m in adapted]
    if not traits.later_system:
        adapted = [_mark_system(m) if i else m for i, m in enumerate(adapted)]
    if not traits.system and adapted and adapted[0].role == "system":
        adapted[0] = _mark_system(adapted[0])
    if not traits.repeated_user:
        adapted = _join_users(adapted)
    return adapted


def to_dict(message: Message) -> dict[str, Any]:
    """The form chat templates take: text content, arguments as objects."""
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [_call_dict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _call_dict(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": parse_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def parse_arguments(text: str) -> dict[str, Any]:
    """Arguments as an object; text that is none becomes `{"raw": text}`."""
    try:
        value = json.loads(text) if text.strip() else {}
        if "\\u" in text:  # half a surrogate pair has no ids
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return {"raw": text}
    return value if isinstance(value, dict) else {"raw": text}


def offered_tools(request: ChatRequest) -> tuple[Tool, ...]:
    """The tools the model may call under the request's tool choice."""
    if request.tool_choice.mode == "none":
        return ()
    if request.tool_choice.mode == "named":
        return tuple(t for t in request.tools if t.name == request.tool_choice.name)
    return request.tools


def state_choice(request: ChatRequest) -> tuple[Message, ...]:
    """A forced tool choice is said at the end, where it costs no cached prefix."""
    order = {
        "required": "Answer with a call of one of the functions.",
        "named": f"Answer with a call of the function {request.tool_choice.name}.",
    }.get(request.tool_choice.mode)
    if order is None or not request.messages:
        return request.messages
    *before, last = request.messages
    if last.role in ("user", "tool"):
        return (*before, replace(last, parts=(*last.parts, order)))
    return (*request.messages, Message("user", (order,)))


def _describe(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(dict(tool.raw)) for tool in tools)
    return (
        f"You may call these functions:\n{listed}\n\nTo call one, answer with\n"
        '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>'
    )


def _spell_calls(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = tuple(
        "<tool_call>"
        + json.dumps({"name": c.name, "arguments": parse_arguments(c.arguments)})
        + "</tool_call>"
        for c in message.tool_calls
    )
    return replace(message, parts=(*message.parts, *calls), tool_calls=())


def _spell_result(message: Message) -> Message:
    if message.role != "tool":
        return message
    head = f"[Tool Result for {message.tool_call_id or 'call'}]"
    return Message("user", (f"{head}\n{message.text}\n[End Tool Result]",))


def _mark_system(message: Message) -> Message:
    if message.role != "system":
        return message
    return Message("user", ("<system>", message.text, "</system>"))


def _merge_leading_system(messages: list[Message]) -> list[Message]:
    if len(messages) > 1 and messages[1].role == "system":
        parts = (*messages[1].parts, *messages[0].parts)
        return [Message("system", parts), *messages[2:]]
    return messages


def _join_users(messages: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        if joined and message.role == "user" == joined[-1].role:
            joined[-1] = Message("user", (f"{joined[-1].text}\n{message.text}",))
        else:
            joined.append(message)
    return joined


def _probe(tokenizer: ChatTokenizer) -> TemplateTraits:
    def render(messages: list[dict[str, Any]], **kwargs: Any) -> str | None:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **kwargs
                )
            )
        except Exception:  # noqa: BLE001 - a refusal is the answer
            return None

    if render([_USER]) is None and not tokenizer.chat_template:
        return TemplateTraits(exists=False, tools=False, tool_calls=False)
    call = {"name": "zq_probe", "arguments": {"zq": "zq argument"}}
    calling = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_zq", "type": "function", "function": call}],
    }
    result = {"role": "tool", "tool_call_id": "call_zq", "content": "zq result"}
    loop = render([_USER, calling, result], tools=[_TOOL]) or ""
    later = render([_SYSTEM, _USER, _ASSISTANT, dict(_SYSTEM, content="zq two"), _USER])
    return TemplateTraits(
        system="zq system" in (render([_SYSTEM, _USER]) or ""),
        later_system="zq two" in (later or ""),
        repeated_user=render([_USER, _USER]) is not None,
        tool_role="zq result" in loop,
        tools="zq_probe" in (render([_USER], tools=[_TOOL]) or ""),
        tool_calls="zq argument" in loop,
        reasoning_effort="reasoning_effort" in str(tokenizer.chat_template),
    )
