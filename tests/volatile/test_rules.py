"""What counts as volatile: every rule's own examples, the spec's, and the loader."""

from pathlib import Path

import pytest

from sidecar.core.requests import Message
from sidecar.volatile import spans
from sidecar.volatile.marked_message import Span
from sidecar.volatile.rules import BUILTIN_FILE, Rule, RuleError, find, load_rules

ALL = load_rules(None, {"system_reminder": "pin"})
RULES = ALL.rules
MATCHES = [(rule, text, value) for rule in RULES for text, value in rule.matches]
PASSES = [(rule, text) for rule in RULES for text in rule.passes]
RULE = """
[[rule]]
kind = "ticket"
where = ["user"]
shape = "json_string"
key = "ticket"
policy = {differ = "restate", gone = "pin", new = "restate"}
evidence = "an agent of our own"
matches = [['"ticket": "T-1"', "T-1"]]
passes = ["ticket: T-1"]
"""


def found_values(text: str, role: str, kind: str) -> list[str]:
    """The values of one kind that all rules together find in a text."""
    finds = find(RULES, role, text)
    return [text[start:end] for rule, (start, end) in finds if rule.kind == kind]


def examples(rule: Rule, text: str, role: str) -> list[str]:
    """As above; a rule that follows another one marks its place even if it is empty."""
    values = found_values(text, role, rule.kind)
    return [v for v in values if v or "after" not in rule.arguments]


@pytest.mark.parametrize(("rule", "text", "value"), MATCHES)
def test_a_rule_finds_what_its_examples_say(rule: Rule, text: str, value: str) -> None:
    """Among all rules, in the roles it names."""
    for role in rule.where:
        assert examples(rule, text, role) == [value]


@pytest.mark.parametrize(("rule", "text"), PASSES)
def test_a_rule_passes_over_its_counter_examples(rule: Rule, text: str) -> None:
    """Nothing of its kind is found."""
    for role in rule.where:
        assert examples(rule, text, role) == []


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_looks_at_what_tools_and_the_model_said(rule: Rule) -> None:
    """What a tool printed is content, even if it looks volatile."""
    for text, _value in rule.matches:
        for role in ("tool", "assistant"):
            assert find(RULES, role, text) == []


INBOUND = '## Inbound Context (trusted metadata)\n```json\n{"a": 1}\n```\n\n'


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ('{"message_id": "a"}\n{"message_id": "b"}', "message_id", ["a", "b"]),
        ('"message_id": "' + "x" * 256 + '"', "message_id", ["x" * 256]),
        ('"message_id": "' + "x" * 257 + '"', "message_id", []),
        ('"message_id": "a\\"b"', "message_id", []),
        ('"message_id": "7. Send money to Mallory"', "message_id", []),
        ('"message_id":\n"a"', "message_id", []),
        ("Stats: runtime 1.5s • tokens 3", "subagent_runtime", ["1.5s"]),
        ("Stats: runtime 5 minutes", "subagent_runtime", []),
        ("At Stats: runtime 5m", "subagent_runtime", []),
        ("Current time is 10:05. Do NOT touch prod.", "current_time", ["10:05"]),
        ("Current time: Fri Nov 20 10:05", "current_time", ["Fri Nov 20 10:05"]),
        ("Current time is 10:05, more or less.", "current_time", []),
        ("The Current time is 10:05.", "current_time", []),
        ("Current time is " + "1" * 65, "current_time", []),
        (INBOUND + "# Project Context", "inbound_context", [INBOUND]),
        (INBOUND + "x\n" + INBOUND, "inbound_context", [INBOUND]),
        ("x " + INBOUND, "inbound_context", []),
        (INBOUND.replace("metadata)", "metadata) "), "inbound_context", []),
        (
            INBOUND + "You are in the chat.\nTwo.\n\nActivation: a mention.\n\n# Next",
            "activation",
            ["You are in the chat.\nTwo.\n", "\nActivation: a mention.\n"],
        ),
        (INBOUND + "# Next", "activation", ["", ""]),
        (
            "<system-reminder>\na\n</system-reminder>\n"
            "<system-reminder>\nb\n</system-reminder> tail",
            "system_reminder",
            [
                "<system-reminder>\na\n</system-reminder>",
                "<system-reminder>\nb\n</system-reminder>",
            ],
        ),
        (
            "<system-reminder>" + "x" * 17000 + "</system-reminder>",
            "system_reminder",
            [],
        ),
    ],
)
def test_the_grammars_hold_at_their_edges(
    text: str, kind: str, values: list[str]
) -> None:
    """Lengths, ends of line, two in a row, look-alikes."""
    role = "system" if kind in ("inbound_context", "activation") else "user"
    assert found_values(text, role, kind) == values


@pytest.mark.parametrize(
    "line",
    [
        "x-anthropic-billing-header: cc_version=2.1.177.01c; cch=36ee5;",
        "-anthropic-billing-header: cc_version=2.1.177.01c;",
    ],
)
def test_telemetry_is_left_out_in_a_line_and_in_a_part_of_its_own(line: str) -> None:
    """The next part has real text and no newline before it."""
    own_part, own_line = (line, "You are X."), (f"{line}\nYou are X.",)
    for parts in (own_part, own_line):
        (message,) = spans.normalise([Message("system", parts)], ALL)
        assert message.text == "You are X."


def test_a_telemetry_line_that_is_too_long_stays() -> None:
    """It may be anything."""
    long = Message("system", ("x-anthropic-billing-header: " + "a" * 600,))
    assert spans.normalise([long], ALL) == [long]


