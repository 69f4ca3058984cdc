"""
The forms in which a model would write what a tool has shown it.

Agents show files with line numbers, and a model writes them without; within the JSON of
a call a newline is written as two characters. So the tokens of what was read are not
those of what is written, and a look-up in the prompt alone finds one line at a time.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator

_NUMBERED = re.compile(r"^[ ]*\d+(?:\t|→|\|[ ]?|:[ ]?)", re.MULTILINE)
_LEAST_NUMBERED = 0.8  # of the lines of a text, for it to be numbered
_MAX_TEXTS, _MAX_CHARS = 8, 400_000  # of all results together
_PIECE = 32_768  # characters: what is tokenized at once


def written_forms(results: Iterable[str]) -> list[str]:
    """
    What a model would write of the last results of tools, the newest last.

    As text, where line numbers were taken out, and as it stands in the JSON of a call.
    """
    forms: list[str] = []
    num_left = _MAX_CHARS
    for text in reversed([*results][-_MAX_TEXTS:]):
        shown = text[:num_left]
        plain = without_line_numbers(shown)
        forms.append(json.dumps(plain, ensure_ascii=False)[1:-1])
        forms += [plain] if plain != shown else []
        num_left -= len(shown)
        if num_left <= 0:
            break
    return forms[::-1]


def without_line_numbers(text: str) -> str:
    """A text whose lines are nearly all numbered, without the numbers."""
    num_lines = text.count("\n") + 1
    if len(_NUMBERED.findall(text)) < _LEAST_NUMBERED * num_lines:
        return text
    return _NUMBERED.sub("", text)


def encoded_pieces(
    texts: Iterable[str], encode: Callable[[str], list[int]]
) -> Iterator[list[int]]:
    """
    The ids of the first characters of all texts, piece by piece.

    A tokenizer takes some hundred bytes for each character that it is given at once.
    """
    num_left = 2 * _MAX_CHARS
    for text in texts:
        for start in range(0, min(len(text), num_left), _PIECE):
            end = min(start + _PIECE, num_left)
            yield encode(text[start:end])
        num_left = max(num_left - len(text), 0)
