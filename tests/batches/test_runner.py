"""What a batch does that is late, has no room, or is left by its server."""

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.core.batches import BatchOrder
from sidecar.core.errors import Unavailable
from sidecar.service.batches import batch_lines, batch_runner
from sidecar.service.batches.batch import Batch
from sidecar.service.batches.batch_runner import BatchCall, BatchReply, BatchRunner
from sidecar.service.batches.batch_service import BatchService
from tests.batches.conftest import CHAT, chat_line, read, waited, written

_DONE = BatchReply(200, {"said": "yes"})


@contextmanager
def running(
    root: Path, answer: Callable[[BatchCall], BatchReply], most: int = 2
) -> Iterator[tuple[BatchService, BatchRunner]]:
    service = BatchService(root)
    runner = BatchRunner(service, answer, lambda *_: False, most, lambda: 0)
    runner.start()
    try:
        yield service, runner
    finally:
        runner.stop()


def begin(service: BatchService, count: int, hours: int = 24) -> Batch:
    lines = [chat_line(f"line-{n}", "x") for n in range(count)]
    file = service.upload("me", "a.jsonl", written(lines))
    return service.create("me", BatchOrder(file.id, CHAT, hours))


def finished(batch: Batch) -> Batch:
    waited(lambda: batch.has_ended, bool, 60)
    return batch


def test_what_the_server_has_no_room_for_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(batch_runner, "_SHORT_PAUSE_S", 0.01)
    asked = list[str]()

    def answer(call: BatchCall) -> BatchReply:
        asked.append(call.request_id)
        return _DONE if len(asked) > 3 else BatchReply(503, {"error": "busy"})

    with running(tmp_path, answer) as (service, _):
        batch = finished(begin(service, 1))
        found = read(service.files.content("me", batch.output_id))
    assert (batch.status, batch.num_completed, len(asked)) == ("completed", 1, 4)
    assert len(set(asked)) == 4  # a cancel of one must not end the next
    assert found["line-0"]["response"]["body"] == {"said": "yes"}


