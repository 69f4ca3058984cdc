"""The body of `POST /v1/messages` -> a chat request."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sidecar.core.errors import BadRequest, ThreadUnsupported
from sidecar.core.requests import (
    ChatRequest,
    ClientInfo,
    Message,
    OutputFormat,
    Tool,
    ToolChoice,
)
from sidecar.dialects.anthropic_messages.answer import new_id
from sidecar.dialects.anthropic_messages.client_tools import client_tool
from sidecar.dialects.anthropic_messages.content import read_message, text_parts
from sidecar.dialects.anthropic_messages.deferred_tools import with_definitions
from sidecar.dialects.begun_answer import is_begun, with_begun_answer
from sidecar.dialects.fields import Fields, ignored_fields
from sidecar.dialects.generation_fields import read_client, read_options, read_thinking
from sidecar.dialects.known_fields import MESSAGES_FIELDS
from sidecar.dialects.litellm_header import with_client_facts
from sidecar.dialects.output_format import read_form, read_text_format

_DEFER = "defer_loading"


def parse_messages(
    body: Any, request_id: str, headers: Mapping[str, str]
) -> ChatRequest:
    """
    Check a request body.

    Args:
        headers: of the request, names in lower case.
    Raises:
        BadRequest, ValidationFailed: naming the field.
        ThreadUnsupported: only what is new in a thread was sent.
    """
    body = with_client_facts(body, headers)
    fields = Fields(body)
    if fields.raw("thread") is not None:
        raise ThreadUnsupported(
            "thread is not served here: send all messages in each request, without it",
            param="thread",
        )
    body, tools = with_definitions(body, _tools(fields))
    fields = Fields(body)
    request = ChatRequest(
        request_id=request_id,
        model=fields.text("model") or "",
        messages=_messages(fields),
        tools=tools,
        tool_choice=_tool_choice(fields, tools),
        output_format=_output_format(fields),
        thinking=replace(read_thinking(body), is_shown=not _hides_thinking(fields)),
        template_kwargs=_template_kwargs(fields),
        options=read_options(_options(body), None),
        client=_client(body, headers),
        is_streamed=fields.boolean("stream", False),
        ignored=(*_unread(body, tools), *_ignored(fields)),
        answer_id=new_id(),
    )
    if not is_begun(request.messages):
        return _with_closed_answer(request, fields)
    if request.messages[-1].text[-1].isspace():
        raise BadRequest(
            "messages: the final assistant content cannot end with trailing whitespace",
            param="messages",
        )
    return with_begun_answer(request, "messages")


def _with_closed_answer(request: ChatRequest, fields: Fields) -> ChatRequest:
    """The same, which says that another answer begins behind a last one of calls."""
    *before, last = fields.items("messages")
    if last["role"] != "assistant":
        return request
    return replace(request, ignored=(*request.ignored, f"messages[{len(before)}]"))


def _output_format(fields: Fields) -> OutputFormat | None:
    """Under its name, or the one that it had before."""
    found = read_text_format(fields, "output_config", is_strict=True)
    older = read_form(fields, "output_format", is_strict=True)
    if found and older:
        raise BadRequest(
            "only one of output_config.format and output_format may be set",
            param="output_format",
        )
    return found or older


def _messages(fields: Fields) -> tuple[Message, ...]:
    found: list[Message] = []
    system = fields.raw("system")
    if system:
        parts = text_parts(system, "system")
        found.append(Message("system", parts))
    for item in fields.objects("messages"):
        found += read_message(item)
    if not any(message.role != "system" for message in found):
        raise BadRequest("messages must be a non-empty list", param="messages")
    return tuple(found)


def _tools(fields: Fields) -> tuple[Tool, ...]:
    return tuple(
        _tool(item) for item in fields.objects("tools") if not _is_hosted(item)
    )


def _tool(item: Fields) -> Tool:
    name = item.required_text("name")
    description, schema = client_tool(item) or (
        item.text("description") or "",
        item.printable_object("input_schema") or {"type": "object", "properties": {}},
    )
    raw = {"name": name, "description": description, "parameters": schema}
    is_deferred = item.raw(_DEFER) is True
    raw = {"type": "function", "function": raw}
    is_held = not item.boolean("eager_input_streaming", True)
    param = "tools[].strict" if item.boolean("strict", False) else ""
    return Tool(
        name, schema, raw, is_deferred=is_deferred, is_held=is_held, strict_param=param
    )


def _is_hosted(item: Fields) -> bool:
    """Whether Anthropic's servers run it: it has a type of its own and no schema."""
    is_own = (item.text("type") or "custom") != "custom"
    return is_own and not item.raw("input_schema") and client_tool(item) is None


def _unread(body: Any, tools: tuple[Tool, ...]) -> list[str]:
    """Fields that nobody reads; a tool that is not deferred is loaded as any other."""
    deferred = {tool.name for tool in tools if tool.is_deferred}
    asked = {i.raw("name") for i in Fields(body).objects("tools") if i.raw(_DEFER)}
    found = ignored_fields(body, MESSAGES_FIELDS)
    return [n for n in found if n != f"tools[].{_DEFER}" or asked - deferred]


def _ignored(fields: Fields) -> tuple[str, ...]:
    """What is asked for and not done here; the answer names it."""
    hosted = filter(_is_hosted, fields.objects("tools"))
    named = [f"tools[{item.raw('type')}]" for item in hosted]
    return tuple(dict.fromkeys(named))


def _tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    choice = Fields(fields.object("tool_choice") or {"type": "auto"}, "tool_choice")
    is_single = choice.boolean("disable_parallel_tool_use", False)
    return replace(_mode(choice, tools), is_single=is_single)


def _mode(choice: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    kind = choice.text("type")
    if kind == "any":
        return ToolChoice("required")
    if kind == "tool":
        name = choice.required_text("name")
        if name not in {tool.name for tool in tools}:
            raise BadRequest(
                f"tool_choice names {name[:64]!r}, which is not among the tools",
                param="tool_choice.name",
            )
        return ToolChoice("named", name)
    if kind not in ("auto", "none"):
        raise BadRequest(
            "tool_choice.type must be auto, any, tool or none", param="tool_choice.type"
        )
    return ToolChoice("none" if kind == "none" else "auto")


def _hides_thinking(fields: Fields) -> bool:
    value = fields.raw("thinking")
    return isinstance(value, dict) and value.get("display") == "omitted"


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    kwargs = fields.printable_object("chat_template_kwargs") or {}
    allowed = {"preserve_thinking", "reasoning_effort"}
    return {name: value for name, value in kwargs.items() if name in allowed}


def _options(body: Mapping[str, Any]) -> Fields:
    """The options under the names that all formats share."""
    name = "stop" if body.get("stop_sequences") is None else "stop_sequences"
    shared = {**body, "stop": body.get(name), "n": None}
    return Fields(shared, sent_as={"stop": name})


def _client(body: dict[str, Any], headers: Mapping[str, str]) -> ClientInfo:
    client = read_client(body, headers.get("user-agent"))
    if client.session is not None:
        return client
    header = "x-claude-code-session-id"
    named = {
        "metadata.user_id": _session_of_user(body),
        f"header {header}": headers.get(header),
    }
    return client.with_session(named)


def _session_of_user(body: Mapping[str, Any]) -> str | None:
    """Claude Code's session id in `metadata.user_id`: JSON, or behind `_session_`."""
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user, str):
        return None
    try:
        found = json.loads(user).get("session_id")
    except (ValueError, AttributeError, RecursionError):
        found = user.partition("_session_")[2]
    return found if isinstance(found, str) and found else None
