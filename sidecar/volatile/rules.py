"""Loads and checks rules.toml: each volatile kind's shape and policy."""

import bisect
import functools
import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sidecar.volatile import matchers
from sidecar.volatile.marked_message import WHITE_SPACE

Action = Literal["pin", "restate", "stop", "drop", "off"]
Shared = Literal["", "always", "opaque_id"]
Past = Literal["", "answered", "newest"]
BUILTIN_FILE = Path(__file__).parent / "rules.toml"
_ROLES = ("system", "user")
_REQUIRED = ("kind", "where", "shape", "policy", "evidence", "matches", "passes")


class RuleError(ValueError):
    """A rule cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """
    What to do with a span of a kind; see docs/reuse.md s4.2.

    Args:
        differ, gone, new: the value differs from the stored one, is not there any
            more, was not there before.
        shared: when another thread of the same key may share its value; "": never.
        tells: it says who asks, where or what: two requests in which it differs are
            not of one conversation for their equal words.
        newer: a pattern of text that speaks of a newer value of its kind: an earlier
            one is not said again behind that, nor behind a later one.
        newer_than_said: the same for a value that stands in a user's message: that of
            the system text comes anew with each request, and seldom older than what
            is said behind it.
        past: in which messages a value that is gone may stay; "": in all.
    """

    differ: Action
    gone: Action
    new: Action
    shared: Shared = ""
    tells: bool = False
    newer: str = ""
    past: Past = ""
    newer_than_said: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One way a kind of volatile text may look."""

    kind: str
    where: tuple[str, ...]
    shape: str
    arguments: Mapping[str, Any]
    sentinel: str
    policy: Policy
    vanishes: bool = False  # a last message that is sent each time and never kept
    matches: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    passes: tuple[str, ...] = field(default=(), repr=False)


EDGE_POLICY = Policy("pin", "pin", "pin")
TAIL_POLICY = Policy("stop", "stop", "stop")
NOTE_POLICY = Policy("stop", "pin", "stop")
SILENT_KINDS = (*WHITE_SPACE, "note")  # and what is our own
UNKNOWN_POLICY = Policy("stop", "stop", "stop", tells=True)


