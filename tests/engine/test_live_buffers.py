"""
Buffers of the device: how many there are, and when those of ended requests go.

The soak, for a GPU as well (a tiny model of its own; nothing is fetched):

    python -m pytest -m slow -n 0 -s tests/engine/test_live_buffers.py
"""

import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from sidecar.app import App
from sidecar.core.errors import InsufficientMemory
from sidecar.core.prompt import ModelIds
from sidecar.engine import process_memory, scheduler
from sidecar.engine.gpu_scheduler import GpuScheduler
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.job import Job, Prefilled, Token
from sidecar.engine.process_memory import (
    ProcessMemory,
    Releasing,
    Running,
    Tidying,
)
from sidecar.engine.text_engine import TextEngine
from sidecar.kv import eviction, kv_layers
from sidecar.kv.eviction import KVBudget, Limits
from sidecar.kv.kv_layers import MUCH_KEPT, Released
from testkit.jobs import finish, leased_engine, random_ids, run, submit, wait_for
from testkit.raw_http import eventually
from testkit.sequences import on_gpu
from testkit.servers import metric, running_sidecar
from testkit.tiny_models import make_model

ModelFolder = Callable[[str], Path]
KINDS = ("dense", "hybrid", "sliding")
MANY = int(os.environ.get("SOAK_REQUESTS", "2100"))


@contextmanager
def serving(folder: Path, **settings: str) -> Iterator[tuple[App, TextEngine]]:
    flags = {"MODEL_PATH": str(folder), "PREFILL_STEP_SIZE": "64", **settings}
    with running_sidecar(flags) as app, leased_engine(app) as engine:
        yield app, engine


@contextmanager
def turn_by_turn(app: App, engine: TextEngine) -> Iterator[Callable[[], None]]:
    """Turns of the engine and of what lets go, made one at a time."""
    turns, workers = GpuScheduler(), (engine._loop, app.core.releasing)
    for worker in workers:
        app.gpu.remove_worker(worker)
        turns.add(worker)
    try:
        yield lambda: app.gpu.call(turns.take)
    finally:
        for worker in workers:
            app.gpu.add_worker(worker)


# ---- when arrays go


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def delayed(
    request: pytest.FixtureRequest, model_folder: ModelFolder
) -> Iterator[tuple[App, TextEngine]]:
    """As on a Mac: what ended is held for eight steps."""
    with serving(model_folder(request.param), RELEASE_DELAY_STEPS="8") as served:
        yield served


def test_arrays_of_an_ended_request_go_some_steps_later(
    delayed: tuple[App, TextEngine],
) -> None:
    """Beside a stream that goes on: not in the step of the end, and not for ever."""
    app, engine = delayed
    released = app.shared.stored.released
    with turn_by_turn(app, engine) as turn:
        stream, short = (
            submit(engine, random_ids(i, 90), n) for i, n in ((1, 80), (2, 6))
        )
        while len(engine._loop._rows) < 2:
            turn()
        while len(engine._loop._rows) > 1:
            turn()
        assert released.arrays, "all went in the step of the end"
        num_turns = 0
        while released.arrays:
            turn()
            num_turns += 1
        assert 8 <= num_turns < 40
    assert finish(engine, short).failure is None
    assert finish(engine, stream).failure is None


def test_an_idle_server_holds_nothing(delayed: tuple[App, TextEngine]) -> None:
    """Neither after an end nor after a cancel."""
    app, engine = delayed
    for seed in range(3):
        job = submit(engine, random_ids(10 + seed, 200), 40, n=2)
        wait_for(job, Token, 3)
        engine.release(job)
        assert run(engine, random_ids(20 + seed, 100), 4, n=2).failure is None
    assert eventually(lambda: not app.shared.stored.released)
    assert app.gpu.call(lambda: app.shared.stored.released.arrays) == []


@pytest.mark.parametrize("how", ["clear", "pressure", "unload"])
def test_who_needs_the_memory_has_it_at_once(
    how: str, model_folder: ModelFolder
) -> None:
    """A forgetting, pressure and an unload wait for the GPU and for no step."""
    with serving(model_folder("dense"), RELEASE_DELAY_STEPS="1000") as (app, engine):
        released = app.shared.stored.released
        app.gpu.remove_worker(app.core.releasing)  # nor does it go by itself
        try:
            assert run(engine, random_ids(1, 300), 4, n=2).failure is None
            assert app.gpu.call(lambda: released.arrays)
            if how == "clear":
                engine.clear()
            elif how == "pressure":
                app.gpu.call(lambda: engine.guard.process.relieve(1 << 50))
            else:
                engine.close()
            assert app.gpu.call(lambda: released.arrays) == []
        finally:
            app.gpu.add_worker(app.core.releasing)


