"""Cutting a text into pieces that are spoken one after the other."""

import re
from collections.abc import Sequence

_MAX_CHARACTERS = 300  # some twenty seconds of speech
_SENTENCE_ENDS = re.compile(r"(?<=[.!?…;:])\s+|(?<=[。！？；])|\s*\n\s*")


def pieces(text: str) -> list[str]:
    """
    Sentences, short ones joined, none longer than 300 characters.

    A sentence that is longer is cut between words. What is blank is left out.
    """
    found: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        sentences = [s for s in _SENTENCE_ENDS.split(line) if s and s.strip()]
        found += _joined([part for s in sentences for part in _fitting(s.strip())])
    return found


def _joined(parts: Sequence[str]) -> list[str]:
    found: list[str] = []
    for part in parts:
        if found and len(found[-1]) + len(part) < _MAX_CHARACTERS:
            found[-1] += f" {part}"
        else:
            found.append(part)
    return found


def _fitting(sentence: str) -> list[str]:
    found = []
    while len(sentence) > _MAX_CHARACTERS:
        cut = sentence.rfind(" ", 1, _MAX_CHARACTERS + 1)
        cut = cut if cut > 0 else _MAX_CHARACTERS
        found.append(sentence[:cut].strip())
        sentence = sentence[cut:].strip()
    return [*found, sentence] if sentence else found
