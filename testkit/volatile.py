"""Texts with volatile values, and the notes that say them again."""

import re

from sidecar.core.requests import Message
from sidecar.pipeline.reuse.update_note import note_mark
from testkit.chats import system, words

OPENER, CLOSER = f"<context-update {note_mark()}>", f"</context-update {note_mark()}>"
NOTE = re.compile(rf"\n\n{OPENER}\n.*?{CLOSER}", re.DOTALL)
HEAD = f"{OPENER}\nThese values replace the ones given above.\n"


PLACE = re.compile(r" \((?:system|user|tool) message(?: \d+)?\)(?=:)")


def notes(text: str) -> list[str]:
    """What each tail note says, in order; without where each value stood."""
    return [PLACE.sub("", note) for note in notes_with_places(text)]


def notes_with_places(text: str) -> list[str]:
    """What each tail note says, in order."""
    return [
        note.strip().removeprefix(HEAD).removesuffix(CLOSER)
        for note in NOTE.findall(text)
    ]


def without_notes(text: str) -> str:
    """The text as if nothing had been said again."""
    return NOTE.sub("", text)


def block(of: str, size: int = 150) -> str:
    """An inbound context block of some 200 tokens."""
    body = f'{{"chat": "{of}", "text": "{words(size, len(of))}"}}'
    return f"## Inbound Context (trusted metadata)\n```json\n{body}\n```\n\n"


def project(behind: str, before: str = "You are a helper. " + words(16)) -> Message:
    """A system text with a place for the block."""
    return system(f"{before}\n{behind}# Project Context\n{words(300, 1)}")


def clock(value: str, size: int = 100) -> Message:
    """A system text with a clock, and that many words behind it."""
    return system(f"You are X.\nCurrent time is {value}.\n{words(size)}")
