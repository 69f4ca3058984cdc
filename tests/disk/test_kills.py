"""
A process is killed at any moment of saving, restoring and cleaning.

    DISK_KILLS=1000 pytest -m slow -n 0 -s tests/disk/test_kills.py

After each kill another one on the same root is asked for everything: its answers are
those of a model without a cache, nothing that is whole is damaged, and after the
janitor's next pass nothing is left of what broke off.
"""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.app import App
from sidecar.core.prompt import ModelIds
from sidecar.kv.disk.slot_index import SlotIndex
from testkit.disk_worker import lose_memory, talks
from testkit.kept_kv import ask, disk_counts, kept_sidecar, leased, said

REPO = Path(__file__).parents[2]
ModelFolder = Callable[[str], Path]
Cold = Callable[[str, ModelIds], tuple[int, ...]]
# What a root holds besides models' folders.
KEPT = {
    ".lock", ".janitor.lock", ".metadata_never_index", "CACHEDIR.TAG", "secret",
    "written.json", "digests.json",
}  # fmt: skip
KINDS = ["dense", "hybrid", "sliding"]


@contextmanager
def worker(root: Path, model: Path, seed: str) -> Iterator[subprocess.Popen[str]]:
    """A process at work; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "testkit.disk_worker", str(root), str(model), seed],
        cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    alarm = threading.Timer(120, process.kill)
    alarm.start()
    try:
        assert process.stdout is not None
        said_first = process.stdout.readline()
        assert said_first == "ready\n", process.communicate()[1]
        yield process
    finally:
        alarm.cancel()
        process.kill()
        process.communicate()


def kill_some(kind: str, count: int, model: Path, root: Path, cold: Cold) -> int:
    """Kill so many, other ones by DISK_KILLS_SEED; tokens that were brought back."""
    name = kind + os.environ.get("DISK_KILLS_SEED", "")
    answers = {ids: cold(kind, ids) for ids in talks()}
    chance = random.Random(f"kills {name}")
    # This one reads and clears away only: what it wrote would be on its way.
    with kept_sidecar(root, model, KV_DISK_RUN_TOKENS="1000000") as app:
        for number in range(count):
            with worker(root, model, f"{name} {number}") as process:
                try:
                    process.wait(chance.random() ** 2 * 1.5)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                else:
                    pytest.fail(f"it ended: {process.communicate()[1]}")
                process.wait(60)
            check(app, answers)
            check_ends(app, lambda ids: cold(kind, ids), chance)
        return disk_counts(app)["disk_tokens_restored"]


def check(app: App, answers: dict[ModelIds, tuple[int, ...]]) -> None:
    """All that is there is right, and all that broke off goes."""
    lose_memory(app)
    for ids, answer in answers.items():
        assert said(ask(app, ids)) == answer
    assert disk_counts(app)["disk_damaged"] == 0
    with leased(app) as resident:
        disk = resident.disk
        assert disk is not None
        assert disk._place is not None
        disk._write_queue.due.forget()
        path = disk._place.folder.path
        for file in (*path.iterdir(), *path.parent.iterdir()):
            if file.name.startswith(".tmp-"):
                os.utime(file, (0, 0))
        disk._root.clear_away()
        names = {file.name for file in path.iterdir()}
        folder = disk._place.folder
    whole = {
        folder.file(n, part).name
        for n in folder.numbers()
        for part in ("cache", "meta", "tokens")
    }
    assert names - whole <= {".lock", "model.json"}
    root_names = {file.name for file in path.parent.iterdir() if file.is_file()}
    assert root_names - KEPT == set()


def check_ends(
    app: App, cold: Callable[[ModelIds], tuple[int, ...]], chance: random.Random
) -> None:
    """Where a slot ends all layers have a state: one goes on from there, rightly."""
    lose_memory(app)
    with leased(app) as resident:
        assert resident.disk is not None
        ends = paths(resident.disk._index)
    for path in chance.sample(ends, min(2, len(ends))):
        asked = ModelIds((*path, 7))
        outcome = ask(app, asked)
        assert said(outcome) == cold(asked)
        assert outcome.cached == len(path)


def paths(index: SlotIndex) -> list[tuple[int, ...]]:
    """The ids of all prompts that end where a slot does."""
    found: dict[int, tuple[int, ...]] = {}
    for slot in index.slots():  # a parent's number is lower
        before = found[slot.parent[0]][: slot.at] if slot.parent else ()
        found[slot.number] = (*before, *slot.ids.tolist())
    return list(found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process(
    kind: str, model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    kill_some(kind, 3, model_folder(kind), tmp_path / "kv", cold)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_killed_processes(
    kind: str, model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    count = int(os.environ.get("DISK_KILLS", "1000")) // len(KINDS) + 1
    restored = kill_some(kind, count, model_folder(kind), tmp_path / "kv", cold)
    print(f"\n{kind}: {count} killed, {restored} tokens brought back", flush=True)
    assert restored > 0
