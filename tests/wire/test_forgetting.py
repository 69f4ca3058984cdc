"""What is cleared is gone, at once, and does not come back."""

import gc
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from sidecar.app import App
from testkit.raw_http import eventually
from testkit.servers import held_gpu, running_sidecar

SYSTEM = {"role": "system", "content": "You help. " + "word " * 400}
ASKED = [SYSTEM, {"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    """The built-in model: it thinks, and answers."""
    with running_sidecar() as running:
        yield running


def say(app: App, messages: list[dict[str, str]]) -> tuple[dict[str, Any], int]:
    """The message of a short answer, and how many tokens of its prompt were cached."""
    body = {"model": "local", "messages": messages, "max_tokens": 400, "temperature": 0}
    body["chat_template_kwargs"] = {"enable_thinking": True}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
    told = answer.json()
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return told["choices"][0]["message"], cached


def clear(app: App) -> dict[str, Any]:
    answer = httpx.post(f"{app.url}/admin/cache/clear", timeout=60)
    assert answer.status_code == 200
    told: dict[str, Any] = answer.json()
    return told


def in_use() -> int:
    """Bytes, once nothing is being computed any more."""
    mx.synchronize()
    return mx.get_active_memory()


def test_memory_falls_at_once(app: App) -> None:
    """By the bytes that are told, without a garbage collection."""
    say(app, ASKED)
    with app.pool.lease("local") as resident:
        stored = resident.engine.store.num_bytes
    assert stored > 0
    gc.collect()
    gc.disable()
    try:
        before = app.gpu.call(in_use)
        told = clear(app)
        after = app.gpu.call(in_use)
    finally:
        gc.enable()
    assert told["kv_bytes"] == before - after >= stored
    assert told["prompts"] >= 1
    assert told["threads"] >= 1


def test_a_thought_is_not_put_back(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ids stand in the next prompt before the clearing, and never behind it."""
    clear(app)
    message, _ = say(app, ASKED)
    with app.pool.lease("local") as resident:
        (known,) = resident.memory.healing._turns.values()
    thought = known[0].healed.raw_ids
    seen: list[tuple[int, ...]] = []
    submit = resident.engine.submit

    def submitted(prompt: Any, *rest: Any) -> Any:
        seen.append(prompt.ids)
        return submit(prompt, *rest)

    monkeypatch.setattr(resident.engine, "submit", submitted)
    assert message["reasoning_content"]
    echoed = {"role": "assistant", "content": message["content"]}
    following = [*ASKED, echoed, {"role": "user", "content": "and?"}]
    say(app, following)
    clear(app)
    say(app, following)
    assert holds(seen[0], thought)
    assert not holds(seen[1], thought)


def holds(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))


def test_nothing_is_cached_of_what_was_cleared(app: App) -> None:
    clear(app)
    say(app, ASKED)
    assert say(app, ASKED)[1] > 100
    clear(app)
    assert say(app, ASKED)[1] == 0


def test_unloading_gives_back_the_weights(
    model_folder: Callable[[str], Path],
) -> None:
    """Measured, whoever still holds the model; a second time does nothing."""
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        say(app, ASKED)
        with app.pool.lease("local") as resident:
            weights = resident.engine.model.num_bytes
        before = app.gpu.call(mx.get_active_memory)
        returned = app.pool.unload("local")
        after = app.gpu.call(mx.get_active_memory)
        assert returned == before - after >= weights
        assert resident.engine.model.name
        assert resident.close() == 0
        assert app.pool.unload("local") == 0


def test_what_was_asked_before_and_not_begun_leaves_nothing(app: App) -> None:
    """Neither its KV nor its session, though it is computed behind the clearing."""
    clear(app)
    body = {"model": "local", "messages": ASKED, "max_tokens": 8, "session_id": "late"}
    with held_gpu(app) as go, ThreadPoolExecutor(2) as pool:
        late = pool.submit(
            httpx.post, f"{app.url}/v1/chat/completions", json=body, timeout=120
        )
        with app.pool.lease("local") as resident:
            assert eventually(lambda: resident.engine._admission.num_open == 1, 60)
        clearing = pool.submit(clear, app)
        (late_job,) = resident.engine._admission._open.copy()
        begun = late_job.spec.prompt.conversation.generation
        assert eventually(lambda: resident.engine.store.generation != begun, 60)
        go.set()
        assert late.result().status_code == 200
        clearing.result()
    told = httpx.get(f"{app.url}/admin/cache", timeout=60).json()
    assert [row["session"] for row in told["tree"]] == []
    assert told["sessions"] == []
    assert say(app, ASKED)[1] == 0


def test_a_response_that_was_being_made_is_not_kept(app: App) -> None:
    """Nor what was kept before: neither can be gone on with."""
    url = f"{app.url}/v1/responses"
    body = {"model": "local", "input": "My word is heron.", "max_output_tokens": 400}
    kept = httpx.post(url, json=body, timeout=120).json()["id"]
    with httpx.stream(
        "POST", url, timeout=120,
        json={**body, "previous_response_id": kept, "stream": True},
    ) as running:  # fmt: skip
        lines = running.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        clear(app)
        rest = list(lines)
    assert any("response.completed" in line for line in rest)
    late = json.loads(first.removeprefix("data: "))["response"]["id"]
    for name in (kept, late):
        assert httpx.get(f"{url}/{name}", timeout=60).status_code == 404


def talk(app: App, session: str, key: str = "") -> tuple[list[dict[str, str]], int]:
    """A turn, its answer and a question behind it; how much of it all is cached."""
    asked = [SYSTEM, {"role": "user", "content": f"{session}: What is it?"}]
    message, _ = say_in(app, session, key, asked)
    following = [*asked, {"role": "assistant", "content": message["content"]}]
    return [*following, {"role": "user", "content": "and?"}], len(message["content"])


def say_in(
    app: App, session: str, key: str, messages: list[dict[str, str]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message of an answer, and all that was told."""
    body = {
        "model": "local", "messages": messages, "max_tokens": 400, "temperature": 0,
        "session_id": session, "chat_template_kwargs": {"enable_thinking": True},
        "x_mlx": {"key": key} if key else {},
    }  # fmt: skip
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
    told = answer.json()
    return told["choices"][0]["message"], told


def foretold(app: App, session: str, key: str, messages: list[Any]) -> int:
    """How much of a prompt would be reused."""
    body = {"model": "local", "messages": messages, "session_id": session,
            "x_mlx": {"key": key} if key else {}}  # fmt: skip
    told = httpx.post(f"{app.url}/v1/cache/probe", json=body, timeout=60).json()
    return int(told["cached_tokens"])


def forget(app: App, **forget_filter: str) -> dict[str, Any]:
    answer = httpx.post(f"{app.url}/admin/cache/forget", json=forget_filter, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.parametrize("by", ["session", "key"])
def test_one_conversation_is_forgotten_and_the_other_goes_on(app: App, by: str) -> None:
    """KV, thoughts, session: the other's turn is as warm as ever."""
    clear(app)
    names = [("one", "key-1"), ("other", "key-2")]
    (mine, _), (theirs, _) = [talk(app, *name) for name in names]
    before = [foretold(app, *names[0], mine), foretold(app, *names[1], theirs)]
    told = forget(app, **({"session": "one"} if by == "session" else {"key": "key-1"}))
    assert told["forgotten"] is True
    assert told["threads"] == told["prompts"] == 1
    assert told["kv_bytes"] > 0
    report = httpx.get(f"{app.url}/admin/cache?check=1", timeout=60).json()
    assert report["problems"] == []
    assert [(r["session"], r["key"]) for r in report["sessions"]] == [names[1]]
    assert {row["session"] for row in report["tree"]} == {"other"}
    after = [foretold(app, *names[0], mine), foretold(app, *names[1], theirs)]
    assert after[1] == before[1]
    assert after[0] < before[0] - 10  # what both began with is the other's
    with app.pool.lease("local") as resident:
        places = resident.memory.healing._turns.values()
    left = {turn.conversation.session for turns in places for turn in turns}
    assert left == {"other"}
    told = forget(app, session="one")
    assert told["forgotten"] is False  # nothing was left, as of a name that is wrong
    assert not any(told.values())


def test_what_runs_of_it_leaves_nothing_and_of_another_all(app: App) -> None:
    clear(app)
    with held_gpu(app) as go, ThreadPoolExecutor(3) as pool:
        talks = [pool.submit(talk, app, name) for name in ("one", "other")]
        with app.pool.lease("local") as resident:
            assert eventually(lambda: resident.engine._admission.num_open == 2, 60)
            begun = resident.engine.store.generation
        forgetting = pool.submit(forget, app, session="one")
        assert eventually(lambda: resident.engine.store.generation != begun, 60)
        go.set()
        for said in talks:
            said.result()
        forgetting.result()
    report = httpx.get(f"{app.url}/admin/cache?check=1", timeout=60).json()
    assert report["problems"] == []
    assert [row["session"] for row in report["sessions"]] == ["other"]
    assert {row["session"] for row in report["tree"]} == {"other"}


def test_a_row_of_the_report_names_those_without_a_key(app: App) -> None:
    """Another key's session of the same name stays."""
    clear(app)
    for key in ("", "key-2"):
        talk(app, "one", key)
    body = {"session": "one", "key": None}
    url = f"{app.url}/admin/cache/forget"
    assert httpx.post(url, json=body, timeout=60).json()["threads"] == 1
    report = httpx.get(f"{app.url}/admin/cache", timeout=60).json()
    assert [(r["session"], r["key"]) for r in report["sessions"]] == [("one", "key-2")]


def test_all_without_a_key_are_forgotten_together(app: App) -> None:
    clear(app)
    for session, key in (("one", ""), ("two", ""), ("one", "key-2")):
        talk(app, session, key)
    url = f"{app.url}/admin/cache/forget"
    assert httpx.post(url, json={"key": None}, timeout=60).json()["threads"] == 2
    report = httpx.get(f"{app.url}/admin/cache", timeout=60).json()
    assert [(r["session"], r["key"]) for r in report["sessions"]] == [("one", "key-2")]


def test_of_a_model_that_is_not_there_nothing_is_forgotten(app: App) -> None:
    body = {"model": "local", "input": "Hi.", "max_output_tokens": 4}
    headers = {"session-id": "kept"}
    url = f"{app.url}/v1/responses"
    name = httpx.post(url, json=body, headers=headers, timeout=120).json()["id"]
    forgetting = f"{app.url}/admin/cache/forget?model=nope"
    answer = httpx.post(forgetting, json={"session": "kept"}, timeout=60)
    assert answer.status_code == 404
    assert httpx.get(f"{url}/{name}", timeout=60).status_code == 200


def test_a_stored_response_of_it_is_gone(app: App) -> None:
    url, kept = f"{app.url}/v1/responses", []
    for session in ("one", "other", None):
        body = {"model": "local", "input": "Hi.", "max_output_tokens": 4}
        headers = {"session-id": session} if session else {}
        answer = httpx.post(url, json=body, headers=headers, timeout=120)
        kept.append(answer.json()["id"])
    assert forget(app, session="one")["responses"] == 1
    found = [httpx.get(f"{url}/{name}", timeout=60).status_code for name in kept]
    assert found == [404, 200, 200]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "session"), ([], "body"), ({"session": 7}, "session"),
        ({"session": ""}, "session"), ({"all": True}, "all"),
        ({"session": None}, "session"),
    ],
)  # fmt: skip
def test_who_is_forgotten_must_be_said(app: App, body: Any, named: str) -> None:
    """Nothing is forgotten by mistake."""
    say(app, ASKED)
    answer = httpx.post(f"{app.url}/admin/cache/forget", json=body, timeout=60)
    assert answer.status_code == 400
    assert named in answer.json()["detail"]
    assert say(app, ASKED)[1] > 100
