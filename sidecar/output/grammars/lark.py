"""Pieces of Lark text, as llguidance reads them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Tokens = Mapping[str, int]
LEADING = 'leading: ("\\n" "\\n"?)?'  # models write newlines behind a close tag
# As `tojson` prints, so that a call is byte-equal to how a template prints it later.
_CALL_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
ANY_OBJECT = {"type": "object"}
ANY_NAME = r"/[A-Za-z_][A-Za-z0-9_-]*/"  # of an argument
_MAX_PATTERNS_AT_ONCE = 4
_MAX_CHARS = 1 << 18  # of the rules of one tool's call
# What within a longer text may be one token.
_INNER_MARKS = re.compile(
    r"(｜DSML｜|\]<\]minimax\[>\[|</?tool_call>|</?(?:longcat_)?arg_(?:key|value)>)"
)


def text(value: str) -> str:
    """A text that must stand there."""
    return json.dumps(value, ensure_ascii=False)


def mark(value: str, tokens: Tokens) -> str:
    """
    A mark that must stand there, or a text with marks in it.

    What is one token in the vocabulary must be named as that token: as a text the
    grammar would let the token through and then fail on it.
    """
    return f"<[{tokens[value]}]>" if value in tokens else spelled(value, tokens)


def spelled(value: str, tokens: Tokens) -> str:
    """A text that must stand there: of its pieces the marks alone may be tokens."""
    is_mark = _INNER_MARKS.fullmatch
    return " ".join(
        f"<[{tokens[piece]}]>" if is_mark(piece) and piece in tokens else text(piece)
        for piece in _INNER_MARKS.split(value)
        if piece
    )


def any_of(choices: Sequence[str]) -> str:
    """One of these expressions."""
    return f"({' | '.join(choices)})"


def up_to(rule: str, end: str, tokens: Tokens) -> str:
    """
    The rule of any text and the end that stands behind it, which it does not hold.

    Not even in letters, where the end has a mark that is a token: its readers see the
    text alone.
    """
    found = _INNER_MARKS.search(end)
    inner = found and found[0] in tokens
    if end not in tokens and not inner:
        return f"{rule}[suffix={text(end)}]: /(?s:.*)/"
    at = found.start() if found and end not in tokens else 0
    before, letters = (_slashed(one) for one in (end[:at], end))
    name = rule.upper()
    return (
        f"{rule}: {name} {mark(end[at:], tokens)}\n"
        f"{name}: /(?s:.*){before}/ & ~/(?s:.*){letters}(?s:.*)/"
    )


def _slashed(literal: str) -> str:
    """A text as a pattern between slashes."""
    return re.escape(literal).replace("/", "\\/").replace("\\\n", "\\n")


def json_rule(schema: Any, options: Mapping[str, Any]) -> str:
    """JSON of a schema, by the library's own compiler."""
    whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return f"%json {json.dumps({**whole, 'x-guidance': options})}"


def call_json(schema: Any) -> str:
    """JSON within a call."""
    return json_rule(schema, _CALL_JSON)


def check_patterns(schema: Any) -> None:
    """
    Refuse what the library would intersect for minutes.

    Raises:
        ValueError: too many patterns hold at once.
    """
    level = [schema]
    while level:
        for item in level:
            both = item.get("allOf") if isinstance(item, dict) else None
            if isinstance(both, list):
                patterns = [one for one in both if "pattern" in str(one)]
                if len(patterns) > _MAX_PATTERNS_AT_ONCE:
                    most = _MAX_PATTERNS_AT_ONCE
                    raise ValueError(f"allOf with more than {most} patterns")
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]


class Rules:
    """
    The rules of one tool's call.

    Raises:
        ValueError: they are longer than any honest tool's.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._num_chars = 0

    def add(self, rule: str) -> None:
        """One more."""
        self.spend(len(rule))
        self.texts.append(rule)

    def spend(self, num_chars: int) -> None:
        """Count a text that will be a part of one."""
        self._num_chars += num_chars
        if self._num_chars > _MAX_CHARS:
            raise ValueError("the schema of a tool is too long")


def joined(start: str, rules: Sequence[str]) -> str:
    """A whole grammar; a rule that several calls share stands there once."""
    return "\n".join([start, *dict.fromkeys(rules)]) + "\n"
