"""What must hold for every conversation, text and history of prompts."""

import copy
import itertools
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.core.conversation import Conversation
from sidecar.core.requests import Message, ToolCall
from sidecar.memory import healing_store
from sidecar.memory.lineage import LineageIndex, LineageRecord
from sidecar.pipeline.template.encoder import PromptEncoder
from sidecar.volatile import rules, spans
from sidecar.volatile.marked_message import Span, canonical_text
from testkit.chat_templates import tokenizer_of
from testkit.chats import (
    Chats,
    Client,
    Said,
    assistant,
    common_len,
    user,
)
from testkit.drifting import Thread, step

RULES = rules.load_rules(None, {"system_reminder": "pin"})
VOLATILE = [
    *(text for rule in RULES.rules for text, _ in rule.matches),
    *(text for rule in RULES.rules for text in rule.passes),
    *(rule.sentinel for rule in RULES.rules if rule.sentinel),
    "# Project Context", "```", "```json", "{}", "## Group Chat Context",
    "<system-reminder>", "</system-reminder>", "gitStatus:", '"message_id": "',
    "Current time is ", "10:05.", "Stats: runtime ", "cch=1;", "(no content)",
]  # fmt: skip
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
           "<|endoftext|>", "<|im_start|>assistant\n", "[turn 0]", "{{ x }}",
           "{%"]  # fmt: skip
PRIVATE = ["\ue000", "\ue001", "\ue0000\ue001", "\ue000zq-turn\ue001"]
SPACE = ["\n", "\n\n", " ", "\t", "  \n", "\r\n", "\u00a0", "\u2028"]
plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
texts = st.lists(
    st.one_of(st.sampled_from([*VOLATILE, *SPACE, *SPECIAL, *PRIVATE]), plain),
    max_size=8,
).map("".join)
system_texts = texts | st.lists(st.sampled_from(VOLATILE), max_size=6).map("\n".join)
parts = st.lists(texts, max_size=3).map(tuple)


def message(role: str) -> st.SearchStrategy[Message]:
    return st.builds(Message, st.just(role), parts)


conversations = st.lists(
    st.sampled_from(["user", "assistant", "tool", "system"]).flatmap(message),
    max_size=5,
).map(lambda found: [*found, user("go on")])


@given(st.sampled_from(["system", "user"]), parts)
def test_finding_spans_loses_nothing_and_changes_nothing(
    role: Any, text_parts: tuple[str, ...]
) -> None:
    """Pieces are the message; places ascend; the input is as it was."""
    messages = [Message(role, text_parts)]
    before = copy.deepcopy(messages)
    (marked,) = spans.mark(messages, RULES)
    assert messages == before
    own = "".join(p if isinstance(p, str) else p.value for p in marked.pieces)
    assert own == messages[0].text
    found = [p for p in marked.pieces if isinstance(p, Span)]
    assert [s.place for s in found] == sorted(s.place for s in found)
    assert len({s.key for s in found}) == len(found)


@given(st.sampled_from(["system", "user"]), st.lists(system_texts, max_size=3))
def test_finds_do_not_overlap_and_do_not_depend_on_when(
    role: str, found_in: list[str]
) -> None:
    """Twice the same, in order, inside the text."""
    for text in found_in:
        finds = rules.find(RULES.rules, role, text)
        assert rules.find(RULES.rules, role, text) == finds
        ends = [0, *(end for _, (_, end) in finds)]
        starts = [*(start for _, (start, _) in finds), len(text)]
        assert all(end <= start for end, start in zip(ends, starts, strict=True))


@given(conversations)
def test_cleaning_twice_is_cleaning_once(messages: list[Message]) -> None:
    """Telemetry and blank answers are gone after the first time."""
    before = copy.deepcopy(messages)
    once = spans.normalise(messages, RULES)
    assert messages == before
    assert spans.normalise(once, RULES) == once


KINDS = [("message_id", '{{"message_id": "{}"}}', ["a", "b-7"]),
         ("current_time", "Current time is {}.", ["10:05", "2026-11-20T09:33:00Z"]),
         ("subagent_runtime", "Stats: runtime {} • x", ["5m", "1m52s"])]  # fmt: skip


