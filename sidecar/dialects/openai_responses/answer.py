"""A response object and its output items, as they grow."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from sidecar.core.errors import SidecarError
from sidecar.core.events import Usage
from sidecar.core.requests import ToolCall
from sidecar.dialects.openai_responses.request import Delivery
from sidecar.dialects.openai_responses.tools import call_item

Item = dict[str, Any]
_DEFAULTS: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}


class ResponseObject:
    """The response as far as it has come; `as_dict` may be called at any time."""

    def __init__(self, delivery: Delivery) -> None:
        self.id = delivery.answer_id
        self.output: list[Item] = []
        self._delivery = delivery
        self._created = int(time.time())
        self._status = "in_progress"
        self._usage: Usage | None = None
        self._error: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The object as it is now."""
        is_cut = self._status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._delivery.model,
            "output": list(self.output),
            **_DEFAULTS,
            **self._delivery.echoed,
            "store": self._delivery.is_stored,
            "usage": None if self._usage is None else usage_dict(self._usage),
        }

    def finish(self, reason: str) -> None:
        """Note why the generation ended."""
        self._status = "incomplete" if reason == "length" else "completed"

    def count(self, usage: Usage) -> None:
        """Note what it cost."""
        self._usage = usage

    def fail(self, error: SidecarError) -> None:
        """Note that it broke off."""
        self._status = "failed"
        self._error = {"code": "server_error", "message": error.message}


class OutputItems:
    """Builds the output items of one response from its events."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._open: Item | None = None
        self._text: list[str] = []
        self._logprobs: list[Item] = []

    @property
    def kind(self) -> str | None:
        """The type of the item that is being written."""
        return self._open["type"] if self._open else None

    @property
    def text(self) -> str:
        """The text of the item so far."""
        return "".join(self._text)

    @property
    def logprobs(self) -> list[Item]:
        """Those of the item's tokens so far; none unless they were asked for."""
        return self._logprobs

    def begin(self, kind: str) -> Item:
        """Open a `reasoning` or `message` item; as it is before its first piece."""
        self._text, self._logprobs = [], []
        if kind == "reasoning":
            self._open = {"id": new_id("rs_"), "type": kind, "summary": []}
        else:
            self._open = {
                "id": new_id("msg_"),
                "type": kind,
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
        return dict(self._open)

    def add(self, text: str, logprobs: list[Item]) -> None:
        """A piece of the open item."""
        self._text.append(text)
        self._logprobs += logprobs

    def end(self, token: str | None = None, *, is_cut: bool = False) -> Item:
        """Close the open item; as it is now."""
        item, text = self._open, self.text
        assert item is not None
        self._open = None
        if item["type"] == "message":
            status = "incomplete" if is_cut else "completed"
            part = output_text(text, self._logprobs)
            return {**item, "status": status, "content": [part]}
        item = {**item, "encrypted_content": token}
        if self._delivery.wants_summary:
            return {**item, "summary": [{"type": "summary_text", "text": text}]}
        return {**item, "content": [{"type": "reasoning_text", "text": text}]}

    def is_sent_whole(self, name: str) -> bool:
        """Whether a call is another item than a function's, or carries a bare text."""
        wire = self._delivery.names.get(name)
        return wire is not None and (wire.is_custom or wire.client_tool is not None)

    def call(self, call: ToolCall, item_id: str = "") -> Item:
        """A call as an item."""
        return call_item(call, self._delivery.names, item_id or new_id("fc_"))


def new_id(prefix: str) -> str:
    """A random id of an item."""
    return prefix + secrets.token_hex(16)


def output_text(text: str, logprobs: Sequence[Item] = ()) -> dict[str, Any]:
    """A piece of visible text."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return {**part, "logprobs": list(logprobs)}


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Token counts in the form of the Responses API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **usage.rotated_field,
    }
