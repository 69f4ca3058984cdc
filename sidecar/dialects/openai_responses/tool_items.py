"""
Calls and results that are no functions', as calls and results that any model reads.

What the client ran, and in the past of a conversation what OpenAI's servers ran.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from sidecar.core.requests import Image, Message, Part, ToolCall
from sidecar.dialects.fields import Fields
from sidecar.dialects.image_parts import openai_image
from sidecar.dialects.openai_responses.client_tools import CLIENT_TOOLS
from sidecar.dialects.openai_responses.tools import model_tool_name


def _json(value: Any) -> str:
    Fields({"value": value}).require_printable()
    return json.dumps(value, ensure_ascii=False)


def _id(item: Fields) -> str:
    return item.text("call_id") or item.text("id") or ""


def _hosted(name: str, asked: str) -> Callable[[Fields], ToolCall]:
    """The call of an item that says in one field what was asked for."""

    def call(item: Fields) -> ToolCall:
        value = item.raw(asked)
        named = {} if value is None else {asked: value}
        arguments = value if isinstance(value, dict) else named
        return ToolCall(_id(item), name, _json(arguments))

    return call


def _mcp_call(item: Fields) -> ToolCall:
    name = model_tool_name(item.required_text("name"), item.text("server_label"))
    return ToolCall(_id(item), name, item.text("arguments") or "")


def _computer_call(item: Fields) -> ToolCall:
    asked = item.raw("actions") or item.raw("action") or {}
    arguments = asked if isinstance(asked, dict) else {"actions": asked}
    return ToolCall(_id(item), "computer", _json(arguments))


# Items that are a call; and of these, those that hold its result as well.
CALLS: Mapping[str, Callable[[Fields], ToolCall]] = {
    **{f"{name}_call": tool.call for name, tool in CLIENT_TOOLS.items()},
    "computer_call": _computer_call,
    "web_search_call": _hosted("web_search", "action"),
    "file_search_call": _hosted("file_search", "queries"),
    "code_interpreter_call": _hosted("code_interpreter", "code"),
    "image_generation_call": _hosted("image_generation", "revised_prompt"),
    "mcp_call": _mcp_call,
}
_RESULT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "web_search_call": (),
    "file_search_call": ("results",),
    "code_interpreter_call": ("outputs",),
    "image_generation_call": ("result",),
    "mcp_call": ("output", "error"),
}
OUTPUTS = frozenset(
    (*(f"{name}_call_output" for name in CLIENT_TOOLS), "computer_call_output")
)


def result_in_call(item: Fields, kind: str) -> Message | None:
    """The result that stands in a call's own item; None if it comes in another."""
    names = _RESULT_FIELDS.get(kind)
    if names is None:
        return None
    found = [item.raw(name) for name in names if item.raw(name)]
    results = found or [f"status: {item.text('status') or 'completed'}"]
    parts: tuple[Part, ...] = tuple(
        value if isinstance(value, str) else _json(value) for value in results
    )
    if kind == "image_generation_call" and found:
        parts = (Image(f"data:image/png;base64,{found[0]}", path=item.where),)
    return Message("tool", parts, tool_call_id=_id(item))


def result(item: Fields) -> Message:
    """A result that is an item of its own."""
    value = item.raw("output")
    parts: tuple[Part, ...]
    if isinstance(value, dict):  # a screenshot
        parts = (openai_image(Fields(value, item.path("output"))),)
    elif isinstance(value, list):
        runs = [_run(run) for run in item.objects("output")]
        parts = ("\n".join(runs),)
    else:
        parts = (_said(item),)
    return Message("tool", parts, tool_call_id=_id(item))


def _run(run: Fields) -> str:
    """What a shell command printed, and how it ended."""
    outcome = Fields(run.raw("outcome") or {}, run.path("outcome"))
    code = outcome.integer("exit_code", -(1 << 31), (1 << 32) - 1)
    ended = "timed out" if outcome.text("type") == "timeout" else f"exit code {code}"
    texts = (run.text("stdout"), run.text("stderr"), f"[{ended}]")
    return "\n".join(text for text in texts if text)


def _said(item: Fields) -> str:
    """A patch's result: what it said, and whether it failed."""
    said, status = item.text("output") or "", item.text("status") or "completed"
    return f"[{status}]\n{said}".strip() if status == "failed" or not said else said