def test_what_is_held_counts_as_free(model_folder: ModelFolder) -> None:
    """It goes in a moment: nobody is refused for the sake of it."""
    with serving(model_folder("dense"), RELEASE_DELAY_STEPS="1000") as (app, engine):
        process = app.shared.process
        app.gpu.remove_worker(app.core.releasing)
        try:
            app.gpu.call(process.sample)
            before = process.free_bytes
            assert run(engine, random_ids(1, 2000), 4, n=2).failure is None
            app.gpu.call(process.sample)
            assert abs(process.free_bytes - before) < 1 << 17
        finally:
            app.gpu.add_worker(app.core.releasing)


def test_nothing_is_held_where_the_delay_is_off() -> None:
    """The default but on Metal."""
    released = Released(0)
    released.hold([mx.array([1.0])])
    assert not released


def test_a_failing_device_does_not_end_the_gpu_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A synchronisation that times out is told (omlx issue 3706), once a second."""
    now = [100.0]
    monkeypatch.setattr(process_memory.time, "monotonic", lambda: now[0])
    released = Released(4)
    released.hold([mx.array([1.0])])

    def fails() -> None:
        raise RuntimeError("timed out")

    monkeypatch.setattr(mx, "synchronize", fails)
    asked_again = list[float]()
    releasing = Releasing(released, asked_again.append)
    assert releasing.has_work()
    assert releasing.interrupt(beside_streams=False) is False
    assert not releasing.has_work()
    assert asked_again == [1.0]
    now[0] += 1.1
    assert releasing.has_work()


# ---- the allocator's cache


def test_a_long_prompt_leaves_the_allocators_cache_alone(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many chunks it has; and what is given back waits for the GPU."""
    calls: list[str] = []
    for name in ("synchronize", "clear_cache"):
        own: Any = getattr(mx, name)
        monkeypatch.setattr(
            mx, name, lambda name=name, own=own: (calls.append(name), own())
        )
    with serving(model_folder("dense")) as (app, engine):
        calls.clear()
        assert run(engine, random_ids(1, 1500), 8).failure is None
        assert eventually(lambda: not app.shared.stored.released)
        assert "clear_cache" not in calls
        engine.clear()
        assert calls[-2:] == ["synchronize", "clear_cache"]


