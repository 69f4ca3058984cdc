"""The worked examples of docs/reuse.md s7 (A1-A12, B2, B3, B5), at text level."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sidecar.core.requests import Message
from testkit.chats import (
    LIMITS,
    Chats,
    Client,
    Said,
    assistant,
    system,
    user,
    words,
)
from testkit.volatile import (
    CLOSER,
    block,
    clock,
    notes,
    notes_with_places,
    project,
    without_notes,
)


def ask_id(value: str) -> Message:
    return user(f'{words(36)}\n{{"message_id": "{value}"}}\n{words(50, 2)}')


def test_a1_an_id_that_differs_stays_and_is_said_again() -> None:
    """All that was cached is reused, though the new id has another length."""
    chats = Chats()
    first = chats.turn([ask_id("a1b2c3d4e5f6")])
    prompt = chats.ask([ask_id("77"), first.said.echo, user(words(20, 3))])
    assert chats.reuse(prompt) == first.kept
    assert '"message_id": "a1b2c3d4e5f6"' in prompt.text
    assert notes(prompt.text) == ["message_id: 77\n"]
    assert prompt.text.endswith(f"{CLOSER}<|im_end|>\n<|im_start|>assistant\n")
    assert (prompt.report.pinned, prompt.report.restated) == (
        ("message_id",), ("message_id",),
    )  # fmt: skip


def test_a2_a_block_that_is_gone_is_kept_and_called_gone() -> None:
    """In place, where the prefix is."""
    chats = Chats()
    first = chats.turn([project(block("alpha")), user("hi")])
    longer = [project(""), user("hi"), first.said.echo, user(words(200, 3))]
    prompt = chats.ask(longer)
    assert chats.reuse(prompt) == first.kept
    assert prompt.text.index(block("alpha")) < prompt.text.index("# Project Context")
    assert notes(prompt.text) == ["inbound context: (none now)\n"]


def test_a3_a_new_block_is_said_in_the_note_only() -> None:
    """Once."""
    chats = Chats()
    first = chats.turn([project(""), user("hi")])
    longer = [project(block("beta")), user("hi"), first.said.echo, user(words(200, 3))]
    prompt = chats.ask(longer)
    assert chats.reuse(prompt) == first.kept
    assert prompt.text.count('"chat": "beta"') == 1
    (note,) = notes(prompt.text)
    assert note == f"inbound context:\n{block('beta').strip()}\n"


def test_a4_a_block_that_changed_is_said_again_whole() -> None:
    """The old one in place, the new one in the note."""
    chats = Chats()
    first = chats.turn([project(block("alpha")), user("hi")])
    prompt = chats.ask(
        [project(block("beta")), user("hi"), first.said.echo, user(words(200, 3))]
    )
    assert chats.reuse(prompt) == first.kept
    (note,) = notes(prompt.text)
    assert note == f"inbound context:\n{block('beta').strip()}\n"
    assert block("alpha") in without_notes(prompt.text)


@pytest.mark.parametrize("kind", ["builtin", "trim", "llama3", "glm", "system_first"])
def test_a5_a_clock_that_moves_each_minute_costs_only_the_tail(kind: str) -> None:
    """Ten turns; the first time stays in place; a time is said when it is new."""
    chats = Chats(kind)
    talk: list[Message] = []
    times = ["10:05", "10:06", "10:06", "10:07", "10:08", "10:08", "10:08", "10:09",
             "10:10", "10:11"]  # fmt: skip
    kept, said = 0, []
    for number, time in enumerate(times):
        talk.append(user(f"Question {number}: {words(20, number)}"))
        turn = chats.turn([clock(time), *talk], f"Answer {number}.")
        assert turn.reused >= kept - 2
        if number and time != times[number - 1]:
            said.append(f"current time: {time}\n")
        assert notes(turn.text) == said
        assert turn.text.count("Current time is 10:05.") == 1
        kept = turn.kept
        talk.append(turn.said.echo)


def test_a6_only_the_time_is_volatile_not_the_sentence_behind_it() -> None:
    """An order that changed is read where it stands."""
    chats = Chats(min_gain=1)

    def orders(time: str, order: str) -> Sequence[Message]:
        return system(
            f"{words(200)}\nCurrent time is {time}. {order}.\n{words(200, 1)}"
        ), user("hi")

    first = chats.turn(orders("10:05", "Do NOT touch prod"))
    prompt = chats.ask(orders("10:06", "Touch prod"))
    assert "10:06. Touch prod." in prompt.text
    assert "Do NOT" not in prompt.text
    assert notes(prompt.text) == []
    shared = chats.decode(prompt.model_ids[: chats.reuse(prompt)])
    assert first.text.startswith(shared)
    assert "Do NOT" not in shared


def test_a7_a_reminder_is_text() -> None:
    """Its arrival and its removal matter: reuse ends before it."""
    chats = Chats()

    def asked(reminder: str, size: int) -> Sequence[Message]:
        text = f"<system-reminder>\n{reminder}\n</system-reminder>\n"
        return system("Be brief."), user(words(5000), text + words(size, 1))

    chats.turn(asked("Todo list is empty", 50))
    prompt = chats.ask(asked("Todo list has items", 80))
    assert prompt.text == chats.plain_text(asked("Todo list has items", 80))
    shared = chats.decode(prompt.model_ids[: chats.reuse(prompt)])
    assert shared.rstrip().endswith("Todo list")
    assert chats.reuse(prompt) > 4900


def test_a9_without_a_proof_reuse_is_strict() -> None:
    """The prompt is the template's own, and the client's values are in it."""
    chats = Chats("urlencode")
    chats.turn([clock("10:05"), user("a"), assistant("b"), user("c")])
    prompt = chats.ask([clock("10:06"), user("a"), assistant("b"), user("c")])
    assert re.search("10(:|%3A)06", prompt.text)
    assert not re.search("10(:|%3A)05", prompt.text)
    assert (prompt.report.match, prompt.report.is_proved) == ("strict", False)


def test_a10_a_small_gain_is_not_worth_a_note() -> None:
    """Below CACHE_PIN_MIN_GAIN, or below what the note costs, M is the request."""
    chats, eager = Chats(min_gain=200), Chats(min_gain=1)
    for each in (chats, eager):
        each.turn([clock("10:05", 120), user("hi")])
    asked = [clock("10:06", 120), user("hi")]
    prompt = chats.ask(asked)
    assert prompt.text == chats.plain_text(asked)
    assert prompt.report.match == "strict"
    assert eager.ask(asked).report.match == "pinned"
    short = [clock("10:06", 20), user("hi")]
    eager.turn([clock("10:05", 20), user("hi")])
    assert eager.ask(short).text == eager.plain_text(short)


def test_a11_a_value_that_comes_back_is_said_again() -> None:
    """A, B, A: or the model would go on believing B."""
    chats = Chats()
    talk: list[Message] = []
    kept = 0
    for number, time in enumerate(["10:05", "10:06", "10:05", "10:05"]):
        talk.append(user(f"Question {number}."))
        turn = chats.turn([clock(time), *talk], words(150, number))
        assert turn.reused >= kept - 2
        kept = turn.kept
        talk.append(turn.said.echo)
    assert notes(turn.text) == ["current time: 10:06\n", "current time: 10:05\n"]
    said = notes_with_places(turn.text)
    first, second = (turn.text.index(note) for note in said)
    assert turn.text.index("Question 1") < first < turn.text.index("Question 2")
    assert turn.text.index("Question 2") < second < turn.text.index("Question 3")


def test_a12_each_thread_reads_its_own_block() -> None:
    """Reuse ends where the block begins; the other's is nowhere."""
    chats = Chats()
    one, two = Client("one"), Client("two")
    chats.turn([project(block("alpha")), user("hi from alpha")], client=one)
    asked = [project(block("beta")), user("hi from beta")]
    prompt = chats.ask(asked, two)
    assert prompt.text == chats.plain_text(asked, two)
    assert "alpha" not in prompt.text
    shared = chats.decode(prompt.model_ids[: chats.reuse(prompt)])
    assert shared.endswith('{"chat": "')
    chats.answer(prompt, Said("Fine."))
    again = [project(block("gamma")), user("hi from alpha"), assistant("Fine."),
             user("more")]  # fmt: skip
    back = chats.ask(again, one)
    assert "beta" not in back.text
    assert block("alpha") in without_notes(back.text)