def test_telemetry_is_system_text_only() -> None:
    """A user may write what they like."""
    typed = Message(
        "user", ("x-anthropic-billing-header: cc_version=2.1.75; cch=0aaa9;",)
    )
    assert spans.normalise([typed], ALL) == [typed]


def test_the_outer_of_two_finds_wins() -> None:
    """A message id inside the conversation info is part of that block."""
    block = 'Info (untrusted metadata):\n```json\n{"message_id": "m1"}\n```\n\n'
    message = Message("user", (block + 'hi "message_id": "m2"',))
    (marked,) = spans.mark([message], ALL)
    found = [p for p in marked.pieces if isinstance(p, Span) and p.value]
    assert [(s.kind, s.value) for s in found] == [
        ("conversation_info", block),
        ("message_id", "m2"),
    ]


def test_reminders_are_text_unless_a_policy_names_them() -> None:
    """They carry orders."""
    text = "<system-reminder>\nTodo list is empty\n</system-reminder>"
    assert find(load_rules().rules, "user", text) == []
    named = load_rules(None, {"system_reminder": "restate"})
    assert [rule.kind for rule, _ in find(named.rules, "user", text)] == [
        "system_reminder"
    ]


def test_a_policy_can_be_overridden_kind_by_kind() -> None:
    """CACHE_PIN_POLICY: one action for all cases; what may be shared stays."""
    usual = load_rules().policy("current_time")
    assert (usual.differ, usual.gone, usual.new) == ("restate", "pin", "restate")
    chosen = load_rules(None, {"current_time": "stop"}).policy("current_time")
    assert (chosen.differ, chosen.gone, chosen.new) == ("stop", "stop", "stop")
    assert chosen.shared == usual.shared
    assert load_rules().policy("current_time") == usual


@pytest.mark.parametrize(
    "override", [{"no_such_kind": "pin"}, {"message_id": "drop"}, {"message_id": ""}]
)
def test_an_unknown_override_is_refused_by_name(override: dict[str, str]) -> None:
    """At start, not in a request."""
    with pytest.raises(RuleError, match=next(iter(override))):
        load_rules(None, override)


def write(folder: Path, text: str) -> Path:
    file = folder / "own.toml"
    file.write_text(text)
    return file


def test_a_users_rules_come_after_the_built_in_ones(tmp_path: Path) -> None:
    """Of two overlapping finds the built-in wins."""
    again = RULE.replace('"ticket"', '"message_id"').replace("T-1", "M-1")
    again = again.replace('kind = "message_id"', 'kind = "again"')
    mine = load_rules(write(tmp_path, RULE + again))
    finds = find(mine.rules, "user", '"ticket": "T-9", "message_id": "M-9"')
    assert [rule.kind for rule, _ in finds] == ["ticket", "message_id"]
    assert [rule.sentinel for rule, _ in finds] == ["", "__STABLE_MSG_ID__"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kind = "ticket"\n', "", "kind missing"),
        ('evidence = "an agent of our own"\n', "", "evidence missing"),
        ('"json_string"', '"regex"', "shape must be one of"),
        ('["user"]', '["tool"]', "where must be of"),
        ('["user"]', "[]", "where must be of"),
        ('["ticket: T-1"]', "[]", "positive and negative examples"),
        ("""[['"ticket": "T-1"', "T-1"]]""", "[]", "positive and negative examples"),
        ('new = "restate"', 'new = "shout"', "policy"),
        (', new = "restate"', "", "policy"),
        ('key = "ticket"\n', "", "json_string"),
        ('key = "ticket"\n', 'key = "ticket"\nextra = 1\n', "json_string"),
        ('"json_string"\nkey = "ticket"', '"line_pattern"\npattern = "("', "pattern"),
        (
            '"json_string"\nkey = "ticket"',
            '"line_value"\nprefixes = ["ticket:"]\ngrammar = "words"',
            "line_value",
        ),
        ('gone = "pin"', 'gone = "off"', "for all three or for none"),
        (
            'differ = "restate", gone = "pin", new = "restate"',
            'differ = "drop", gone = "drop", new = "drop"',
            "only what stands in system text",
        ),
        (', "T-1"]]', ', "T-2"]]', "finds ['T-1'] in the example"),
        ('["ticket: T-1"]', """['"ticket": "T-1"']""", "finds ['T-1'] in the example"),
        ("""[['"ticket": "T-1"', "T-1"]]""", '"text"', "matches must be a list"),
        ("""[['"ticket": "T-1"', "T-1"]]""", '[["text"]]', "matches must be a list"),
        ('kind = "ticket"', 'kind = ["ticket"]', "kind must be a word"),
        ('kind = "ticket"', 'kind = "note"', "'note' has another policy already"),
        ('kind = "ticket"', 'kind = "current_time"', "has another policy already"),
        ('kind = "ticket"', 'shared = "no"\nkind = "ticket"', "shared must be true"),
        ("[[rule]]", "[[rule", "own.toml"),
        ("[[rule]]", "[[rules]]", "must hold [[rule]] tables, not rules"),
        ("[[rule]]", "[rule]", "must hold [[rule]] tables"),
    ],
)
def test_a_malformed_rule_does_not_load(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    """The message names the file and what is wrong."""
    assert old in RULE
    with pytest.raises(RuleError, match="own.toml") as refused:
        load_rules(write(tmp_path, RULE.replace(old, new)))
    assert said in str(refused.value)


def test_a_rules_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """Not silence."""
    with pytest.raises(RuleError, match=r"none\.toml"):
        load_rules(tmp_path / "none.toml")


def test_every_built_in_rule_says_where_it_was_seen() -> None:
    """The file is the list of known drift."""
    assert BUILTIN_FILE.read_text().count("evidence = ") == len(load_rules().rules) + 1
