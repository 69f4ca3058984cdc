"""Finding the volatile stretches: pieces, places, and what never was content."""

import pytest

from sidecar.core.requests import Message
from sidecar.volatile import spans
from sidecar.volatile.marked_message import MarkedMessage, Span, canonical_text
from sidecar.volatile.rules import load_rules
from testkit.chats import assistant, result, system, user

RULES = load_rules()


def spans_of(marked: MarkedMessage, kind: str) -> list[Span]:
    return [p for p in marked.pieces if isinstance(p, Span) and p.kind == kind]


def own_text(marked: MarkedMessage) -> str:
    """The pieces put together with the request's own values."""
    return "".join(p if isinstance(p, str) else p.value for p in marked.pieces)


@pytest.mark.parametrize(
    "message",
    [
        user(""),
        user("  \n "),
        user("\n hi there \n\n"),
        user('a {"message_id": "7"} b', "second\n", "third"),
        system("Current time is 10:05.\n", "\nStats: runtime 5m"),
        result("  indented\n"),
        assistant("Current time is 10:05."),
    ],
)
def test_the_pieces_together_are_the_message(message: Message) -> None:
    """Nothing is lost and nothing is added."""
    (marked,) = spans.mark([message], RULES)
    assert marked.message is message
    assert own_text(marked) == message.text


def test_one_text_in_parts_has_one_canonical_form() -> None:
    """How a client cut its text is not content."""
    whole = user("one\ntwo")
    for cut in (user("one", "two"), user("one\n", "two"), user("one", "\ntwo")):
        (a,), (b,) = spans.mark([whole], RULES), spans.mark([cut], RULES)
        assert canonical_text(a.pieces) == canonical_text(b.pieces)


def test_edges_are_spans_in_system_and_user_text_only() -> None:
    """A tool's indentation is content."""
    messages = [system(" a\n"), user("\tb "), assistant(" c "), result(" d ")]
    marked = spans.mark(messages, RULES)
    edges = [[s.value for s in spans_of(m, "edge_ws")] for m in marked]
    assert edges == [[" ", "\n"], ["\t", " "], [], []]


def test_every_user_and_tool_message_has_room_for_a_note_at_its_end() -> None:
    """Clients send none: the value is empty."""
    messages = [system("a"), user("b"), assistant("c"), result("d")]
    marked = spans.mark(messages, RULES)
    notes = [[s.value for s in spans_of(m, "note")] for m in marked]
    assert notes == [[], [""], [], [""]]
    assert isinstance(marked[3].pieces[-1], Span)


def test_places_do_not_depend_on_the_values() -> None:
    """A longer id moves nothing: equal places pair."""
    keys = []
    for value in ("7", "a-much-longer-identifier"):
        message = user(f' {{"message_id": "{value}"}}\nStats: runtime 5m\n')
        (marked,) = spans.mark([message], RULES)
        keys.append([p.key for p in marked.pieces if isinstance(p, Span)])
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == len(keys[0])


def test_a_block_that_is_gone_leaves_the_same_canonical_text() -> None:
    """So the conversations still pair behind it."""
    block = '## Inbound Context (trusted metadata)\n```json\n{"a": 1}\n```\n\n'
    told = "You are in a room.\n", "\nActivation: a mention.\n"
    anchor = "# Project Context\nfiles"
    inner = ["", block, block + told[0], block + told[0] + told[1], block + told[1]]
    texts = [f"Hello\n{text}{anchor}" for text in inner]
    marked = spans.mark([system(text) for text in texts], RULES)
    forms = {canonical_text(m.pieces) for m in marked}
    assert len(forms) == 1


def test_a_part_that_is_all_volatile_takes_its_seam_along() -> None:
    """With the part the newline that joins it to the next one goes."""
    reminder = "<system-reminder>\nThe current date is: Friday.\n</system-reminder>"
    there, gone = user(reminder, "do it"), user("do it")
    a, b = spans.mark([there], RULES)[0], spans.mark([gone], RULES)[0]
    assert canonical_text(a.pieces) == canonical_text(b.pieces)
    assert [s.value for s in spans_of(a, "date_reminder")] == [f"{reminder}\n"]


def test_no_rule_looks_across_parts() -> None:
    """A header in one part and its fence in the next are just text."""
    head, fence = "Info (untrusted metadata):", "```json\n{}\n```\n"
    (marked,) = spans.mark([user(head, fence)], RULES)
    assert spans_of(marked, "conversation_info") == []


def test_nothing_is_volatile_when_canonicalisation_is_off() -> None:
    """CACHE_CANONICALIZE_TOOL_CONTEXT=false: K = T."""
    messages = [system("Current time is 10:05."), user(" hi ")]
    marked = spans.mark(messages, None)
    assert [m.pieces for m in marked] == [("Current time is 10:05.",), (" hi ",)]


@pytest.mark.parametrize("text", ["", "  \n", "(no content)", " (no content)\n"])
def test_blank_answers_are_one(text: str) -> None:
    """Null, absent, blank and `(no content)` become empty."""
    assert spans.normalise([assistant(text)], RULES) == [Message("assistant")]


def test_a_user_may_say_no_content() -> None:
    """Only assistant turns are cleaned."""
    said = [user("(no content)"), result("")]
    assert spans.normalise(said, RULES) == said


def test_pinning_off_leaves_even_telemetry() -> None:
    """The model reads what the client sent."""
    messages = [
        system("x-anthropic-billing-header: cc_version=2.1.75; cch=0aaa9;\nYou are X.")
    ]
    assert spans.normalise(messages, None) == messages
    assert spans.normalise(messages, RULES) == [system("You are X.")]


def test_a_part_of_telemetry_alone_disappears() -> None:
    """An empty part would be no harm, but none is left."""
    messages = [
        system(
            "x-anthropic-billing-header: cc_version=2.1.75; cch=0aaa9;",
            "",
            "You are X.",
        )
    ]
    assert spans.normalise(messages, RULES) == [system("", "You are X.")]
