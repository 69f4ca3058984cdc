"""What a client said, as the model is to read it: no more than the spec lets change."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sidecar.core.requests import Message, ToolCall
from sidecar.volatile import rules as rules_module
from sidecar.volatile.rules import load_rules
from testkit.oracle_talk import Part, Say, Slot, Spoken

_RULES = load_rules(None, {})
_BLANK = ("", "(no content)")


def as_said(messages: Sequence[Spoken]) -> list[Spoken]:
    """
    All that the client said, with its volatile stretches, without telemetry.

    Blank answers are none.
    """
    said: list[Spoken] = []
    for message in messages:
        if isinstance(message, Say):
            message = as_read(message)
            parts = tuple(p for p in message.parts if not _is_telemetry(p))
            said.append(replace(message, parts=parts))
        else:
            is_blank = message.text.strip() in _BLANK
            said.append(replace(message, text="" if is_blank else message.text))
    return said


def as_messages(said: Sequence[Spoken]) -> list[Message]:
    """The form that the product renders."""
    return [_as_message(message) for message in said]


def _as_message(message: Spoken) -> Message:
    if isinstance(message, Say):
        return Message(message.role, (message.text,), tool_call_id=message.call_id)  # type: ignore[arg-type]
    calls = (ToolCall(*message.call),) if message.call else ()
    parts = (message.text,) if message.text else ()
    return Message("assistant", parts, message.reasoning, calls)


def _is_telemetry(part: Part) -> bool:
    return isinstance(part, Slot) and part.kind == "billing_header"


def as_read(message: Say) -> Say:
    """A message by what the product's rules find in it, whoever wrote it."""
    if not message.is_hostile or message.role == "tool":
        return message
    core = "".join(p if isinstance(p, str) else p.value for p in message.parts)
    text = f"{message.lead}{core}{message.trail}"
    parts: list[Part] = []
    at = 0
    for start, end, slot in sorted(_spans(message, text), key=lambda found: found[:2]):
        parts += [text[at:start], slot]
        at = end
    kept = tuple(part for part in (*parts, text[at:]) if part != "")
    return replace(message, parts=kept, lead="", trail="")


def _spans(message: Say, text: str) -> Iterator[tuple[int, int, Slot]]:
    """What the rules find, and what the client had left out of its place."""
    taken: list[tuple[int, int]] = []
    for rule, (start, end) in rules_module.find(_RULES.rules, message.role, text):
        if not rule.vanishes:
            taken.append((start, end))
            yield start, end, Slot(rule.kind, text[start:end])
    at = len(message.lead)
    for part in message.parts:
        is_gone = isinstance(part, Slot) and not part.value
        if is_gone and not any(start <= at <= end for start, end in taken):
            assert isinstance(part, Slot)
            yield at, at, part
        at += len(part if isinstance(part, str) else part.value)
