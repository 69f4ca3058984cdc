"""Conversations that share slots: forgetting one takes nothing from the others."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from sidecar.app import App
from sidecar.kv.disk.slot_folder import SlotFolder
from testkit.kept_kv import flush, kept_sidecar, slots
from testkit.tiny_models import BUILTIN

Json = dict[str, Any]
ModelFolder = Callable[[str], Path]
Fill = Callable[[App], list[Json]]
KINDS = ["dense", "hybrid", "sliding"]
SYSTEM = {"role": "system", "content": f"You help. {'word ' * 150}"}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def ask(app: App, session: str, talk: list[Json]) -> Json:
    body = {
        "messages": talk, "max_tokens": 8, "temperature": 0, "session_id": session,
    }  # fmt: skip
    found: Json = httpx.post(
        f"{app.url}/v1/chat/completions", json=body, timeout=120
    ).json()
    return found


def said(answer: Json) -> Json:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def cached(answer: Json) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def forget(app: App, session: str) -> None:
    url = f"{app.url}/admin/cache/forget"
    assert httpx.post(url, json={"session": session}, timeout=60).is_success


def written(root: Path) -> str:
    """What all slots say."""
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    folders = [SlotFolder(path.parent) for path in slots(root)]
    runs = [f.read(number).ids.tolist() for f in folders for number in f.numbers()]
    return "\n".join(map(tokenizer.decode, runs))


def common_system(app: App) -> list[Json]:
    """They part a few tokens behind the system prompt, within what `gone` said."""
    ask(app, "gone", [SYSTEM, user(f"It is about heliotrope {'more ' * 40}")])
    flush(app)
    talk = [SYSTEM, user(f"It is the sun and moon {'else ' * 40}")]
    talk += [said(ask(app, "stay", talk)), user("and?")]
    flush(app)
    return talk


def fork(app: App) -> list[Json]:
    """`gone` goes on from what `stay` said, and is longer."""
    talk = [SYSTEM, user(f"It is the sun {'more ' * 40}")]
    talk.append(said(ask(app, "stay", talk)))
    flush(app)
    ask(app, "gone", [*talk, user(f"It is heliotrope {'more ' * 60}")])
    flush(app)
    return [*talk, user("and?")]


def fork_of_what_was_not_written(app: App) -> list[Json]:
    """All of it is written as what `gone` said."""
    talk = [SYSTEM, user(f"It is the sun {'more ' * 40}")]
    talk.append(said(ask(app, "stay", talk)))
    ask(app, "gone", [*talk, user(f"It is heliotrope {'more ' * 60}")])
    flush(app)
    return [*talk, user("and?")]


@pytest.mark.parametrize("run_tokens", ["64", "4096"])
@pytest.mark.parametrize("fill", [common_system, fork])
@pytest.mark.parametrize("kind", KINDS)
def test_the_others_prompts_are_as_warm_as_before(
    kind: str, fill: Fill, run_tokens: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """After a restart, as after one before which nothing was forgotten."""
    root, whole, model = tmp_path / "kv", tmp_path / "whole", model_folder(kind)
    more = {"KV_DISK_RUN_TOKENS": run_tokens}
    with kept_sidecar(root, model, **more) as app:
        talk = fill(app)
    shutil.copytree(root, whole)
    with kept_sidecar(whole, model, **more) as app:
        expected = ask(app, "stay", talk)
    with kept_sidecar(root, model, **more) as app:
        forget(app, "gone")
    assert not [f for f in root.glob("*/*meta.json") if '"gone"' in f.read_text()]
    with kept_sidecar(root, model, **more) as app:
        found = ask(app, "stay", talk)
    assert cached(found) >= cached(expected) - 8  # `gone` began with the same words
    assert cached(found) > 200
    assert said(found) == said(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_who_said_its_beginning_keeps_nothing_of_a_forgotten_talk(
    kind: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Though what they said was written with the end of it."""
    talk = [SYSTEM, user(f"It is the sun {'more ' * 40}")]
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        gone = [*talk, said(ask(app, "gone", talk))]
        flush(app)
        gone.append(user(f"It is heliotrope {'more ' * 40}"))
        gone.append(said(ask(app, "gone", gone)))
        flush(app)
        ask(app, "stay", talk)
        ask(app, "gone", [*gone, user("and?")])
        flush(app)
        assert "heliotrope" in written(tmp_path)
        forget(app, "gone")
        assert "heliotrope" not in written(tmp_path)
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        assert cached(ask(app, "stay", [*talk, user("and?")])) > 150


