"""The cause of a cold prompt, as it was planted in conversations of ten agents."""

import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.core.conversation import ForgetFilter
from sidecar.core.prompt import LOST_SLACK
from sidecar.residents.resident import Resident
from testkit.image_chats import user
from testkit.pictures import image_part
from testkit.raw_http import eventually
from testkit.servers import held_gpu, running_sidecar
from testkit.tiny_vision import SEEING, make_seeing
from tests.service.planted_causes import AGENTS, CHANGES, Talk, other_word, recorded

_numbers = itertools.count()


@pytest.fixture(scope="module")
def app(model_folder: Callable[[str], Path]) -> Iterator[App]:
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as served:
        yield served


def send(app: App, talk: Talk) -> dict[str, Any]:
    """Send a request; the row that the page has of it."""
    answer = httpx.post(f"{app.url}{talk.path}", json=talk.body, timeout=60)
    assert answer.status_code == 200, answer.text
    state = httpx.get(f"{app.url}/admin/state", timeout=60).json()
    row: dict[str, Any] = state["ended"][0]
    return row


def new_talk(agent: str) -> Talk:
    return recorded(agent).named(f"s{next(_numbers)}")


def check(row: dict[str, Any], before: dict[str, Any], cause: str) -> None:
    """The cause is named, and what was lost is right within 2 %."""
    found, now = row["warmth"], row["prompt_tokens"]
    lost = min(before["prompt_tokens"], now) - row["cached_tokens"]
    assert found["cause"] == cause, row
    if cause:
        assert abs(found["lost"] - lost) <= 0.02 * lost, row
    else:
        assert (found["lost"], lost <= LOST_SLACK) == (0, True), row


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("agent", AGENTS)
def test_a_changed_conversation(app: App, agent: str, change: str) -> None:
    cause, plant = CHANGES[change]
    talk = new_talk(agent)
    before = send(app, talk)
    assert before["warmth"]["cause"] in ("unknown_past", "")
    plant(talk)
    check(send(app, talk), before, cause)


@pytest.mark.parametrize("agent", AGENTS)
def test_kv_that_was_evicted(app: App, agent: str) -> None:
    talk = new_talk(agent)
    before = send(app, talk)
    app.gpu.call(lambda: app.shared.stored.evict_bytes(1 << 40))
    row = send(app, talk)
    check(row, before, "evicted")
    assert row["warmth"]["remedy"] == "MAX_PROCESS_MEMORY"


@pytest.mark.parametrize("agent", AGENTS)
def test_what_was_cleared(app: App, agent: str) -> None:
    talk = new_talk(agent)
    before = send(app, talk)
    httpx.post(f"{app.url}/admin/cache/clear", timeout=60).raise_for_status()
    state = httpx.get(f"{app.url}/admin/state", timeout=60).json()
    assert state["ended"] == []
    check(send(app, talk), before, "cleared")


INFO = 'Conversation info (untrusted metadata):\n```json\n{"id": %d}\n```\n\n'


@pytest.mark.parametrize("agent", AGENTS)
def test_a_value_that_must_not_be_kept(app: App, agent: str) -> None:
    talk = new_talk(agent)
    user = next(m for m in talk.messages if m["role"] == "user")
    sent = user["content"]
    is_text = isinstance(sent, str)
    text = sent if is_text else sent[0]["text"]

    def say(number: int) -> None:
        new = (INFO % number) + text
        if is_text:
            user["content"] = new
        else:
            sent[0]["text"] = new

    say(1)
    before = send(app, talk)
    say(2)
    row = send(app, talk)
    check(row, before, "field: conversation_info")
    assert row["warmth"]["remedy"].startswith("CACHE_PIN_POLICY=")


