"""
Conversations for templates that demand one answer behind each question.

Clients send answers in a row, an answer first (a greeting), or an empty one (a turn
that was all thinking). Nothing of them is lost: what cannot stand as an answer is said
in a marked block of the user's.
"""

from collections.abc import Sequence
from dataclasses import replace

from sidecar.core.requests import Message


def join_answers(messages: Sequence[Message], *, with_calls: bool) -> list[Message]:
    """
    Let no answer be first, empty, or right behind another.

    Args:
        with_calls: the template prints the text beside a call.
    """
    joined: list[Message] = []
    for message in messages:
        if message.role != "assistant":
            joined.append(message)
            continue
        before = joined[-1] if joined else None
        if _is_answer(before):
            if message.tool_calls and not with_calls:
                joined[-1] = _as_users(joined[-1])
            else:
                message = _joined(joined.pop(), message)
        if _is_empty(message):
            continue
        is_first = all(other.role == "system" for other in joined)
        if is_first and not message.tool_calls:
            message = _as_users(message)
        joined.append(message)
    return joined


def _is_answer(message: Message | None) -> bool:
    return (
        message is not None and message.role == "assistant" and not message.tool_calls
    )


def _is_empty(message: Message) -> bool:
    return not (message.text or message.tool_calls)


def _joined(first: Message, second: Message) -> Message:
    thoughts = [m.reasoning for m in (first, second) if m.reasoning]
    return replace(
        second,
        parts=(*first.parts, *second.parts),
        reasoning="\n".join(thoughts) or None,
    )


def _as_users(answer: Message) -> Message:
    return Message("user", ("<assistant>", answer.text, "</assistant>"))