@pytest.mark.parametrize("is_patient", [False, True])
def test_streams_do_not_wait_for_memory_that_nobody_wants(
    is_patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card's own is given back when nobody has work; RAM some steps on."""
    cleared = list[int]()
    monkeypatch.setattr(mx, "get_cache_memory", lambda: MUCH_KEPT + 1)
    monkeypatch.setattr(kv_layers, "release_freed_memory", lambda: cleared.append(1))
    released = Released(is_patient=is_patient)
    stored = Held()
    stored.released = released
    releasing, tidying = Releasing(released), Tidying(ProcessMemory(1 << 30, stored))
    tidying.interrupt(beside_streams=False)
    released.clear_later()
    # With work for other turns, readers have each token before the next step begins.
    assert releasing.has_work() is not is_patient
    for _ in range(100):
        releasing.interrupt(beside_streams=True)
    assert len(cleared) == (0 if is_patient else 1)
    assert (releasing.has_work(), tidying.has_work()) == (False, is_patient)
    tidying.interrupt(beside_streams=False)
    assert len(cleared) == 1
    assert not tidying.has_work()


# ---- how many there are


def test_what_nobody_reads_of_a_cache_does_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in mlx-lm issue 1845: a lazy subtraction a layer and step, never computed."""
    monkeypatch.setattr(scheduler, "_STEPS_BETWEEN_CLEARS", 16)
    folder = make_model(tmp_path / "model", "hybrid", layers=8)
    with serving(folder) as (app, engine), turn_by_turn(app, engine) as turn:
        jobs = [submit(engine, random_ids(i, 60), 400) for i in (1, 2)]
        while len(engine._loop._rows) < 2:
            turn()

        def pad() -> None:
            [batch] = engine._loop._decode_batches._batches
            for layer in batch.prompt_cache:
                if isinstance(layer, ArraysCache):
                    layer.left_padding = mx.array([0, 0])

        app.gpu.call(pad)
        marks = []
        for _ in range(6):
            while engine._loop._num_steps % 16:
                turn()
            marks.append(app.gpu.call(mx.get_active_memory))
            turn()
        for job in jobs:
            engine.release(job)
    assert len(set(marks[1:])) == 1, marks


def numbers(app: App) -> tuple[int, int, int]:
    """Counted buffers, arrays that Python knows, bytes in use; nothing runs."""

    def read() -> tuple[int, int, int]:
        app.shared.process.count_buffers()
        gc.collect()
        known = sum(type(thing) is mx.array for thing in gc.get_objects())
        return app.shared.process.live_buffers, known, mx.get_active_memory()

    return app.gpu.call(read)


class Churn:
    """Prompts that come, go on, go, are left and are pushed out; six at a time."""

    def __init__(self, engine: TextEngine, seed: int) -> None:
        self._engine = engine
        self._chance = random.Random(seed)
        self._talks = [random_ids(seed + i, 150) for i in range(4)]
        self._open: list[tuple[Job, bool]] = []
        self.num_done = 0

    def run(self, count: int) -> None:
        """So many requests, to their end."""
        for _ in range(count):
            if len(self._open) >= 6:
                self._end(self._open.pop(0))
            self._begin()
        while self._open:
            self._end(self._open.pop(0))
        self.num_done += count

    def _begin(self) -> None:
        chance = self._chance
        ids = random_ids(chance.randrange(1 << 30), chance.randrange(20, 260))
        if chance.random() < 0.5:  # a talk goes on, or parts from itself
            place = chance.randrange(len(self._talks))
            old = self._talks[place]
            ids = ModelIds(old[: chance.choice([len(old), len(old) // 2])] + ids[:40])
            self._talks[place] = ModelIds(ids if len(ids) < 600 else ids[:150])
        num_choices = 2 if chance.random() < 0.1 else 1
        is_left = chance.random() < 0.25
        job = submit(self._engine, ids, chance.randrange(1, 12), n=num_choices)
        self._open.append((job, is_left))

    def _end(self, begun: tuple[Job, bool]) -> None:
        job, is_left = begun
        if is_left:
            wait_for(job, Prefilled)
            self._engine.release(job)
        else:
            assert finish(self._engine, job).failure is None


def soak(app: App, engine: TextEngine, count: int) -> list[tuple[int, int, int]]:
    """A tenth at a time; the numbers after each, with the same talks stored."""
    churn, marks = Churn(engine, 5), []
    for part in range(10):
        churn.run(count // 10)
        assert eventually(lambda: engine._admission.num_open == 0)
        assert eventually(lambda: app.gpu.call(lambda: engine.is_idle))
        assert eventually(lambda: not app.shared.stored.released)
        full = numbers(app)
        engine.clear()
        marks.append(numbers(app))
        print(f"part {part + 1} of 10: {churn.num_done} requests, full {full}, "
              f"empty {marks[-1]} (buffers, arrays, bytes)", flush=True)  # fmt: skip
    return marks


def check_flat(marks: list[tuple[int, int, int]]) -> None:
    """With nothing stored there is what there was after the first tenth."""
    for first, last in zip(marks[0], marks[-1], strict=True):
        assert last <= first * 1.02 + 16


CHURN = {"RELEASE_DELAY_STEPS": "8", "PROMPT_CACHE_MAX_BYTES": "300KB"}


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_stay_flat(kind: str, model_folder: ModelFolder) -> None:
    """Over some requests of every kind, with evictions and cancels."""
    with serving(model_folder(kind), **CHURN) as (app, engine):
        check_flat(soak(app, engine, 150))
        assert engine.store.counters["evicted_tokens"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_buffers_stay_flat_for_long(kind: str, model_folder: ModelFolder) -> None:
    """Over more than two thousand."""
    with serving(model_folder(kind), **CHURN) as (app, engine):
        check_flat(soak(app, engine, MANY))
        assert engine.store.counters["evicted_tokens"] > 0


# ---- the bound


def test_buffers_are_what_the_arrays_are(model_folder: ModelFolder) -> None:
    """Weights, two a layer of each run, and what running requests hold."""
    with serving(model_folder("dense")) as (app, engine):
        empty, _, _ = numbers(app)
        assert run(engine, random_ids(1, 100), 2).failure is None
        one, _, _ = numbers(app)
        assert one == empty + 4  # two layers, keys and values
        job = submit(engine, random_ids(2, 100), 10_000)
        wait_for(job, Token)
        running, _, _ = numbers(app)
        assert running >= one + 4
        assert metric(app, "mlx_live_buffers ") >= one + 4
        engine.release(job)


def test_a_request_that_needs_more_buffers_than_are_left_is_refused(
    model_folder: ModelFolder,
) -> None:
    """Whatever is free by bytes; and what is stored makes room."""
    with serving(model_folder("dense")) as (app, engine):
        for seed in range(8):
            assert run(engine, random_ids(seed, 100), 2).failure is None
        process = app.shared.process
        app.gpu.call(process.count_buffers)
        fixed = process.live_buffers - len(app.shared.stored.arrays())
        process.limit_buffers = int((fixed + 6) / 0.9) + 1
        app.gpu.call(process.count_buffers)
        with pytest.raises(InsufficientMemory, match="needs 8 buffers .* and 6 of"):
            submit(engine, random_ids(20, 100), 2, n=2)
        assert run(engine, random_ids(20, 100), 2).failure is None
        assert len(app.shared.stored.arrays()) < 8 * 4


def test_eviction_makes_room_by_number(model_folder: ModelFolder) -> None:
    """As it does by bytes: the least worthy first."""
    with serving(model_folder("hybrid")) as (app, engine):
        for seed in range(6):
            assert run(engine, random_ids(seed, 100), 2).failure is None
        stored = app.shared.stored
        before = len(stored.arrays())
        app.gpu.call(lambda: stored.evict_buffers(before // 2))
        assert before // 4 <= len(stored.arrays()) <= before - before // 2
        assert engine.store.check_integrity() == []
        assert run(engine, random_ids(5, 100), 2).cached > 0, "the newest stayed"


class Held:
    """What could be evicted, as the process's memory sees it."""

    def __init__(self) -> None:
        self.num_bytes, self.released = 1000, Released()
        self.held = [mx.zeros(1), mx.zeros(2)]

    def arrays(self) -> list[mx.array]:
        return self.held

    def evict_bytes(self, num_bytes: int) -> None:
        raise AssertionError(num_bytes)

    def evict_buffers(self, num_buffers: int) -> None:
        raise AssertionError(num_buffers)


@on_gpu
def test_buffers_are_counted_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an idle moment; every ten seconds while streams decode; before a refusal."""
    now, rows, stored = [100.0], list[mx.array](), Held()
    monkeypatch.setattr(process_memory.time, "monotonic", lambda: now[0])
    process = ProcessMemory(1 << 30, stored)
    tidying = Tidying(process)
    process.watch(Running(5, lambda: rows))

    def idle() -> int:
        while tidying.has_work():
            tidying.interrupt(beside_streams=False)
        return process.live_buffers

    def decoding(for_s: float) -> int:
        now[0] += for_s
        process.count_in_time()
        return process.live_buffers

    def asked() -> int:
        process.relieve(10)
        return process.live_buffers

    assert idle() == 7
    stored.held.append(mx.zeros(3))
    now[0] += 60.0
    assert idle() == 7, "nothing was begun or ended"
    process.sample()
    assert process.live_buffers == 7
    assert idle() == 8
    stored.held.append(mx.zeros(3))
    process.sample()
    assert idle() == 8, "less than a second ago it was counted"
    now[0] += 30.0
    assert asked() == 8, "whoever asks does not wait for it"
    assert idle() == 9
    rows.append(mx.zeros(4))
    assert decoding(60.0) == 9, "nothing has begun or ended: nobody waits for a walk"
    process.sample()
    assert decoding(9.9) == 9
    assert decoding(1.1) == 10
    rows.append(mx.zeros(4))
    process.count_anew(gpu_thread())  # before anything is refused
    assert process.live_buffers == 11


@on_gpu
def test_a_count_that_fails_is_not_tried_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again when something has begun or ended."""
    now, stored = [100.0], Held()
    monkeypatch.setattr(process_memory.time, "monotonic", lambda: now[0])
    process = ProcessMemory(1 << 30, stored)
    tidying = Tidying(process)
    monkeypatch.setattr(stored, "arrays", lambda: [][0])
    assert tidying.has_work()
    assert tidying.interrupt(beside_streams=False)
    assert not tidying.has_work()
    assert "could not be tidied" in caplog.text
    now[0] += 1.1
    assert not tidying.has_work()
    process.sample()
    assert tidying.has_work()


@on_gpu
def test_memory_that_cannot_be_given_back_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind the next prompt it is."""
    stored = Held()
    stored.released = Released(4, is_patient=True)
    stored.released.hold([mx.array([1.0])])
    tidying = Tidying(ProcessMemory(1 << 30, stored))

    def fails() -> None:
        raise RuntimeError("timed out")

    monkeypatch.setattr(mx, "get_cache_memory", lambda: MUCH_KEPT + 1)
    monkeypatch.setattr(mx, "synchronize", fails)
    stored.released.clear_later()
    assert tidying.interrupt(beside_streams=False)
    assert not tidying.has_work()
    stored.released.clear_later()
    assert tidying.has_work()


def test_a_server_tidies_when_it_has_nothing_to_do(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a stream decodes; what a card keeps waits for it as well."""
    monkeypatch.setattr("sidecar.app.has_memory_of_its_own", lambda: True)
    with serving(model_folder("dense")) as (app, engine):
        process, released = app.shared.process, app.shared.stored.released
        job = submit(engine, random_ids(1, 100), 5000)
        wait_for(job, Token)
        assert released.waits_for_idle
        for _ in range(50):
            wait_for(job, Token)
        assert released.waits_for_idle
        engine.release(job)
        assert eventually(lambda: not process.is_untidy)


def test_an_idle_server_counts_what_changed_last(model_folder: ModelFolder) -> None:
    """Also what ended less than a second after the count before; nobody asks it to."""
    with serving(model_folder("dense")) as (app, engine):
        process = app.shared.process
        for seed in range(3):
            assert run(engine, random_ids(seed, 100), 2).failure is None
        assert eventually(lambda: process._changed_at is None)
        counted = process.live_buffers
        app.gpu.call(process.count_buffers)
        assert counted == process.live_buffers


def test_what_could_not_be_let_go_is_let_go_by_an_idle_server(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second later, though nobody asks for anything meanwhile."""
    original, failed = Released.let_go, threading.Event()

    def fails_once(released: Released) -> None:
        if released and not failed.is_set():
            failed.set()
            raise RuntimeError("timed out")
        original(released)

    with serving(model_folder("dense"), RELEASE_DELAY_STEPS="1000") as (app, engine):
        monkeypatch.setattr(Released, "let_go", fails_once)
        assert run(engine, random_ids(1, 100), 2).failure is None
        assert failed.wait(60)
        assert eventually(lambda: not app.shared.stored.released)


@on_gpu
def test_one_timer_has_an_idle_server_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """None where it is counted at once, as near the bound, or is about to be."""
    now, asked, stored = [100.0], list[float](), Held()
    monkeypatch.setattr(process_memory.time, "monotonic", lambda: now[0])
    process = ProcessMemory(1 << 30, stored, limit_buffers=100)
    process.wake_in = asked.append
    process.tidy()
    for _ in range(3):
        process.sample()
    assert asked == [1.0]
    process.tidy()
    now[0] += 5.0
    process.sample()
    assert process.is_untidy
    assert asked == [1.0]
    stored.held.extend(mx.zeros(3) for _ in range(90))
    process.tidy()
    for _ in range(3):
        process.sample()
    assert asked == [1.0]


def test_buffers_are_counted_beside_streams(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count that fails ends no stream."""
    monkeypatch.setattr(process_memory, "_COUNT_BUSY_EVERY_S", 0.0)
    with serving(model_folder("dense")) as (app, engine):
        process, counted = app.shared.process, threading.Event()

        def fails() -> None:
            counted.set()
            raise RuntimeError("no walk")

        job = submit(engine, random_ids(1, 100), 5000)
        wait_for(job, Token)
        monkeypatch.setattr(process, "count_buffers", fails)
        app.gpu.call(process.sample)
        assert counted.wait(60)
        for _ in range(5):
            wait_for(job, Token)
        engine.release(job)


@on_gpu
def test_near_the_bound_they_are_always_counted() -> None:
    """Whatever begins or ends."""
    stored = Held()
    process = ProcessMemory(1 << 30, stored, limit_buffers=2)
    process.count_buffers()
    stored.held.append(mx.zeros(3))
    process.sample()
    assert process.live_buffers == 3


def test_a_device_without_a_bound_has_none() -> None:
    """Any number fits."""
    process = ProcessMemory(1 << 30, KVBudget(Limits(1 << 20)))
    assert (process.limit_buffers, process.free_buffers) == (None, float("inf"))
    assert eviction.stored_arrays([]) == []