@given(st.data())
def test_canonicalising_twice_is_canonicalising_once(data: st.DataObject) -> None:
    """A sentinel in a text stands for itself; white space at the edges stays gone."""
    words = st.sampled_from(["one", "two words", "a `code`", "# Head", "x: 1"])
    lines = ["Hello"]
    for _ in range(data.draw(st.integers(1, 5))):
        _, form, values = data.draw(st.sampled_from(KINDS))
        value = data.draw(st.sampled_from(values))
        lines.append(data.draw(st.one_of(words, st.just(form.format(value)))))
    edge = st.sampled_from(["", " ", "\n", " \n\t"])
    text = data.draw(edge) + "\n".join(lines) + data.draw(edge)
    (first,) = spans.mark([user(text)], RULES)
    once = canonical_text(first.pieces)
    (second,) = spans.mark([user(once)], RULES)
    assert canonical_text(second.pieces) == once


@settings(max_examples=30)
@given(conversations)
@example([user("\ue000" + "0" * 16 + "0\ue001"), assistant("\ue000"), user("x")])
@pytest.mark.parametrize("kind", ["plain", "trim", "llama3", "glm"])
def test_a_first_request_is_read_as_the_template_has_it(
    kind: str, messages: list[Message]
) -> None:
    """M = T while nothing is known, for whatever was typed; marks never leak."""
    chats = chats_of(kind)  # nothing is ever committed
    cleaned = spans.normalise(messages, RULES)
    typed = "".join(part for m in messages for part in m.parts)
    prompt = chats.prepare(messages, Client())
    wanted = chats.pipeline.template.render(cleaned, (), _KWARGS)
    assert prompt.text == wanted
    assert prompt.text.count("\ue000") <= typed.count("\ue000")
    whole = chats.tokenizer.encode(wanted, add_special_tokens=False)
    assert list(prompt.model_ids) == whole


chats_of = cache(Chats)
_KWARGS = {"enable_thinking": True, "preserve_thinking": True}


ACTIONS = ["say", "results", "again", "rewind", "edit", "edit_answer"]
acts = st.tuples(
    st.sampled_from([0, 0, 0, 1, 2]),
    st.sampled_from(["say", "results", *ACTIONS]),
    st.integers(0, 1 << 20),
)


def drift(played: Sequence[tuple[int, str, int]]) -> int:
    """Three conversations, two keys, one pipeline; every prompt is read."""
    chats = Chats(min_gain=1)
    clients = Client("s1", "k1"), Client("s2", "k1"), Client("s1", "k2")
    threads = [Thread(n, c) for n, c in zip("abc", clients, strict=True)]
    gained = 0
    for number, action, seed in played:
        thread = threads[number]
        thread.act(action, seed)
        lenders = [t for t in threads if t.client.key == thread.client.key]
        text, gain = step(chats, thread, lenders)
        gained += gain
        for other in threads:
            if other is not thread:
                assert f"m-{other.name}" not in text
                assert f"I think {other.name}" not in text
    return gained


@settings(max_examples=25)
@given(st.lists(acts, min_size=2, max_size=10))
def test_nothing_is_hidden_and_what_is_said_last_is_true(
    played: list[tuple[int, str, int]],
) -> None:
    """
    Invariant II, and the conversation of values, under drift of every kind.

    text(M) is T but for pinned values, notes and the model's own turns; for each
    volatile place the last thing said is what the client says now.
    """
    drift(played)


@pytest.mark.slow
@settings(max_examples=1000)
@given(st.lists(acts, min_size=5, max_size=25))
def test_nothing_is_hidden_in_long_conversations(
    played: list[tuple[int, str, int]],
) -> None:
    """The same, for longer."""
    drift(played)


def test_the_drifting_conversations_do_pin() -> None:
    """Else the property above would hold for nothing."""
    played = [(0, "say", seed) for seed in range(8)]
    assert drift(played) > 500