def test_b2_equal_canonical_prompts_have_a_path_each() -> None:
    """Two values, too near the end to be pinned: each hits its own."""
    chats = Chats()
    asked = {v: [system(words(100)), ask_end(v)] for v in ("id-one", "id-two")}
    turns = {v: chats.turn(messages) for v, messages in asked.items()}
    canonical = {
        turn.prompt.pending_turn.record.canonical.tobytes() for turn in turns.values()
    }
    assert len(canonical) == 1
    for value, messages in asked.items():
        prompt = chats.ask(messages)
        assert prompt.model_ids == turns[value].prompt.model_ids
        assert chats.reuse(prompt) == len(prompt.model_ids) - 1


def ask_end(value: str) -> Message:
    return user(f'hi\n{{"message_id": "{value}"}}')


@pytest.mark.parametrize("kind", ["builtin", "llama3", "glm", "urlencode"])
def test_b3_the_same_prompt_again_leaves_one_token(kind: str) -> None:
    """Its logits must be computed."""
    chats = Chats(kind)
    asked = [clock("10:05"), user("hi")]
    first = chats.turn(asked)
    prompt = chats.ask(asked)
    assert prompt.model_ids == first.prompt.model_ids
    assert chats.reuse(prompt) == len(prompt.model_ids) - 1
    assert notes(prompt.text) == []


def info(value: str) -> str:
    return f'Sender (untrusted metadata):\n```json\n{{"id": "{value}"}}\n```\n\n'