@pytest.mark.parametrize(("kind", "minimum"), [("dense", 200), ("hybrid", 150)])
def test_what_another_went_on_from_is_not_all_theirs(
    kind: str, minimum: int, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Where layers cannot be cut it is warm to the last state before."""
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        talk = fork_of_what_was_not_written(app)
        forget(app, "gone")
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        assert cached(ask(app, "stay", talk)) >= minimum


@pytest.mark.parametrize(("kind", "minimum"), [("dense", 200), ("hybrid", 150)])
def test_what_was_to_be_written_of_others_is(
    kind: str, minimum: int, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Though the forgotten one went on from it, and was to be written instead."""
    talk = [SYSTEM, user(f"It is the sun {'more ' * 40}")]
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        talk.append(said(ask(app, "stay", talk)))
        ask(app, "gone", [*talk, user(f"It is heliotrope {'more ' * 60}")])
        forget(app, "gone")
    assert "heliotrope" not in written(tmp_path)
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        assert cached(ask(app, "stay", [*talk, user("and?")])) >= minimum


def test_a_name_that_changes_each_turn_makes_no_endless_chain(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Some of the slots are joined with what goes on from them."""
    talk: list[Json] = [SYSTEM]
    with kept_sidecar(tmp_path, model_folder("dense"), KV_DISK_RUN_TOKENS="64") as app:
        for number in range(44):
            talk.append(user(f"{number} is the number"))
            talk.append(said(ask(app, f"session {number}", talk)))
            flush(app)
        assert len(slots(tmp_path)) < 40
        assert cached(ask(app, "last", [*talk, user("and?")])) > 1000


@pytest.fixture(params=["dense", "hybrid"])
def app(
    request: pytest.FixtureRequest, model_folder: ModelFolder, tmp_path: Path
) -> Iterator[App]:
    folder = model_folder(request.param)
    with kept_sidecar(tmp_path, folder, KV_DISK_RESTORE="never") as app:
        yield app


@pytest.mark.parametrize("clock", ["fine", "coarse"])
def test_what_is_forgotten_is_not_foretold(
    clock: str, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do its slots, which are gone, stand in the way of what others write."""
    if clock == "coarse":  # the folder's time of change shows no deletion
        monkeypatch.setattr(SlotFolder, "changed_at", lambda _: 7)
    talk = [SYSTEM, user("It is heliotrope")]
    ask(app, "gone", talk)
    flush(app)
    assert slots(tmp_path)
    forget(app, "gone")
    assert slots(tmp_path) == []
    report = httpx.get(f"{app.url}/admin/cache", timeout=60).json()
    assert report["disk_slots"] == 0
    ask(app, "stay", [SYSTEM, user("It is the sun")])
    flush(app)
    assert slots(tmp_path)


def test_a_fork_leaves_the_end_it_went_on_from(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Where layers cannot be cut its state is there alone."""
    more = {"KV_DISK_RUN_TOKENS": "64"}
    with kept_sidecar(tmp_path, model_folder("hybrid"), **more) as app:
        talk = fork(app)
    assert [path.name for path in slots(tmp_path)] == [
        f"slot_{number}_tokens.safetensors" for number in (1, 2, 3)
    ]
    with kept_sidecar(tmp_path, model_folder("hybrid"), **more) as app:
        assert cached(ask(app, "stay", talk)) > 200