def test_new_conversations(app: App) -> None:
    httpx.post(f"{app.url}/admin/cache/clear", timeout=60).raise_for_status()

    def begin(system: str) -> str:
        talk = new_talk("opencode-1.18.33")
        talk.body["messages"] = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Say {next(_numbers)}."},
        ]
        cause: str = send(app, talk)["warmth"]["cause"]
        return cause

    text = "You are of the one kind. " * 20
    assert [begin(text), begin(text)] == ["first_seen", "other_prefix"]


def test_what_is_not_lent_between_conversations(app: App) -> None:
    """Their beginnings differ in what says who asks."""

    def begin(chat: str) -> str:
        talk = new_talk("openclaw-2026.9.6-local")
        context = (
            f'## Inbound Context (trusted metadata)\n```json\n{{"a": "{chat}"}}\n```\n'
        )
        rest = "# Project Context\n" + "Many words of it. " * 30
        talk.body["messages"] = [
            {"role": "system", "content": f"You help.\n{context}{rest}"},
            {"role": "user", "content": "Hello."},
        ]
        cause: str = send(app, talk)["warmth"]["cause"]
        return cause

    begin("one")
    assert begin("two") == "not_lent"


def test_another_image(tmp_path: Path) -> None:
    """Of the same size, so that the same number of ids stands for it."""
    folder = make_seeing(tmp_path / "seeing", SEEING[0])

    def ask(seed: int) -> dict[str, Any]:
        body = {
            "messages": [
                user("Hello."),
                {"role": "assistant", "content": "Hi."},
                user(image_part(seed), "What is on it? " * 12),
            ],
            "session_id": "pictures",
            "max_tokens": 4,
        }
        talk = Talk("/v1/chat/completions", {"model": "local", **body})
        return send(app, talk)

    with running_sidecar({"MODEL_PATH": str(folder)}) as app:
        before = ask(1)
        row = ask(2)
    assert before["prompt_tokens"] == row["prompt_tokens"]
    assert row["warmth"]["cause"] == "image", row


def test_what_was_idle_for_too_long(model_folder: Callable[[str], Path]) -> None:
    """KV leaves by its own time, and sessions by theirs."""
    settings = {
        "MODEL_PATH": str(model_folder("dense")),
        "PROMPT_CACHE_TTL_SECONDS": "1",
    }
    talk = new_talk("qwen-0.24.4")
    with running_sidecar(settings) as app:
        before = send(app, talk)
        assert eventually(lambda: app.shared.stored.num_bytes == 0)
        row = send(app, talk)
        check(row, before, "expired")
        assert row["warmth"]["remedy"] == "PROMPT_CACHE_TTL_SECONDS"
    settings["PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS"] = "1"
    with running_sidecar(settings) as app:
        before = send(app, talk)
        assert eventually(lambda: app.shared.stored.num_bytes == 0)
        row = send(app, talk)
        assert row["warmth"]["cause"] == "expired"


def test_layers_that_cannot_be_cut(model_folder: Callable[[str], Path]) -> None:
    """Going back is not possible where no checkpoint is."""
    settings = {"MODEL_PATH": str(model_folder("hybrid"))}
    with running_sidecar(settings) as app:
        talk = new_talk("qwen-0.24.4")
        before = send(app, talk)
        del talk.messages[-2:]
        row = send(app, talk)
        lost = min(before["prompt_tokens"], row["prompt_tokens"]) - row["cached_tokens"]
        assert row["warmth"]["cause"] == ("no_checkpoint" if lost > LOST_SLACK else "")


def test_reuse_that_is_switched_off(model_folder: Callable[[str], Path]) -> None:
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        talk = new_talk("qwen-0.24.4")
        before = send(app, talk)
        with app.pool.lease("") as resident:
            resident.engine.store.switched_off.add("restore")
        row = send(app, talk)
        check(row, before, "switched_off")


