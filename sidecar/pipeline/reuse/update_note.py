"""
The tail note: what a prompt says again because an older value stands in its place.

A note carries a mark that nobody outside knows, in its opening and in its closing tag:
so the model can tell it from text that only looks like one (a tool's result, a value
that is said again), and no value can end it early. Where the mark has got into the
conversation all the same, nothing is said in notes.
"""

import functools
from collections.abc import Iterable, Sequence

from sidecar.core.lasting_secret import secret_for
from sidecar.memory.lineage import Note, Restated, stated_by
from sidecar.pipeline.template.elements import Element, ImageSlot
from sidecar.volatile.marked_message import Span

_NONE_NOW = "(none now)"


@functools.cache
def note_mark() -> str:
    """What all notes are marked with: equal notes must stay equal."""
    return secret_for("note").hex()[:8]


def write_note(restated: Sequence[Restated], roles: Sequence[str]) -> Note:
    """
    The tail note that says these values, the last one of a kind last.

    Kinds with blocks come first: their lines may look like single values.

    Args:
        roles: of the prompt's messages: each value is named by where it stood.
    """
    blocks = {item.key[2] for item in restated if "\n" in item.value.strip("\n")}
    ordered = sorted(restated, key=lambda item: item.key[2] not in blocks)
    lines = [_line(item, _place(item.key[0], roles)) for item in ordered]
    tag = f"context-update {note_mark()}"
    head = f"\n\n<{tag}>\nThese values replace the ones given above.\n"
    return Note(f"{head}{''.join(lines)}</{tag}>", stated_by(restated))


def quotes_a_note(elements: Iterable[Element]) -> bool:
    """Whether a text, a value or a turn, none of them our note, has the mark of one."""
    mark = note_mark()
    return any(mark in _text_of(element) for element in elements)


def _text_of(element: Element) -> str:
    if isinstance(element, Span):
        return element.value
    if isinstance(element, ImageSlot):
        return ""
    return element if isinstance(element, str) else element.healed.raw_text


def max_for_notes(plain_len: int) -> int:
    """
    How many tokens longer than the plain prompt a prompt may be, notes and all.

    Beyond that the plain one is computed once, and later prompts go on from it.
    """
    return max(plain_len // 10, 2048)


def _place(message: int, roles: Sequence[str]) -> str:
    """A message in words, such as "user message 2"; of a role's only one no number."""
    role = roles[message]
    number = f" {roles[: message + 1].count(role)}" if roles.count(role) > 1 else ""
    return f"{role} message{number}"


def _line(item: Restated, place: str) -> str:
    kind = item.key[2]
    label = kind if kind == "message_id" else kind.replace("_", " ")
    if item.ordinal:
        label += f" #{item.ordinal + 1}"
    label += f" ({place})"
    value = item.value.strip("\n") or _NONE_NOW
    return f"{label}:{chr(10) if chr(10) in value else ' '}{value}\n"
