"""Rules that are made from two lines of a prompt."""

import tomllib

import pytest

from sidecar.volatile.proposed_rule import propose_rule
from sidecar.volatile.rules import find, parse_rules

SYSTEM = "You help.\nBuild stamp: a1b2 of 7\nKeep to the rules.\n"


def values(role: str, text: str, before: str, now: str) -> list[str]:
    """What the proposed rule finds in the text."""
    proposed = propose_rule(role, text, before, now)
    assert proposed is not None
    rules = parse_rules(proposed.toml("seen"), "own")
    return [text[start:end] for _, (start, end) in find(rules, role, text)]


def test_a_line_with_a_label() -> None:
    """The whole line is the value; what stands behind the label may be anything."""
    line = "Build stamp: a1b2 of 7"
    assert values("system", SYSTEM, "Build stamp: zz99 of 7", line) == [line + "\n"]
    later = SYSTEM.replace("a1b2 of 7", "on another day")
    proposed = propose_rule("system", SYSTEM, "Build stamp: zz99 of 7", line)
    assert proposed is not None
    rules = parse_rules(proposed.toml("seen"), "own")
    assert len(find(rules, "system", later)) == 1


def test_a_line_without_a_colon() -> None:
    """It begins with the words that all of them share."""
    text = "You help.\nThe stamp of today reads 1804.\n"
    line = "The stamp of today reads 1804."
    before = "The stamp of today reads 1759."
    assert values("user", text, before, line) == [line + "\n"]


def test_a_value_of_json() -> None:
    """Only as far as the line is known: the key is enough."""
    text = '{"id": "abc", "nonce": "q1w2", "x": "' + "y" * 4000 + '"}'
    before, now = '{"id": "abc", "nonce": "zz', '{"id": "abc", "nonce": "q1w2", "x'
    assert values("user", text, before, now) == ["q1w2"]


@pytest.mark.parametrize(
    ("before", "now", "pattern"),
    [
        ("Run N started 20:31:30 by cron", "Run N started 20:32:07 by cron",
         "Run N started .{1,200}"),
        ("Updated Fri 27 Nov", "Updated Fri 28 Nov", "Updated Fri .{1,200}"),
        ("stamp=a1", "stamp=b2", "stamp=.{1,200}"),
    ],
)  # fmt: skip
def test_no_part_of_a_value_is_taken_for_its_label(
    before: str, now: str, pattern: str
) -> None:
    """Else the rule would be dead with the hour."""
    proposed = propose_rule("system", f"{now}\n", before, now)
    assert proposed is not None
    assert tomllib.loads(proposed.toml("seen"))["rule"][0]["pattern"] == pattern


def test_two_labels_are_two_kinds() -> None:
    """However much of their beginnings they share, or whatever they are written in."""
    kinds = set()
    labels = ["x" * 45 + "a", "x" * 45 + "b", "日付は今日の", "時刻は今日の"]
    for label in labels:
        proposed = propose_rule("system", f"{label}: 2\n", f"{label}: 1", f"{label}: 2")
        assert proposed is not None
        kinds.add(tomllib.loads("key = 1" + proposed.toml("seen"))["rule"][0]["kind"])
    assert len(kinds) == 4


@pytest.mark.parametrize(
    ("role", "text", "before", "now"),
    [
        ("tool", SYSTEM, "Build stamp: zz", "Build stamp: a1b2 of 7"),
        ("system", SYSTEM, "Build stamp: a1b2 of 7", "Build stamp: a1b2 of 7"),
        ("system", SYSTEM, "Build stamp: zz", "Build stamp: not there"),
        ("system", SYSTEM, "", "Build stamp: a1b2 of 7"),
        ("system", SYSTEM, "Build stamp: ", "Build stamp: a1b2 of 7"),
        ("system", "- a: 1\n- a: 2\n", "- a: 3", "- a: 2"),
        ("system", f"Stamp: {'x' * 300}\n", "Stamp: y", f"Stamp: {'x' * 300}"),
        ("user", "one thing\n", "any thing", "one thing"),
        ("user", "2106-11-27T20:13 up\n", "2106-11-27T20:12 up", "2106-11-27T20:13 up"),
        ("system", "[15:13:23] up\n", "[15:13:22] up", "[15:13:23] up"),
        ("user", "https://host/run/2\n", "https://host/run/1", "https://host/run/2"),
        ("user", '{"n": "1"}{"n": "2"}', '{"n": "0', '{"n": "1"}{"n": "2"}'),
        ("user", "Bell\x07 rang: 1\n", "Bell\x07 rang: 2", "Bell\x07 rang: 1\n"),
    ],
)
def test_what_is_not_plain_is_not_proposed(
    role: str, text: str, before: str, now: str
) -> None:
    """No line twice, no free text, nothing that is not in the text as it was."""
    assert propose_rule(role, text, before, now) is None


@pytest.mark.parametrize(
    "label", ['Say "so"', "a\\b", "[x] (y)*", "Größe — é", "tab\tin", "del\x7f"]
)
def test_any_label_makes_a_table_that_can_be_read(label: str) -> None:
    """Or none at all."""
    now = f"{label}: 2"
    proposed = propose_rule("system", f"{now}\n", f"{label}: 1", now)
    if proposed is not None:
        (rule,) = tomllib.loads(proposed.toml("seen"))["rule"]
        assert rule["matches"] == [[now, now]]
    else:
        assert "\x7f" in label