def test_what_nobody_can_know_is_not_made_up(app: App) -> None:
    """Words of an assistant that is another's; the next task of one session."""
    httpx.post(f"{app.url}/admin/cache/clear", timeout=60).raise_for_status()
    system = {"role": "system", "content": "You do tasks. " * 40}

    def ask(session: str, *said: str) -> tuple[str, int]:
        roles = ("user", "assistant")
        talk = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
        body = {"model": "local", "messages": [system, *talk], "max_tokens": 4}
        path = "/v1/chat/completions"
        row = send(app, Talk(path, {**body, "session_id": session}))
        return row["warmth"]["cause"], row["warmth"]["lost"]

    assert ask("tasks", f"Task one. {'x ' * 99}") == ("first_seen", 0)
    assert ask("tasks", f"Task two. {'y ' * 99}") == ("other_prefix", 0)
    assert ask("shots", "Say a. " * 99, "a", "Say b.") == ("unknown_past", 0)


def test_a_sub_agent_with_a_thread_of_its_own_has_lost_nothing(app: App) -> None:
    """Codex: one session, the same first words, other tools, a thread's name."""
    httpx.post(f"{app.url}/admin/cache/clear", timeout=60).raise_for_status()
    tools = [
        {"type": "function", "name": name, "parameters": {"type": "object"}}
        for name in ("read", "spawn")
    ]

    def ask(thread: str, offered: list[dict[str, Any]], *said: str) -> str:
        roles = ("user", "user", "assistant")
        body = {
            "model": "local",
            "instructions": "You do tasks. " * 40,
            "input": [
                {"role": role, "content": text}
                for role, text in zip(
                    roles, ("The folder is empty.", *said), strict=True
                )
            ],
            "tools": offered,
            "max_output_tokens": 16,
            "client_metadata": {"session_id": "codex", "thread_id": thread},
        }
        row = send(app, Talk("/v1/responses", body))
        cause: str = row["warmth"]["cause"]
        return cause

    main = ("Do it. " * 40, "Done.")
    ask("codex", tools, *main)
    assert ask("codex", tools[:1], *main) == "tools"
    assert ask("sub", tools[:1], *main) == ""  # all but its end is the main one's


def test_what_was_forgotten_meanwhile_is_not_shown(app: App) -> None:
    """A row of a request that ran while its session was forgotten."""
    talk = new_talk("qwen-0.24.4")
    send(app, talk)
    other_word(talk)
    session = talk.body["session_id"]
    with ThreadPoolExecutor(1) as thread, held_gpu(app):
        url = f"{app.url}{talk.path}"
        asked = thread.submit(httpx.post, url, json=talk.body, timeout=120)
        assert eventually(lambda: len(app.core.services.chat.running()) == 1)
        app.core.services.history.forget(ForgetFilter(session, any_key=True))
        with app.pool.lease("") as resident:
            assert isinstance(resident, Resident)
            resident.memory._kv.new_generation(ForgetFilter(session, any_key=True))
    assert asked.result().status_code == 200
    state = httpx.get(f"{app.url}/admin/state", timeout=60).json()
    assert session not in {row["session"] for row in state["ended"]}


def test_another_conversations_text_is_not_shown(app: App) -> None:
    """Though its beginning is the closest to what is asked."""
    httpx.post(f"{app.url}/admin/cache/clear", timeout=60).raise_for_status()
    system = {"role": "system", "content": "You do tasks. " * 40}

    def ask(session: str, text: str) -> dict[str, Any]:
        talk = [system, {"role": "user", "content": "Hi."}]
        talk += [{"role": "assistant", "content": "Yes?"}]
        talk += [{"role": "user", "content": text}]
        body = {"model": "local", "messages": talk, "max_tokens": 4}
        path = "/v1/chat/completions"
        return send(app, Talk(path, {**body, "session_id": session}))

    words = "and many more words of it " * 12
    ask("of-b", f"beta {words}")
    ask("of-a", f"ALPHA code is 4711 {words}")
    row = ask("of-b", f"ALPHA guess {words}")
    assert row["warmth"]["cause"] == "edited"
    assert "4711" not in json.dumps(row)