@pytest.mark.parametrize("use_blocks", [True, False])
def test_b5_a_deep_match_does_not_shadow_a_good_one(use_blocks: bool) -> None:
    """
    4301 ids shared, but different at 300, against 2001 shared that can be had.

    The best reusable prefix wins, not the deepest canonical match.
    """
    chats = Chats(limits=replace(LIMITS, use_block_index=use_blocks))
    long, short = words(3400, 1), words(1420, 1)

    def asked(time: str, sender: str, text: str) -> list[Message]:
        return [clock(time, 260), user(f"{info(sender)}hi"), user(text), user("end")]

    good = chats.turn(asked("10:05", "me", f"{short}\nsomething else"))
    chats.turn(asked("10:05", "you", long))
    prompt = chats.ask(asked("10:06", "me", long))
    candidates = chats.memory.lineage.candidates(
        prompt.pending_turn.record.canonical, prompt.pending_turn.record.conversation
    )
    depths = [depth for _, depth in candidates]
    assert depths[0] > 4250
    assert 1950 < depths[1] < 2100
    reused = chats.reuse(prompt)
    assert 1950 < reused < 2100
    assert good.text.startswith(chats.decode(prompt.model_ids[:reused]))
    assert "you" not in prompt.text.split("hi")[0]
    assert notes(prompt.text) == ["current time: 10:06\n"]


@pytest.mark.parametrize("use_blocks", [True, False])
def test_b5_a_path_that_was_mostly_evicted_does_not_shadow_a_whole_one(
    use_blocks: bool,
) -> None:
    """Its values would gain something; the search goes on to those that gain more."""
    chats = Chats(limits=replace(LIMITS, use_block_index=use_blocks))
    long, short = words(600, 1), words(300, 1)
    evicted = chats.turn([clock("10:05"), user(long), user("end")])
    chats.store.sequences.clear()
    whole = chats.turn([clock("10:06"), user(f"{short}\nsomething else")])
    kept_len = len(evicted.prompt.model_ids) // 6
    chats.store.add(evicted.prompt.model_ids[:kept_len])
    prompt = chats.ask([clock("10:07"), user(long), user("end")])
    candidates = chats.memory.lineage.candidates(
        prompt.pending_turn.record.canonical, prompt.pending_turn.record.conversation
    )
    assert [record for record, _ in candidates] == [
        evicted.prompt.pending_turn.record, whole.prompt.pending_turn.record
    ]  # fmt: skip
    assert chats.reuse(prompt) > 2 * kept_len
    assert "Current time is 10:06." in prompt.text
    assert notes(prompt.text) == ["current time: 10:07\n"]


def test_strict_reuse_wins_where_pins_add_little() -> None:
    """What is stored to the letter needs no note."""
    chats = Chats()
    first = chats.turn([clock("10:05"), user("hi")])
    chats.turn([clock("10:06"), user(words(80))])
    asked = [clock("10:05"), user("hi"), first.said.echo, user("and?")]
    prompt = chats.ask(asked)
    assert chats.reuse(prompt) == first.kept
    assert prompt.report.match == "strict"
    assert notes(prompt.text) == []


def test_pinning_off_never_alters_the_prompt() -> None:
    """CACHE_PINNING=false: telemetry stays, values stay, reuse is strict."""
    chats = Chats(pinning=False)
    telemetry = system("x-anthropic-billing-header: cch=0aaa9;", clock("10:05").text)
    first = chats.turn([telemetry, user("hi")])
    assert first.text == chats.plain_text([telemetry, user("hi")])
    asked = [clock("10:06"), user(" hi "), assistant("Edited."), user("and?")]
    assert chats.ask(asked).text == chats.plain_text(asked)


def test_canonicalisation_off_never_alters_the_prompt_either() -> None:
    """CACHE_CANONICALIZE_TOOL_CONTEXT=false: there is nothing to pin."""
    chats = Chats(canonicalize=False)
    first = chats.turn([clock("10:05"), user("hi")])
    asked = [clock("10:06"), user("hi"), first.said.echo, user("and?")]
    prompt = chats.ask(asked)
    assert prompt.report.pinned == ()
    assert "10:06" in prompt.text
    assert prompt.report.num_spliced == 0  # told by what came before, to the letter


def test_what_pinning_gained_is_counted() -> None:
    """By kind, and in tokens."""
    chats = Chats()
    first = chats.turn([clock("10:05"), user("hi")])
    before = chats.pipeline.counters.snapshot()
    warm = chats.ask([clock("10:06"), user("hi"), first.said.echo, user("and?")])
    counters = chats.pipeline.counters
    moved = {k: n - before.get(k, 0) for k, n in counters.snapshot().items()}
    assert warm.counted == {k: n for k, n in moved.items() if n}
    assert counters["pin_current_time"] == counters["restate_current_time"] == 1
    assert counters["pin_tokens_gained"] > 100
    assert (counters["splice_turns"], counters["healing_hit"]) == (1, 1)
