"""
A rule for a value that changes from request to request, made from two of its lines.

What it proposes is tried as a user's own rules are, and on the text that it is for: it
must find that value there and nothing else.
"""

import hashlib
import json
import os.path
import re
from dataclasses import dataclass

from sidecar.volatile.rules import RuleError, find, parse_rules

_MAX_LINE_CHARS = 512
_MAX_VALUE_CHARS = 200
_MIN_LABEL_CHARS = 4
_KEY = re.compile(r'"([A-Za-z_][\w.-]{0,63})"[ \t]*:[ \t]*"[^"\\\n]*$')
# Not a clock's colon, an address's, or a comparison's sign.
_LABEL = re.compile(r"[^:=\n]{2,80}(?:(?<!\d):(?=[ \t])|(?<![\d=!<> ])=(?!=))[ \t]*")
_WORD_WITH_DIGIT = re.compile(r"\S*\d")
_ROLES = ("system", "user")


@dataclass(frozen=True, slots=True)
class ProposedRule:
    """
    A rule that would know a value.

    Args:
        role: of the message that holds it. shape: json_string or line_pattern.
        name: the key, or what the line begins with. example: text with such a value.
        value: the value in it.
    """

    role: str
    shape: str
    name: str
    example: str
    value: str

    @property
    def place(self) -> tuple[str, str, str]:
        """The same for each value that stands there."""
        return self.role, self.shape, self.name

    def toml(self, evidence: str) -> str:
        """The table for CACHE_RULES_FILE; the model is told each newer value."""
        word = re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")[:40]
        digest = hashlib.sha256(repr(self.place).encode()).hexdigest()[:4]
        label = re.escape(self.name).replace("\\ ", " ")
        pattern = f"{label}.{{1,{_MAX_VALUE_CHARS}}}"
        shape = {"key": self.name} if self.shape == "json_string" else {}
        fields = {
            "kind": f"own_{word or 'value'}_{digest}",
            "where": [self.role],
            "shape": self.shape,
            **(shape or {"pattern": pattern}),
            "evidence": evidence,
            "matches": [[self.example, self.value]],
            "passes": ["no such value"],
        }
        lines = [f"{name} = {_toml(value)}" for name, value in fields.items()]
        policy = 'policy = {differ = "restate", gone = "restate", new = "restate"}'
        return "\n".join(["", "[[rule]]", *lines, policy, ""])


def propose_rule(role: str, text: str, before: str, now: str) -> ProposedRule | None:
    """
    The rule for a value in `text`, or None: it is not plain what the value is.

    Args:
        before, now: the line that holds it, in the last prompt and in `text`.
    """
    if role not in _ROLES or before == now:
        return None
    shared = os.path.commonprefix([before, now])
    proposed = _of_key(role, shared) or _of_line(role, shared, before, now)
    if proposed is None or not _finds_one(proposed, text):
        return None
    return proposed


def _of_key(role: str, shared: str) -> ProposedRule | None:
    if (key := _KEY.search(shared)) is None:
        return None
    return ProposedRule(role, "json_string", key[1], f'"{key[1]}": "v1"', "v1")


def _of_line(role: str, shared: str, before: str, now: str) -> ProposedRule | None:
    label = _LABEL.match(shared)
    name = label[0] if label else _whole_words(shared)
    longest = max(len(before), len(now))
    values = before[len(name) :], now[len(name) :]
    is_value = all(value.strip() for value in values)
    if not is_value or len(name.strip()) < _MIN_LABEL_CHARS:
        return None
    if longest > _MAX_LINE_CHARS or longest - len(name) > _MAX_VALUE_CHARS:
        return None
    return ProposedRule(role, "line_pattern", name, now, now)


def _whole_words(text: str) -> str:
    """The words that a text begins with, up to one with a digit, or the last one."""
    digit = _WORD_WITH_DIGIT.search(text)
    text = text[: digit.start()] if digit else text
    return text[: text.rfind(" ") + 1]


def _finds_one(proposed: ProposedRule, text: str) -> bool:
    """Whether the rule is in order and finds one value in the text, its own."""
    try:
        rules = parse_rules(proposed.toml("proposed"), "proposed")
    except RuleError:
        return False
    found = [text[start:end] for _, (start, end) in find(rules, proposed.role, text)]
    if proposed.shape == "json_string":
        return len(found) == 1
    return [line.removesuffix("\n") for line in found] == [proposed.value]


def _toml(value: object) -> str:
    """JSON's strings and lists of strings are TOML's, too."""
    return json.dumps(value, ensure_ascii=False)
