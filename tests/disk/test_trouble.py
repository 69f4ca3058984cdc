"""The disk says no, is slow, is shared, is taken away: requests get their answers."""

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.core.prompt import Hit, ModelIds, ModelPrompt
from sidecar.engine.loading import model_identity
from sidecar.kv.disk import slot_folder, slot_writer
from sidecar.kv.disk.disk_cache import DiskCache
from sidecar.kv.disk.disk_thread import Urgency, disk_thread
from sidecar.kv.disk.root import DiskRoot
from sidecar.kv.disk.slot_arrays import OpenSlot
from sidecar.pipeline.prepare import Pipeline, PreparedPrompt
from testkit.jobs import random_ids, run
from testkit.kept_kv import ask, disk_counts, flush, kept_sidecar, leased, said, slots
from testkit.tiny_models import make_model

ModelFolder = Callable[[str], Path]
Cold = Callable[[str, ModelIds], tuple[int, ...]]


def disk_of(app: App) -> DiskCache:
    with leased(app) as resident:
        assert resident.disk is not None
        return resident.disk


def lose_kv(app: App) -> None:
    """KV in memory alone; what is known of the disk stays."""
    with leased(app) as resident:
        resident.memory.forget()


@contextlib.contextmanager
def failing(error: OSError, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each write of a slot's KV fails half way."""

    def write(file: Any, *_: Any) -> None:
        file.write(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(slot_writer, "write_tensors", write)
        yield


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_says_no(
    code: int,
    model_folder: ModelFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning, no files, answers all the while; and it is tried again later."""
    with (
        kept_sidecar(tmp_path, model_folder("dense")) as app,
        caplog.at_level("WARNING"),
    ):
        with failing(OSError(code, "the disk"), monkeypatch):
            for seed in range(3):
                said(ask(app, random_ids(seed, 100)))
                flush(app)
        warnings = [r for r in caplog.records if "cannot be written" in r.message]
        assert len(warnings) == 1
        assert slots(tmp_path) == []
        assert not list(tmp_path.rglob(".tmp-*"))
        ids = random_ids(9, 100)
        ask(app, ids)
        flush(app)
        assert slots(tmp_path) == []  # it rests from trying
        disk_of(app)._root._paused_until = 0.0
        ask(app, ModelIds(ids + random_ids(8, 40)))
        flush(app)
        assert slots(tmp_path)


def test_a_root_that_is_taken_away(
    model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    ids = random_ids(1, 100)
    with kept_sidecar(tmp_path / "kv", model_folder("dense")) as app:
        ask(app, ids)
        flush(app)
        lose_kv(app)
        shutil.rmtree(tmp_path / "kv")
        assert said(ask(app, ids)) == cold("dense", ids)
        flush(app)
        assert said(ask(app, random_ids(2, 100))) == cold("dense", random_ids(2, 100))
    with kept_sidecar(tmp_path / "kv", model_folder("dense")) as app:
        assert said(ask(app, ids)) == cold("dense", ids)


def test_a_root_that_cannot_be(model_folder: ModelFolder, tmp_path: Path) -> None:
    """A file where the folder should be: a warning, and no KV on the disk."""
    (tmp_path / "kv").write_text("")
    with (
        kept_sidecar(tmp_path / "kv", model_folder("dense")) as app,
        leased(app) as resident,
    ):
        assert resident.disk is None
        said(run(resident.engine, random_ids(1, 50)))


def test_reading_that_fails(
    model_folder: ModelFolder,
    cold: Cold,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = random_ids(1, 100)
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        ask(app, ids)
        flush(app)
        lose_kv(app)

        def read(*_: Any) -> Any:
            raise OSError(errno.EIO, "the disk")

        monkeypatch.setattr(OpenSlot, "read", read)
        asked = ModelIds(ids + random_ids(2, 20))
        assert said(ask(app, asked)) == cold("dense", asked)


def test_a_prompt_is_made_once_whatever_the_disk_does(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says no less where its KV does not come, and its headers tell what did."""
    made: list[PreparedPrompt] = []
    prepare = Pipeline.prepare

    def noted(pipeline: Pipeline, *given: Any) -> PreparedPrompt:
        made.append(prepare(pipeline, *given))
        return made[-1]

    def read(*_: Any) -> Any:
        raise OSError(errno.EIO, "the disk")

    chat = {
        "model": "local",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "word " * 200}],
    }
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        url = f"{app.url}/v1/chat/completions"
        assert httpx.post(url, json=chat, timeout=120).status_code == 200
        flush(app)
        lose_kv(app)
        with leased(app) as resident:
            assert len(slots(tmp_path)) == 1
            monkeypatch.setattr(Pipeline, "prepare", noted)
            monkeypatch.setattr(OpenSlot, "read", read)
            answer = httpx.post(url, json=chat, timeout=120)
        assert answer.status_code == 200
        (prompt,) = made
        assert prompt.hit.disk_len > 150 > prompt.hit.memory_len
        assert answer.headers["x-mlx-cached-tokens"] == "0"
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == 0
        assert not any(
            node.reservations for node in resident.engine.store._tree.nodes()
        )


def test_what_is_slower_than_computing_is_computed(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """And read where it is faster, by the rates that were measured."""
    ids = random_ids(1, 400)
    more = {"KV_DISK_RESTORE": "auto"}
    with kept_sidecar(tmp_path, model_folder("dense"), **more) as app:
        ask(app, ids)
        flush(app)
        disk, asked = disk_of(app), ModelIds(ids + random_ids(2, 20))
        place = disk._place
        assert place is not None
        for rate, is_read in ((1.0, False), (1e12, True)):
            lose_kv(app)
            place.reader.rate = rate
            assert (ask(app, asked).cached > 0) is is_read
    with kept_sidecar(tmp_path, model_folder("dense"), KV_DISK_RESTORE="never") as app:
        assert ask(app, ids).cached == 0


def test_a_restore_that_nobody_waits_for(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at the next layer, and leaves nothing in memory."""
    ids = random_ids(1, 200)
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        ask(app, ids)
        flush(app)
        lose_kv(app)
        begun, go, reads = threading.Event(), threading.Event(), list[str]()
        read = OpenSlot.read

        def slow(self: OpenSlot, name: str) -> Any:
            reads.append(name)
            begun.set()
            assert go.wait(60)
            return read(self, name)

        monkeypatch.setattr(OpenSlot, "read", slow)
        with leased(app) as resident:
            disk = resident.disk
            assert disk is not None
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(
                    resident.restore_raw, ModelPrompt(ids), lambda: not begun.is_set()
                )
                assert waiting.result(60) == Hit()
                go.set()
            disk_thread().submit(Urgency.TIDY, bool).result(60)  # behind it
            assert len(reads) == 2  # keys and values of one of two layers
            assert resident.engine.store.num_bytes == 0


def test_two_requests_for_the_same_are_one_restore(
    model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    ids = random_ids(1, 300)
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        ask(app, ids)
        flush(app)
        lose_kv(app)
        asked = [ModelIds(ids + random_ids(seed, 20)) for seed in range(4)]
        with ThreadPoolExecutor(4) as threads:
            outcomes = list(threads.map(lambda one: ask(app, one), asked))
        for one, outcome in zip(asked, outcomes, strict=True):
            assert said(outcome) == cold("dense", one)
            assert outcome.cached >= 300
        assert disk_counts(app)["disk_restored"] == 1


def test_two_servers_on_one_root(
    model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """Each reuses what the other has written, while both write and clear away."""
    model = model_folder("dense")
    with (
        kept_sidecar(tmp_path, model) as one,
        kept_sidecar(tmp_path, model, KV_DISK_MAX_SIZE_GB="0.002") as other,
    ):
        ids = random_ids(1, 200)
        ask(one, ids)
        flush(one)
        disk_of(other)._looked_at = 0.0  # a second later
        assert ask(other, ModelIds(ids + random_ids(2, 20))).cached >= 200
        talks = [random_ids(seed, 150 + seed) for seed in range(6)]
        answers = [cold("dense", talk) for talk in talks]

        def work(app: App) -> None:
            for number in range(18):
                talk = number % len(talks)
                assert said(ask(app, talks[talk])) == answers[talk]
                flush(app)
                if number % 3 == 2:
                    lose_kv(app)

        with ThreadPoolExecutor(2) as threads:
            for worker in [threads.submit(work, app) for app in (one, other)]:
                worker.result(240)
        assert disk_counts(one)["disk_damaged"] == 0
        assert disk_counts(other)["disk_damaged"] == 0


def test_what_memory_has_no_room_for_comes_back(
    model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """KV that was evicted is read, and memory had fallen by its bytes meanwhile."""
    ids = random_ids(1, 300)
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        ask(app, ids)
        flush(app)
        with leased(app) as resident:
            store = resident.engine.store
            held = store.num_bytes
            app.gpu.call(lambda: store.budget.evict_bytes(1 << 40))
            assert store.num_bytes == 0 < held
        asked = ModelIds(ids + random_ids(2, 20))
        outcome = ask(app, asked)
        assert outcome.cached >= 300
        assert said(outcome) == cold("dense", asked)


def test_another_model_and_back(
    model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """Unloaded, it is written; loaded again, it is read."""
    ids = random_ids(1, 300)
    more = {"UNLOAD_KEEPS_KV": "false"}
    with kept_sidecar(tmp_path, model_folder("dense"), **more) as app:
        ask(app, ids)
        name = app.pool.entries()[0].id
        unloaded = httpx.post(f"{app.url}/admin/models/{name}/unload", timeout=60)
        assert unloaded.status_code == 200
        assert slots(tmp_path)
        httpx.post(f"{app.url}/admin/models/{name}/load", timeout=60)
        asked = ModelIds(ids + random_ids(2, 20))
        outcome = ask(app, asked)
        assert outcome.cached >= 300
        assert said(outcome) == cold("dense", asked)


def test_a_long_talk_without_a_rest(model_folder: ModelFolder, tmp_path: Path) -> None:
    """It is written as it grows: each token once, twice where ends are joined."""
    more = {"KV_DISK_RUN_TOKENS": "300", "KV_DISK_QUIET_SECONDS": "86400"}
    with kept_sidecar(tmp_path, model_folder("dense"), **more) as app:
        ids, disk = random_ids(0, 50), disk_of(app)
        for turn in range(20):
            ids = ModelIds(ids + said(ask(app, ids, 4)) + random_ids(turn + 1, 60))
            disk._write_queue.poll()
        disk.flush()
        with leased(app) as resident:
            token_bytes = resident.engine.guard.model.kv_bytes(1)
        written = disk_counts(app)["disk_bytes_written"]
        assert written <= 1.3 * len(ids) * token_bytes
    assert len(slots(tmp_path)) <= len(ids) // 300 + 1


def test_a_talk_that_rests_at_each_turn(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Its short ends are joined as they add up: each token is written twice at most."""
    more = {"KV_DISK_RUN_TOKENS": "300", "KV_DISK_QUIET_SECONDS": "0"}
    with kept_sidecar(tmp_path, model_folder("dense"), **more) as app:
        ids = random_ids(0, 50)
        for turn in range(20):
            ids = ModelIds(ids + said(ask(app, ids, 4)) + random_ids(turn + 1, 60))
            flush(app)
        with leased(app) as resident:
            token_bytes = resident.engine.guard.model.kv_bytes(1)
        written = disk_counts(app)["disk_bytes_written"]
        assert written <= 2.3 * len(ids) * token_bytes
        files = sum(p.stat().st_size for p in tmp_path.glob("*/slot_*_cache.*"))
        assert files <= 1.15 * len(ids) * token_bytes


def hold_digests(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Weights are not known before the event is set, however small they are."""
    monkeypatch.setattr(model_identity, "_SMALL", 0)
    go, digest = threading.Event(), model_identity._digest

    def slow(file: Path) -> str:
        assert go.wait(60)
        return digest(file)

    monkeypatch.setattr(model_identity, "_digest", slow)
    return go


def test_weights_that_are_not_known_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until their digest is made nothing is read or written; then it is."""
    digest = model_identity._digest
    go = hold_digests(monkeypatch)
    model, ids = make_model(tmp_path / "m", "dense"), random_ids(1, 100)
    with kept_sidecar(tmp_path / "kv", model) as app:
        said(ask(app, ids))
        assert disk_of(app)._place is None
        go.set()
        assert disk_of(app).wait_open(60.0)
        flush(app)
        assert slots(tmp_path / "kv")
    go.clear()  # they are remembered: no digest is made of the weights
    monkeypatch.setattr(model_identity, "_digest", digest)
    with kept_sidecar(tmp_path / "kv", model) as app:
        assert ask(app, ModelIds(ids + random_ids(2, 20))).cached >= 100


def test_a_lock_that_is_held_too_long(
    model_folder: ModelFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process that hangs with the lock costs a wait, and no answer."""
    monkeypatch.setattr(slot_folder, "_LOCK_WAIT_S", 0.05)
    with (
        kept_sidecar(tmp_path, model_folder("dense")) as app,
        caplog.at_level(logging.WARNING),
    ):
        place = disk_of(app)._place
        assert place is not None
        ask(app, random_ids(1, 100))
        with place.folder.locked():
            flush(app)
        assert slots(tmp_path) == []
        assert "is locked" in caplog.text


def test_weights_that_were_replaced_before_they_were_known(
    tmp_path: Path, cold: Cold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is of what was loaded, or there is none: nothing is kept."""
    go = hold_digests(monkeypatch)
    model, ids = make_model(tmp_path / "m", "dense"), random_ids(1, 100)
    with kept_sidecar(tmp_path / "kv", model) as app:
        said(ask(app, ids))
        data = bytearray((model / "model.safetensors").read_bytes())
        data[-5000:] = bytes(5000)
        (model / "new").write_bytes(data)
        (model / "new").replace(model / "model.safetensors")
        go.set()
        assert not disk_of(app).wait_open(2.0)
    assert slots(tmp_path / "kv") == []


def test_a_clear_that_cannot_reach_the_disk_says_so(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503; and once it can, it does."""
    monkeypatch.setattr(slot_folder, "_LOCK_WAIT_S", 0.05)
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        ask(app, random_ids(1, 100))
        flush(app)
        place = disk_of(app)._place
        assert place is not None
        for query in ("", f"?model={app.pool.entries()[0].id}"):
            url = f"{app.url}/admin/cache/clear{query}"
            with place.folder.locked():
                answer = httpx.post(url, timeout=60)
                assert answer.status_code == 503
                assert "disk" in answer.text
            assert slots(tmp_path)
        assert httpx.post(url, timeout=60).json()["disk_slots"] == 1
        assert slots(tmp_path) == []


def test_a_root_that_could_not_be_used_is_told_to_forget(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been read-only when the process began; what lies there still does."""
    model = model_folder("dense")
    with kept_sidecar(tmp_path, model) as app:
        ask(app, random_ids(1, 100))
        flush(app)

    def refused(_: DiskRoot) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(DiskRoot, "prepare", refused)
    with kept_sidecar(tmp_path, model) as app:
        with leased(app) as resident:
            assert resident.disk is None
        url = f"{app.url}/admin/cache/clear"
        with monkeypatch.context() as patch:
            patch.setattr("sidecar.kv.disk.forgetting.forget_all", _refused)
            assert httpx.post(url, timeout=60).status_code == 503
        assert slots(tmp_path)
        assert httpx.post(url, timeout=60).json()["disk_slots"] == 1
    assert slots(tmp_path) == []


def test_a_root_that_is_not_used_is_told_of(
    model_folder: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With KV_DISK_PERSISTENCE off nobody looks at what lies there."""
    model = model_folder("dense")
    with kept_sidecar(tmp_path, model) as app:
        ask(app, random_ids(1, 100))
        flush(app)
    with (
        caplog.at_level(logging.WARNING),
        kept_sidecar(tmp_path, model, KV_DISK_PERSISTENCE="false"),
    ):
        pass
    assert f"lies in {tmp_path} and is not used" in caplog.text
    assert slots(tmp_path)


def test_a_model_is_cleared_before_its_folder_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make_model(tmp_path / "m", "dense"), random_ids(1, 100)
    with kept_sidecar(tmp_path / "kv", model) as app:
        ask(app, ids)
    assert slots(tmp_path / "kv")
    monkeypatch.setattr(model_identity, "_SMALL", -1)
    go, find = threading.Event(), model_identity.identity_of

    def slow(*args: Any) -> Any:
        assert go.wait(60)
        return find(*args)

    monkeypatch.setattr("sidecar.residents.disk.identity_of", slow)
    with kept_sidecar(tmp_path / "kv", model) as app:
        disk_of(app).forget()
        go.set()
        assert disk_of(app).wait_open(60.0)
        assert slots(tmp_path / "kv") == []
        assert ask(app, ids).cached == 0


def test_a_slow_lock_is_no_damage(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is computed, and the slot is there the next time."""
    ids = random_ids(1, 100)
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        ask(app, ids)
        flush(app)
        lose_kv(app)
        monkeypatch.setattr(slot_folder, "_LOCK_WAIT_S", 0.05)
        place = disk_of(app)._place
        assert place is not None
        with place.folder.locked():
            assert ask(app, ids).cached == 0
        assert slots(tmp_path)
        assert disk_counts(app)["disk_damaged"] == 0


def test_a_number_that_was_given_anew(
    model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """Another process cleared, and wrote: its slot stays, and is not read for ours."""
    ids, others = random_ids(1, 100), random_ids(2, 100)
    with (
        kept_sidecar(tmp_path, model_folder("dense")) as one,
        kept_sidecar(tmp_path, model_folder("dense")) as other,
    ):
        ask(one, ids)
        flush(one)
        lose_kv(one)
        disk_of(other).forget()
        ask(other, others)
        flush(other)
        disk_of(one)._looked_at = time.monotonic() + 60  # it has not looked since
        assert said(ask(one, ids)) == cold("dense", ids)
        assert disk_counts(one)["disk_damaged"] == 0
        assert len(slots(tmp_path)) == 1


def test_what_is_forgotten_in_the_middle_of_a_write(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its last byte and its becoming a slot: it becomes none."""
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        ask(app, random_ids(1, 100))
        disk, describe = disk_of(app), slot_folder.SlotFolder.describe

        def forgetting(*args: Any) -> None:
            describe(*args)
            with monkeypatch.context() as patch:  # of this process: not its files
                patch.setattr("sidecar.kv.disk.disk_cache.forget_all", lambda _: (0, 0))
                disk.forget()

        monkeypatch.setattr(slot_folder.SlotFolder, "describe", forgetting)
        flush(app)
        assert slots(tmp_path) == []
        assert not list(tmp_path.rglob(".tmp-*"))


def test_files_of_others_are_let_be(model_folder: ModelFolder, tmp_path: Path) -> None:
    """A root in a folder of the user's: nothing of it is touched."""
    root = tmp_path / "photos"
    (root / "2025").mkdir(parents=True)
    root.chmod(0o755)
    names = ["sector.bad", ".tmp-mine", "2025/copy.bad", "2025/.tmp-1-abc"]
    for name in names:
        (root / name).write_text("mine")
        os.utime(root / name, (0, 0))
    with kept_sidecar(root, model_folder("dense")) as app:
        ask(app, random_ids(1, 100))
        flush(app)
        httpx.post(f"{app.url}/admin/cache/clear", timeout=60)
    assert [name for name in names if not (root / name).exists()] == []
    assert root.stat().st_mode & 0o777 == 0o755
    assert not (root / "2025" / ".lock").exists()


def test_a_janitor_that_fails_keeps_no_model(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is unloaded gives its weights back, whatever the disk says."""
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        ask(app, random_ids(1, 100))
        with leased(app) as resident:
            engine = resident.engine
        with monkeypatch.context() as patch:
            patch.setattr(DiskRoot, "_shrink", _refused)
            name = app.pool.entries()[0].id
            answer = httpx.post(f"{app.url}/admin/models/{name}/unload", timeout=60)
        assert answer.json()["freed_bytes"] > 0
        assert engine.is_closed


def _refused(*_: Any) -> int:
    raise PermissionError("lost+found")


def test_a_disk_that_hangs_costs_no_more_than_computing(
    model_folder: ModelFolder,
    cold: Cold,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt is computed then, and less is expected of the disk."""
    ids, go = random_ids(1, 300), threading.Event()
    more = {"KV_DISK_RESTORE": "auto"}
    with kept_sidecar(tmp_path, model_folder("dense"), **more) as app:
        ask(app, ids)
        flush(app)
        lose_kv(app)
        place = disk_of(app)._place
        assert place is not None
        place.reader.rate = 1e12

        def hang(*_: Any) -> Any:
            assert go.wait(100)
            raise OSError(errno.EIO, "the disk")

        monkeypatch.setattr(OpenSlot, "read", hang)
        started = time.monotonic()
        asked = ModelIds(ids + random_ids(2, 20))
        assert said(ask(app, asked)) == cold("dense", asked)
        assert time.monotonic() - started < 60
        assert place.reader.rate == 5e11
        go.set()
