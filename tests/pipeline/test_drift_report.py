"""Where a prompt first differs from the closest one before it, and what that costs."""

import pytest

from sidecar.core.prompt import Divergence
from sidecar.core.requests import Message
from sidecar.pipeline.reuse import drift_report
from sidecar.pipeline.reuse.drift_report import DriftReport
from testkit.chats import Chats, Client, assistant, system, user, words


def place(before: str, role: str = "user") -> Divergence:
    return Divergence(10, 1, role, before, "now")


def test_a_divergence_is_named_by_depth_message_and_both_texts() -> None:
    """What stood there before, and what stands there now."""
    chats = Chats()
    head = system(words(40))
    chats.turn([head, user(words(40) + " A nice old day.")])
    prompt = chats.ask([head, user(words(40) + " A nice new day.")])
    found = prompt.report.divergence
    assert found is not None
    assert (found.message, found.role) == (1, "user")
    assert found.before.lstrip().startswith("old day.")
    assert found.now.lstrip().startswith("new day.")
    assert max(len(found.before), len(found.now)) <= 40
    shared = chats.decode(prompt.model_ids[: found.depth])
    assert shared.endswith("A nice")


def test_a_difference_in_the_system_text_is_the_systems() -> None:
    """Message 0."""
    chats = Chats()
    chats.turn([system(words(40) + " old " + words(40)), user("hi")])
    report = chats.ask([system(words(40) + " new " + words(40)), user("hi")]).report
    assert report.divergence is not None
    assert (report.divergence.message, report.divergence.role) == (0, "system")


def test_a_difference_in_a_turn_is_the_assistants() -> None:
    """The client edited it."""
    chats = Chats()
    asked = [system(words(40)), user(words(40))]
    first = chats.turn(asked)
    chats.turn([*asked, first.said.echo, user("and?")])
    report = chats.ask([*asked, assistant("Edited."), user("and?")]).report
    assert report.divergence is not None
    assert (report.divergence.message, report.divergence.role) == (2, "assistant")


def test_volatile_values_are_no_divergence() -> None:
    """What is compared is canonical; a prompt that goes on diverges nowhere."""
    chats = Chats()

    def clock(time: str) -> list:
        return [system(f"Current time is {time}.\n" + words(40)), user("hi")]

    first = chats.turn(clock("10:05"))
    assert chats.ask(clock("10:06")).report.divergence is None
    longer = [*clock("10:07"), first.said.echo, user("and?")]
    assert chats.ask(longer).report.divergence is None


def test_costs_are_added_up_by_client_and_place() -> None:
    """The dearest first: from this list new rules are made."""
    report = DriftReport()
    report.note("pi/1", place("Current date: Mon"), 100)
    report.note("pi/1", place("Current date: Mon, later"), 50)
    report.note("claude/2", place("cch=1", "system"), 500)
    report.note(None, place("x"), 1)
    rows = report.rows()
    assert [(r["agent"], r["role"], r["times"], r["prefilled"]) for r in rows] == [
        ("claude/2", "system", 1, 500), ("pi/1", "user", 2, 150), ("-", "user", 1, 1),
    ]  # fmt: skip
    assert rows[1]["before"] == "Current date: Mon, later"
    rows[0]["times"] = 99
    assert report.rows()[0]["times"] == 1


def test_places_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one not seen for longest is dropped."""
    monkeypatch.setattr(drift_report, "_MAX_PLACES", 2)
    report = DriftReport()
    for before in ("a", "b", "a", "c"):
        report.note("x", place(before), 1)
    assert {row["before"] for row in report.rows()} == {"a", "c"}


def test_what_a_divergence_cost_is_noted_for_its_client() -> None:
    """Once the prefill is done; nothing is noted where there was none."""
    chats = Chats()
    client = Client(agent="pi/1")
    asked = [system(words(40)), user("old")]
    chats.pipeline.note_cost(chats.ask(asked, client), 40)
    assert chats.pipeline.drift.rows() == []
    chats.turn(asked, client=client)
    chats.pipeline.note_cost(chats.ask([asked[0], user("new")], client), 7)
    (row,) = chats.pipeline.drift.rows()
    assert (row["agent"], row["times"], row["prefilled"]) == ("pi/1", 1, 7)
    assert chats.pipeline.counters["resumed_prefill_tokens"] == 7


def test_the_new_part_of_the_key_is_what_the_closest_prompt_does_not_share() -> None:
    """All of a first prompt; then no more than what was said since."""
    chats = Chats()

    def clock(time: str) -> Message:
        return system(f"Current time is {time}.\n" + words(40))

    first = chats.turn([clock("10:05"), user("hi")])
    whole = first.prompt.report.key_delta_chars
    assert whole > len(words(40))
    more = "Mind the gap between the trains."
    longer = [clock("10:06"), user("hi"), first.said.echo, user(more)]
    added = chats.ask(longer).report.key_delta_chars
    assert len(more) < added < len(more) + 200  # and the frames of two messages
    other = chats.ask([system("Be brief."), user("hi")]).report.key_delta_chars
    again = chats.ask([clock("10:07"), user("hi")]).report.key_delta_chars
    assert (other > 0, again) == (True, 0)
