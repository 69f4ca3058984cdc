"""A last message of the assistant's with which the answer begins."""

from dataclasses import replace

from sidecar.core.errors import BadRequest
from sidecar.core.requests import ChatRequest, Message


def is_begun(messages: tuple[Message, ...]) -> bool:
    """Whether the last message may be the beginning of an answer."""
    last = messages[-1]
    return last.role == "assistant" and not last.tool_calls and bool(last.text.strip())


def with_begun_answer(request: ChatRequest, param: str) -> ChatRequest:
    """
    The same request, its last message taken for the beginning of its answer.

    An answer that is begun has no thinking: what asks for it is named as ignored.

    Args:
        param: the field that asks for it.
    Raises:
        BadRequest: that message is no answer with text; the whole answer is to be of a
            form, which this is only the end of.
    """
    *before, last = request.messages
    if not is_begun(request.messages):
        raise BadRequest(
            f"{param}: the last message must be the assistant's, a text without calls",
            param=param,
        )
    if not any(message.role in ("user", "tool") for message in before):
        raise BadRequest("messages must begin with a user's", param="messages")
    if asked := _of_whole_answers(request):
        raise BadRequest(
            f"{asked[0]} cannot be set where the answer is begun by the last message",
            param=asked[0],
        )
    source = request.thinking.source
    unheard = (source,) if request.thinking.enabled and source else ()
    return replace(
        request,
        messages=tuple(before),
        begun=last,
        ignored=(*request.ignored, *unheard),
    )


def _of_whole_answers(request: ChatRequest) -> list[str]:
    """Fields that say what an answer must be from its beginning on."""
    form, choice = request.output_format, request.tool_choice
    asked = [form.param.partition(".")[0]] if form is not None else []
    return asked + (["tool_choice"] if choice.mode in ("required", "named") else [])
