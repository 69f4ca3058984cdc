"""
What a model cannot see: images, if it takes text only, and files, which none reads.

They are refused, or words stand in their place.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from sidecar.core.errors import UnsupportedContent
from sidecar.core.requests import Image, Message, Part

_KIND = re.compile(r"data:([a-z]{1,20}/[a-z0-9.+-]{1,40})[;,]", re.IGNORECASE)


def without_unseen(
    messages: Sequence[Message], policy: str, why_blind: str
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """
    The conversation with a note in place of what its model cannot see, and where.

    Args:
        policy: UNSUPPORTED_IMAGES. `error` refuses all; `auto` those of the newest user
            message: what a tool read, or an earlier message holds, the client sends
            again and again, and would never get on.
        why_blind: the model takes text only; empty: it takes images.
    Raises:
        UnsupportedContent: naming the first that is refused.
    """
    first = {"error": 0, "auto": _newest_user(messages)}.get(policy, len(messages))
    for message in messages[first:]:
        if policy == "error" or message.role == "user":
            _refuse(message, why_blind)
    paths = tuple(one.path for m in messages for one in _unseen(m, why_blind))
    noted = (
        replace(m, parts=tuple(_noted(part, why_blind) for part in m.parts))
        for m in messages
    )
    return tuple(noted), paths


def _unseen(message: Message, why_blind: str) -> list[Image]:
    return [one for one in message.images if one.is_file or why_blind]


def _newest_user(messages: Sequence[Message]) -> int:
    """
    Where the newest user message is.

    One before it that nobody has answered was refused, and its user has gone on. One
    right behind a result is its client's: in a chat's results no picture can stand.
    """
    roles = [message.role for message in messages]
    if "user" not in roles:
        return len(roles)
    newest = len(roles) - 1 - roles[::-1].index("user")
    before = [role for role in roles[:newest] if role != "user"]
    return len(roles) if before[-1:] == ["tool"] else newest


def _refuse(message: Message, why_blind: str) -> None:
    """Claude Code knows the first words: it takes that out, and asks again."""
    for one in _unseen(message, why_blind):
        known, what = "Could not process image", f"an image: {why_blind}"
        if one.is_file:
            known = "The PDF specified was not valid"
            what = "a file, and files are not read here: send its text, or its pages"
        remedy = "UNSUPPORTED_IMAGES=note puts words in its place"
        text = f"{known}: {one.path} is {what}; {remedy}"
        raise UnsupportedContent(text, param=one.path)


def _noted(part: Part, why_blind: str) -> Part:
    if isinstance(part, str) or not (part.is_file or why_blind):
        return part
    found = _KIND.match(part.source)
    kind = found[1] if found else ""
    if part.is_file:
        return f"[{kind or 'file'}: not shown, files are not read here]"
    return f"[{kind or 'image'}: not shown, this model takes text only]"
