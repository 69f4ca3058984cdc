"""
The grammar that an answer must keep to, as Lark text for llguidance.

White space is bounded: with JSON's own a model may write newlines for ever.
"""

import re

from sidecar.core.requests import OutputFormat
from sidecar.output.grammars.call_grammar import Calls
from sidecar.output.grammars.channel_rules import channel_final, channel_thoughts
from sidecar.output.grammars.lark import (
    ANY_OBJECT,
    LEADING,
    Tokens,
    check_patterns,
    joined,
    json_rule,
    text,
)

_BETWEEN = r"[ ]?|\n[ ]{0,20}"
_ANSWER_JSON = {"whitespace_flexible": True, "whitespace_pattern": _BETWEEN}
_NO_LEADING = 'leading: ""'
_CLASS_ESCAPES = {"d": "0-9", "w": "A-Za-z0-9_", "s": " \\t\\n\\r\\f\\v"}
_ESCAPE_OR_END = re.compile(r"\\.|/|\n", re.DOTALL)
_IN_SLASHES = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_START = re.compile(r"[ \t]*[?!]?start\b")


def answer_grammar(
    asked: OutputFormat, calls: Calls | None = None, *, is_behind_thinking: bool = False
) -> str:
    """
    The grammar of a text.

    Args:
        calls: that may come instead.
    Raises:
        ValueError: a pattern that cannot be told to the library.
    """
    leading = LEADING if is_behind_thinking else _NO_LEADING
    rules = [leading, f"answer: {_answer(asked)}"]
    if calls is None:
        return joined("start: leading answer", rules)
    start = f"start: leading (answer | {calls.expression})"
    return joined(start, [*rules, *calls.rules])


def channel_answer_grammar(
    asked: OutputFormat, calls: Calls | None, tokens: Tokens
) -> str:
    """The same for a model that writes messages on channels, thinking too."""
    rules = [f"answer: {_answer(asked)}", f"final: {channel_final(tokens)} answer"]
    last = "final" if calls is None else f"(final | {calls.expression})"
    start = f"start: {channel_thoughts(tokens)} {last}"
    return joined(start, [*rules, *(calls.rules if calls else ())])


def _answer(asked: OutputFormat) -> str:
    if asked.kind == "json_schema":
        check_patterns(asked.value)
    if asked.kind == "json_schema":
        options = {**_ANSWER_JSON, "lenient": not asked.is_strict}
        return json_rule(asked.value, options)
    if asked.kind == "json_object":
        return json_rule(ANY_OBJECT, _ANSWER_JSON)
    if asked.kind == "choice":
        return " | ".join(text(choice) for choice in asked.value)
    if asked.kind == "grammar":
        return f"%lark {{\n{_lark(asked.value)}\n}}"
    return f"/{_slashed(ascii_classes(asked.value))}/"


def _lark(grammar: str) -> str:
    """
    A client's grammar, as llguidance takes it within another.

    Raises:
        ValueError: it has no rule `start`: GBNF is not taken, for the library's own
            converter makes other grammars of some.
    """
    if not any(_START.match(line) for line in grammar.split("\n")):
        raise ValueError("it must be in Lark, with a rule `start`")
    return grammar


def ascii_classes(pattern: str) -> str:
    r"""
    A pattern whose `\d`, `\w` and `\s` mean ASCII, as JSON Schema's users expect.

    The library's are Unicode: an answer had Bengali digits.

    Raises:
        ValueError: a negated class within brackets.
    """
    found: list[str] = []
    at, is_inside = 0, False
    while at < len(pattern):
        escape = _ESCAPE.match(pattern, at)
        piece = escape.group() if escape else pattern[at]
        at += len(piece)
        if escape and escape[1].lower() in _CLASS_ESCAPES:
            piece = _class_of(escape[1], is_inside=is_inside)
        elif not escape and piece == "[":
            is_inside = True
        elif not escape and piece == "]":
            is_inside = False
        found.append(piece)
    return "".join(found)


def _class_of(letter: str, *, is_inside: bool) -> str:
    inside = _CLASS_ESCAPES[letter.lower()]
    if is_inside and letter.isupper():
        raise ValueError(f"\\{letter} within brackets is not supported")
    if is_inside:
        return inside
    return f"[^{inside}]" if letter.isupper() else f"[{inside}]"


def _slashed(pattern: str) -> str:
    """A pattern as Lark has it, between slashes."""
    return _ESCAPE_OR_END.sub(
        lambda found: _IN_SLASHES.get(found[0], found[0]), pattern
    )
