"""The whole input side: thinking, its arguments, what is handed on, and threads."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.requests import ChatRequest, ClientInfo, Message, Thinking
from sidecar.pipeline.reuse import prompt_variants
from testkit.chats import (
    Chats,
    Client,
    Said,
    assistant,
    common_len,
    system,
    user,
    words,
)
from testkit.real_templates import FamilyChats

CLOSED = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("asked", "default", "thinks"),
    [(True, False, True), (False, True, False), (None, True, True),
     (None, False, False)],
)  # fmt: skip
def test_the_request_decides_about_thinking_else_the_default(
    asked: bool | None, default: bool, thinks: bool
) -> None:
    """DEFAULT_THINKING; no thinking is a closed block."""
    prompt = Chats(default_thinking=default).ask([user("hi")], Client(thinking=asked))
    assert prompt.thinking is thinks
    assert prompt.text.endswith(CLOSED) is not thinks
    assert not prompt.opens_thinking


def test_a_clients_template_arguments_do_not_overrule_thinking() -> None:
    """What was settled from all its fields stands."""
    client = Client(thinking=True, kwargs={"enable_thinking": False})
    assert Chats().ask([user("hi")], client).thinking
    assert not Chats().ask([user("hi")], client).text.endswith(CLOSED)


def test_a_clients_template_arguments_reach_the_template() -> None:
    """They win over the server's own."""
    asked = [user("a"), assistant("b", reasoning="why"), user("c")]
    kept = Chats().ask(asked)
    dropped = Chats().ask(asked, Client(kwargs={"preserve_thinking": False}))
    assert "why" in kept.text
    assert "why" not in dropped.text


def test_a_prompt_that_opens_the_think_block_says_so() -> None:
    """The answer begins inside it."""
    prompt = Chats("opens_think").ask([user("hi")])
    assert prompt.opens_thinking
    assert prompt.text.endswith("<think>\n")


@pytest.mark.parametrize(("kind", "shown"), [("effort", True), ("builtin", False)])
def test_the_effort_word_goes_to_templates_that_take_one(
    kind: str, shown: bool
) -> None:
    """Others are not given it: it would only split their frames."""
    chats = Chats(kind)
    request = ChatRequest(
        "r", "m", (user("hi"),), thinking=Thinking(True, effort="high")
    )
    prompt = chats.pipeline.prepare(request, chats.store)
    assert ("effort high" in prompt.text) is shown


def test_a_refused_conversation_leaves_nothing_behind() -> None:
    """400, and the memory as it was."""
    chats = FamilyChats("qwen3.5")
    with pytest.raises(BadRequest, match="No user query"):
        chats.ask([assistant("b")])
    assert len(chats.memory.lineage) == 0


def test_only_finished_turns_are_remembered() -> None:
    """A cancelled request's prompt lends nothing."""
    chats = Chats()
    asked = [system("Current time is 10:05.\n" + words(100)), user("hi")]
    cancelled = chats.ask(asked)
    chats.store.add(cancelled.model_ids)  # its prefill is kept, though
    later = [system("Current time is 10:06.\n" + words(100)), user("hi")]
    assert chats.ask(later).report.match == "strict"
    chats.answer(cancelled, Said("Fine."))
    assert chats.ask(later).report.match == "pinned"


def test_a_prompt_is_never_altered_by_another_request_meanwhile() -> None:
    """Two at once over one history: each is a continuation of what was kept."""
    chats = Chats()
    first = chats.turn([system(words(60)), user("hi")])
    base = [system(words(60)), user("hi"), first.said.echo]
    one, two = chats.ask([*base, user("one")]), chats.ask([*base, user("two")])
    chats.answer(one, Said("A."))
    chats.answer(two, Said("B."))
    for prompt, said in ((one, "A."), (two, "B.")):
        kept = next(
            s for s in chats.store.sequences if s[: len(prompt.model_ids)]
            == prompt.model_ids
        )  # fmt: skip
        tail = user("one") if prompt is one else user("two")
        following = chats.ask([*base, tail, assistant(said), user("and?")])
        assert common_len(following.model_ids, kept) == len(kept)


def test_many_threads_at_once() -> None:
    """Each conversation is read as it would be alone."""
    chats = Chats()
    texts: dict[int, list[str]] = {}
    failed: list[BaseException] = []

    def talk(number: int) -> None:
        client = Client(f"session {number}")
        messages: list[Message] = [system(words(50)), user(f"hi from {number}")]
        try:
            for turn in range(6):
                said = Said(f"Answer {turn}.", f"{number} thinks {turn}")
                done = chats.turn(messages, said, client)
                texts.setdefault(number, []).append(done.text)
                messages += [said.echo, user(f"question {turn} of {number}")]
        except BaseException as error:  # noqa: BLE001 - shown below
            failed.append(error)

    running = [threading.Thread(target=talk, args=(n,)) for n in range(6)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert failed == []
    for number, read in texts.items():
        assert len(read) == 6
        for other in set(texts) - {number}:
            assert f"{other} thinks" not in read[-1]
        for turn in range(5):
            assert read[-1].count(f"{number} thinks {turn}") == 1


def request_of(messages: Sequence[Message]) -> ChatRequest:
    return ChatRequest("r", "m", tuple(messages), client=ClientInfo("s", "a", "k"))


def talk(chats: Chats) -> dict[str, Any]:
    """A pinned and a spliced turn; the counters then."""
    asked = [system("Current time is 10:05.\n" + words(100)), user("hi")]
    prompt = chats.pipeline.prepare(request_of(asked), chats.store)
    chats.answer(prompt, Said("Fine.", "hm"))
    later = [system("Current time is 10:06.\n" + words(100)), user("hi"),
             assistant("Fine."), user("and?")]  # fmt: skip
    prompt = chats.pipeline.prepare(request_of(later), chats.store)
    return {"match": prompt.report.match, **chats.pipeline.counters.snapshot()}


@pytest.mark.parametrize("kind", ["builtin", "plain", "trim", "glm", "llama3", "spm"])
def test_verifying_finds_nothing_wrong(kind: str) -> None:
    """CACHE_VERIFY=true is no other behaviour."""
    counted = talk(Chats(kind, verify=True))
    assert (counted["match"], counted["invariant_violation"]) == ("pinned", 0)


def test_a_violation_becomes_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """CACHE_VERIFY=true: ids that are not their text never reach the model."""

    def broken(*args: Any) -> Any:
        found = assemble(*args)
        return replace(found, ids=(*found.ids[:-1], 7)) if args[1] else found

    assemble = prompt_variants.model_ids
    monkeypatch.setattr(prompt_variants, "model_ids", broken)
    counted = talk(Chats(verify=True))
    assert counted["invariant_violation"] == 1
    assert counted["match"] != "pinned"
