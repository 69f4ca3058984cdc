"""
The forms in which a model would write what a tool has shown it.

Agents show files with line numbers, and a model writes them without; within the JSON of
a call a newline is written as two characters. So the tokens of what was read are not
those of what is written, and a look-up in the prompt alone finds one line at a time.
"""

import json
import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"^[ ]*\d+(?:\t|→|\|[ ]?|:[ ]?)", re.MULTILINE)
_LEAST_NUMBERED = 0.8  # of the lines of a text, for it to be numbered
_MAX_TEXTS, _MAX_CHARS = 8, 400_000


def written_forms(results: Iterable[str]) -> list[str]:
    """
    What a model would write of the last results of tools, the newest last.

    As text, where line numbers were taken out, and as it stands in the JSON of a call.
    """
    forms = []
    for text in [*results][-_MAX_TEXTS:]:
        plain = without_line_numbers(text[:_MAX_CHARS])
        forms += [plain] if plain != text else []
        forms.append(json.dumps(plain, ensure_ascii=False)[1:-1])
    return forms


def without_line_numbers(text: str) -> str:
    """A text whose lines are nearly all numbered, without the numbers."""
    num_lines = text.count("\n") + 1
    if len(_NUMBERED.findall(text)) < _LEAST_NUMBERED * num_lines:
        return text
    return _NUMBERED.sub("", text)