def test_what_has_no_room_holds_no_other_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that always gets 503 waits alone: the others are answered meanwhile."""
    monkeypatch.setattr(batch_runner, "_SHORT_PAUSE_S", 0.01)
    others_done = threading.Event()
    seen = set[str]()

    def answer(call: BatchCall) -> BatchReply:
        word = json.loads(call.body)["messages"][0]["content"]
        if word == "late" and not others_done.is_set():
            return BatchReply(503, {"error": "busy"})
        seen.add(word)
        if len(seen) == 6:
            others_done.set()
        return _DONE

    with running(tmp_path, answer) as (service, _):
        words = ["late", *map(str, range(6))]
        lines = [chat_line(f"line-{word}", word) for word in words]
        file = service.upload("me", "a.jsonl", written(lines))
        batch = finished(service.create("me", BatchOrder(file.id, CHAT, 24)))
    assert (batch.status, batch.num_completed) == ("completed", 7)


def test_what_never_has_room_fails_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(batch_runner, "_SHORT_PAUSE_S", 0.01)
    busy = BatchReply(429, {"error": "busy"})
    with running(tmp_path, lambda call: busy) as (service, _):
        batch = finished(begin(service, 2))
        found = read(service.files.content("me", batch.error_id))
    assert (batch.status, batch.num_failed) == ("completed", 2)
    assert found["line-1"]["response"]["status_code"] == 429


def test_a_late_batch_expires_with_what_was_answered(tmp_path: Path) -> None:
    go, is_late = threading.Event(), threading.Event()
    first = list[str]()

    def answer(call: BatchCall) -> BatchReply:
        if not first:
            first.append(call.request_id)
            return _DONE
        is_late.set()
        while call.is_wanted and not go.wait(0.01):
            pass
        return BatchReply(499, {"error": "cancelled"})

    with running(tmp_path, answer, most=1) as (service, _):
        batch = begin(service, 4, hours=1)
        assert is_late.wait(60)
        with service.changed:
            batch.times["created"] -= 3600
            service.changed.notify_all()
        finished(batch)
        said = batch.as_json()
        good = read(service.files.content("me", said["output_file_id"]))
        late = read(service.files.content("me", said["error_file_id"]))
    assert (batch.status, len(good), len(late)) == ("expired", 1, 3)
    assert {line["error"]["code"] for line in late.values()} == {"batch_expired"}


def test_an_expired_batch_is_so_though_its_end_cannot_be_kept_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(batch_runner, "_SHORT_PAUSE_S", 0.01)
    with running(tmp_path, lambda call: BatchReply(503, {})) as (service, runner):
        batch = begin(service, 3, hours=1)
        waited(lambda: batch.status, lambda status: status == "in_progress", 60)
        keep, num_refused = service.keep, list[int]()

        def full(kept: Batch) -> None:
            if len(num_refused) < 2:
                num_refused.append(1)
                raise Unavailable("No space left on device")
            keep(kept)

        monkeypatch.setattr(service, "keep", full)
        with service.changed:
            batch.times["created"] -= 3600
            service.changed.notify_all()
        waited(lambda: len(num_refused), lambda number: number == 2, 60)
        waited(lambda: list(runner._runs), lambda runs: not runs, 60)
    again = BatchService(tmp_path)
    assert again.find("me", batch.id).status == "expired"
    assert again.find("me", batch.id).num_failed == 3
    again.close()


def test_who_asks_waits_until_what_runs_has_ended(tmp_path: Path) -> None:
    running_now, had = list[str](), list[str]()

    def answer(call: BatchCall) -> BatchReply:
        running_now.append(call.request_id)
        is_first = len(had) < 2
        had.append(call.request_id)
        while is_first and call.is_wanted:
            time.sleep(0.005)
        running_now.remove(call.request_id)
        return _DONE if call.is_wanted else BatchReply(499, {})

    with running(tmp_path, answer) as (service, runner):
        batch = begin(service, 5)
        waited(lambda: running_now, lambda now: len(now) == 2, 60)
        with runner.paused():
            for _ in range(20):
                assert not running_now
                time.sleep(0.01)
        finished(batch)
    assert (batch.status, batch.num_completed) == ("completed", 5)
    assert len(had) == 7  # the two that were ended are answered anew


def test_a_stopped_server_leaves_the_rest_to_the_next(tmp_path: Path) -> None:
    num_asked = list[int]()

    def answer(call: BatchCall) -> BatchReply:
        num_asked.append(1)
        while len(num_asked) > 3 and call.is_wanted:
            time.sleep(0.005)
        return _DONE if call.is_wanted else BatchReply(499, {})

    with running(tmp_path, answer) as (service, runner):
        batch = begin(service, 10)
        waited(lambda: len(num_asked), lambda number: number > 3, 60)
        runner.stop()
    assert batch.status == "in_progress"
    with running(tmp_path, lambda call: _DONE) as (service, _):
        again = service.find("me", batch.id)
        finished(again)
        found = read(service.files.content("me", again.output_id))
    assert (again.status, len(found)) == ("completed", 10)


def test_batches_take_turns_though_one_request_runs_at_a_time(tmp_path: Path) -> None:
    asked = list[str]()

    def answer(call: BatchCall) -> BatchReply:
        asked.append(call.owner or "")
        time.sleep(0.005)
        return _DONE

    with running(tmp_path, answer, most=1) as (service, _):
        lines = written([chat_line(f"line-{n}", "x") for n in range(40)])
        batches = []
        with service.changed:  # both are there before either begins
            for owner in ("a", "z"):
                file = service.upload(owner, "a.jsonl", lines)
                order = BatchOrder(file.id, CHAT, 24)
                batches.append(service.create(owner, order))
        for batch in batches:
            finished(batch)
    assert 15 <= asked[:40].count("a") <= 25


@pytest.mark.parametrize(
    "damage",
    [
        {"times": {}},
        {"times": []},
        {"times": {"created": "x"}},
        {"order": ["file-" + "0" * 24, CHAT, "24", None]},
        {"order": ["../../escaped", CHAT, 24, None]},
        {"files": ["../../escaped", "file-" + "0" * 24]},
        {"status": "odd"},
        {"counts": [1, None, 0]},
        {"owner": 7},
    ],
)
def test_a_damaged_batch_keeps_no_other_waiting(
    tmp_path: Path, damage: dict[str, object]
) -> None:
    root = tmp_path / "a" / "b"
    with running(root, lambda call: _DONE) as (service, _):
        batch = finished(begin(service, 1))
    kept = json.loads((root / f"{batch.id}.json").read_text())
    bad = {**kept, "id": "batch_bad", "status": "in_progress", **damage}
    (root / "batch_bad.json").write_text(json.dumps(bad))
    with running(root, lambda call: _DONE) as (service, _):
        assert [one.id for one in service.all("me")] == [batch.id]
        assert finished(begin(service, 2)).num_completed == 2
    assert not list(tmp_path.glob("escaped*"))


def test_a_cancel_does_not_wait_for_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with running(tmp_path, lambda call: _DONE) as (service, _):
        monkeypatch.setattr(batch_lines, "make_durable", full)
        batch = begin(service, 3)
        waited(lambda: batch.status, lambda status: status == "in_progress", 60)
        time.sleep(0.5)
        started = time.monotonic()
        service.cancel("me", batch.id)
        finished(batch)
    assert (batch.status, batch.num_completed) == ("cancelled", 0)
    assert time.monotonic() - started < 10


def test_a_folder_that_was_deleted_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "batches"

    is_lost = threading.Event()

    def answer(call: BatchCall) -> BatchReply:
        is_lost.wait(60)
        return _DONE

    with running(root, answer) as (service, _):
        lost = begin(service, 3)
        waited(lambda: lost.status, lambda status: status == "in_progress", 60)
        shutil.rmtree(root)
        is_lost.set()
        assert service.files.all("me") == []
        assert service.all("me") == []
        assert finished(begin(service, 2)).num_completed == 2
    assert not lost.has_ended


def test_a_damaged_folder_is_no_obstacle(tmp_path: Path) -> None:
    with running(tmp_path, lambda call: _DONE) as (service, _):
        batch = finished(begin(service, 1))
    (tmp_path / "batch_broken.json").write_text('{"id": "batch_broken"')
    input_id = batch.order.input_file_id
    kept = json.loads((tmp_path / f"{input_id}.json").read_text())
    odd = {**kept, "id": "file-" + "0" * 24, "created_at": "x"}
    (tmp_path / f"{odd['id']}.json").write_text(json.dumps(odd))
    (tmp_path / "batch_list.json").write_text("[]")
    (tmp_path / "file-broken.json").write_bytes(b"\xff\x00")
    with running(tmp_path, lambda call: _DONE) as (service, _):
        assert [one.id for one in service.all("me")] == [batch.id]
        assert service.find("me", batch.id).as_json() == batch.as_json()
        assert len(service.files.all("me")) == 2


def test_a_batch_whose_file_was_deleted_by_hand_fails(tmp_path: Path) -> None:
    service = BatchService(tmp_path)
    batch = begin(service, 3)
    service.files.path(batch.order.input_file_id).unlink()
    runner = BatchRunner(service, lambda call: _DONE, lambda *_: False, 2, lambda: 0)
    runner.start()
    finished(batch)
    runner.stop()
    assert batch.status == "failed"
    assert "gone" in batch.errors[0]["message"]