@dataclass(frozen=True)
class RuleSet:
    """All rules in force, and the policy of each kind."""

    rules: tuple[Rule, ...]
    policies: Mapping[str, Policy]

    def is_vanishing(self, role: str, text: str) -> bool:
        """Whether a last message of this text will not be kept by its client."""
        vanishing = [rule for rule in self.rules if rule.vanishes]
        return bool(find(vanishing, role, text))

    def policy(self, kind: str) -> Policy:
        """The policy of a kind, built-in kinds included; one that is gone: stop."""
        return self.policies.get(kind, UNKNOWN_POLICY)

    @functools.cached_property
    def digest(self) -> str:
        """Names the rules: what older ones found in a prompt is not paired by them."""
        text = repr((self.rules, sorted(self.policies.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_rules(
    user_file: Path | None = None, overrides: Mapping[str, str] | None = None
) -> RuleSet:
    """
    Load the built-in rules, a user's own, and the policy overrides.

    Args:
        overrides: kind -> `stop`, `pin` or `restate` (CACHE_PIN_POLICY).
    Raises:
        RuleError: a rule is malformed or has no examples; an override is unknown.
    """
    rules = _read(BUILTIN_FILE)
    policies = {rule.kind: rule.policy for rule in rules} | {
        "edge_ws": EDGE_POLICY,
        "tail_ws": TAIL_POLICY,
        "note": NOTE_POLICY,
    }
    for rule in _read(user_file) if user_file is not None else ():
        if policies.setdefault(rule.kind, rule.policy) != rule.policy:
            raise RuleError(
                f"{getattr(user_file, 'name', '')}: {rule.kind!r} has another policy "
                "already: name a kind of your own, or set CACHE_PIN_POLICY"
            )
        rules.append(rule)
    for kind, action in (overrides or {}).items():
        if kind not in policies or action not in ("stop", "pin", "restate"):
            raise RuleError(
                f"{kind!r}: {action!r} must be a known kind and stop, pin or restate"
            )
        chosen: Any = action
        policies[kind] = replace(policies[kind], differ=chosen, gone=chosen, new=chosen)
    live = tuple(r for r in rules if policies[r.kind].differ != "off")
    return RuleSet(live, policies)


def _read(file: Path) -> list[Rule]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RuleError(f"{file.name}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise RuleError(f"{file.name}: {error}") from error
    return parse_rules(text, file.name)


def parse_rules(text: str, name: str) -> list[Rule]:
    """
    The rules of a TOML text, their examples tried.

    Args:
        name: of the text, for errors.
    Raises:
        RuleError: a rule is malformed or an example is not as it says.
    """
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise RuleError(f"{name}: {error}") from error
    entries = content.pop("rule", [])
    if content or not isinstance(entries, list):
        names = ", ".join(content) or "rule"
        raise RuleError(f"{name}: it must hold [[rule]] tables, not {names}")
    return [_rule(entry, f"{name} rule {i + 1}") for i, entry in enumerate(entries)]


def _rule(entry: dict[str, Any], name: str) -> Rule:
    _check_form(entry, name)
    extra = ("sentinel", "shared", "vanishes", "newer", "newer_than_said", "past")
    arguments = {k: v for k, v in entry.items() if k not in (*_REQUIRED, *extra)}
    rule = Rule(
        kind=entry["kind"],
        where=tuple(entry["where"]),
        shape=entry["shape"],
        arguments=arguments,
        sentinel=entry.get("sentinel", ""),
        policy=_policy(entry, name),
        vanishes=bool(entry.get("vanishes", False)),
        matches=tuple((text, value) for text, value in entry["matches"]),
        passes=tuple(entry["passes"]),
    )
    _try(rule, name)
    return rule


def _check_form(entry: object, name: str) -> None:
    if not isinstance(entry, dict):
        raise RuleError(f"{name}: must be a table")
    missing = [key for key in _REQUIRED if key not in entry]
    if missing:
        raise RuleError(f"{name}: {', '.join(missing)} missing")
    if not isinstance(entry["kind"], str) or not entry["kind"]:
        raise RuleError(f"{name}: kind must be a word")
    if entry["shape"] not in [*matchers.SHAPES]:
        raise RuleError(f"{name}: shape must be one of {', '.join(matchers.SHAPES)}")
    if not _are_texts(entry["where"]) or not set(entry["where"]) <= set(_ROLES):
        raise RuleError(f"{name}: where must be of {', '.join(_ROLES)}")
    pairs = entry["matches"]
    if not isinstance(pairs, list) or not all(
        _are_texts(pair) and len(pair) == 2 for pair in pairs
    ):
        raise RuleError(f"{name}: matches must be a list of [text, value]")
    if not _are_texts(entry["passes"]) or not (pairs or "after" in entry):
        raise RuleError(f"{name}: a rule needs positive and negative examples")
    if not isinstance(entry["policy"], dict):
        raise RuleError(f"{name}: policy must give differ, gone and new an action")


def _are_texts(value: object) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(item, str) for item in value)  # type: ignore[attr-defined]


def _try(rule: Rule, name: str) -> None:
    """Let wrong arguments and wrong examples come out at load, not in a request."""
    try:
        for role in rule.where:
            wanted = [*((text, None) for text in rule.passes), *rule.matches]
            for text, value in wanted if "after" not in rule.arguments else ():
                found = [text[a:b] for _, (a, b) in find([rule], role, text)]
                if found != ([] if value is None else [value]):
                    raise RuleError(f"{name}: finds {found} in the example {text!r}")
    except (TypeError, KeyError, AttributeError, re.error) as error:
        kind = type(error).__name__
        raise RuleError(f"{name}: {rule.shape}: {kind} {error}") from error


def _policy(entry: Mapping[str, Any], name: str) -> Policy:
    actions = [entry["policy"].get(case) for case in ("differ", "gone", "new")]
    if not all(action in get_args(Action) for action in actions):
        raise RuleError(f"{name}: policy must give differ, gone and new an action")
    differ, gone, new = actions
    if {"drop", "off"} & {*actions} and len({*actions}) > 1:
        raise RuleError(f"{name}: policy: drop and off are for all three or for none")
    if differ == "drop" and entry["where"] != ["system"]:
        raise RuleError(f"{name}: policy: only what stands in system text is dropped")
    shared: Any = entry.get("shared", False)
    if isinstance(shared, bool):
        shared = "always" if shared else ""
    if shared not in get_args(Shared):
        raise RuleError(f'{name}: shared must be true, false or "opaque_id"')
    past = entry.get("past", "")
    if past not in get_args(Past):
        raise RuleError(f'{name}: past must be "answered" or "newest"')
    newer = str(entry.get("newer", ""))
    newer_than_said = str(entry.get("newer_than_said", ""))
    for pattern in (newer, newer_than_said):
        re.compile(pattern)
    return Policy(
        differ, gone, new, shared, not shared, newer, past, newer_than_said or newer
    )


def find(
    rules: Sequence[Rule], role: str, text: str
) -> list[tuple[Rule, matchers.Range]]:
    """
    All finds in one text part, in order, not overlapping; the earlier rule wins.

    A paragraph rule begins where the last find of the kind it names ends.
    """
    found: list[tuple[Rule, matchers.Range]] = []
    taken: list[matchers.Range] = []  # sorted
    for rule in rules:
        if role not in rule.where:
            continue
        arguments = dict(rule.arguments)
        if "after" in arguments:
            kind = arguments.pop("after")
            ends = [span[1] for other, span in found if other.kind == kind]
            arguments["after_end"] = max(ends, default=None)
        own: list[matchers.Range] = []
        for span in matchers.SHAPES[rule.shape](text, **arguments):
            if not (_overlaps(span, taken) or _overlaps(span, own)):
                own.append(span)
        found += [(rule, span) for span in own]
        taken = sorted(taken + own) if own else taken
    return sorted(found, key=lambda item: item[1])


def _overlaps(span: matchers.Range, taken: list[matchers.Range]) -> bool:
    """Whether a range shares text with one of a sorted list that share none."""
    before_end = bisect.bisect_left(taken, (span[1],))
    return before_end > 0 and taken[before_end - 1][1] > span[0]