shown = plain.filter(str.strip)
calls = st.lists(
    st.builds(
        ToolCall,
        st.uuids().map(lambda made: f"call_{made.hex[:24]}"),
        st.sampled_from(["look", "find"]),
        st.sampled_from(["{}", '{"a": 1}', '{"a": "<b>", "c": [1, null]}']),
    ),
    max_size=2,
).map(tuple)


NUMBERS = itertools.count()


@settings(max_examples=40)
@given(shown, plain, calls, st.sampled_from(["", "(pre)", "\n"]))
@pytest.mark.parametrize("kind", ["builtin", "trim", "glm"])
def test_what_a_client_strips_is_put_back(
    kind: str,
    text: str,
    reasoning: str,
    made: tuple[ToolCall, ...],
    lead: str,
) -> None:
    """Heal after strip = identity: the next prompt begins with the very same ids."""
    chats, client = chats_of(kind), Client(key=f"key {next(NUMBERS)}")
    said = Said(text, reasoning, made)
    prompt = chats.prepare([user("hi")], client)
    sampled = chats.answer(prompt, said, raw=lead + said.raw)
    kept = (*prompt.model_ids, *sampled)
    echo = assistant(f" {text}\n", *made)
    following = chats.prepare([user("hi"), echo, user("and?")], client)
    assert common_len(following.model_ids, kept) == len(kept)


@given(texts, calls)
def test_the_visible_hash_does_not_see_ids_or_spacing(
    text: str, made: tuple[ToolCall, ...]
) -> None:
    """Calls come back under other ids and with other spaces."""
    changed = [
        ToolCall("new", c.name, c.arguments.replace(", ", " ,\n ")) for c in made
    ]
    ours = healing_store.visible_hash(text, made)
    assert healing_store.visible_hash(f"\n{text} ", changed) == ours


def pieces_of(kind: str) -> st.SearchStrategy[str]:
    added = sorted(tokenizer_of(kind).get_added_vocab())
    known = st.sampled_from([*added, *SPACE, "a", " b", "é", "東", "123"])
    return st.lists(known | plain, max_size=12).map("".join)


@settings(max_examples=150)
@pytest.mark.parametrize("kind", ["builtin", "llama3", "glm", "spm"])
@given(data=st.data())
def test_pieces_give_the_ids_of_the_whole(kind: str, data: st.DataObject) -> None:
    """With added tokens anywhere, from a cold and from a warm cache."""
    tokenizer = tokenizer_of(kind)
    text = data.draw(pieces_of(kind))
    encoder = PromptEncoder(tokenizer)
    assert encoder.is_incremental
    bos = tokenizer.bos_token
    special = not (bos and text.startswith(bos))
    for _ in range(2):
        for is_start in (True, False):
            found = encoder.encode(text, is_start=is_start)
            wanted = tokenizer.encode(text, add_special_tokens=special and is_start)
            assert list(found.ids) == wanted
            assert list(found.chars) == sorted(set(found.chars))
            assert list(found.tokens) == sorted(found.tokens)


names = st.lists(st.integers(0, 2), max_size=5)
tails = st.lists(st.integers(0, 1), max_size=20)


@settings(max_examples=200)
@given(st.lists(st.tuples(names, tails), max_size=7), names, tails)
def test_blocks_find_what_a_linear_scan_finds(
    known: list[tuple[list[int], list[int]]], asked: list[int], tail: list[int]
) -> None:
    """The same records, with the same lengths, in the same order."""
    indexes = [LineageIndex("m", 0, use_blocks=b) for b in (True, False)]
    for number, (blocks, end) in enumerate(known):
        ids = array("I", [*_ids(blocks), *end])
        conversation = Conversation("k", str(number), "t")
        record = LineageRecord(ids, (), {}, conversation, touched=float(number))
        for index in indexes:
            index.add(record)
    question = array("I", [*_ids(asked), *tail])
    turn_query = Conversation("k", "0", "t")
    by_block, by_scan = (index.candidates(question, turn_query) for index in indexes)
    assert by_block == by_scan


def _ids(blocks: Sequence[int]) -> list[int]:
    return [name * 100 + i for name in blocks for i in range(16)]
