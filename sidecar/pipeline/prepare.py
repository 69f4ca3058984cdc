"""Messages -> what the model reads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sidecar.core.prompt import ChatTokenizer, PreparedPrompt
from sidecar.core.requests import ChatRequest, Message, Tool
from sidecar.pipeline.encoding import PromptEncoder
from sidecar.pipeline.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ThinkingDefaults:
    """DEFAULT_THINKING and PRESERVE_THINKING."""

    enabled: bool
    preserve: bool


class Pipeline:
    """The input side of one loaded model. Safe from any thread."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        think_open: str,
        defaults: ThinkingDefaults,
    ) -> None:
        self.template = ChatTemplate(tokenizer)
        self.encoder = PromptEncoder(tokenizer)
        self._think_open = think_open
        self._defaults = defaults

    def prepare(self, request: ChatRequest) -> PreparedPrompt:
        """
        Render and tokenise a chat request.

        Raises:
            BadRequest: the template refuses the conversation.
        """
        thinking = request.thinking.enabled
        if thinking is None:
            thinking = self._defaults.enabled
        tools = offered_tools(request)
        messages = state_choice(request)
        kwargs = self._template_kwargs(request, thinking)
        text = self.template.render(messages, tools, kwargs)
        opens = text.rstrip().lower().endswith(self._think_open.lower())
        return PreparedPrompt(self.encoder.encode(text), text, opens, thinking)

    def _template_kwargs(
        self, request: ChatRequest, thinking: bool
    ) -> Mapping[str, Any]:
        kwargs: dict[str, Any] = {"enable_thinking": thinking}
        if self._defaults.preserve:
            kwargs["preserve_thinking"] = True
        if self.template.traits.reasoning_effort and request.thinking.effort:
            kwargs["reasoning_effort"] = request.thinking.effort
        return {**kwargs, **request.template_kwargs, "enable_thinking": thinking}


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
