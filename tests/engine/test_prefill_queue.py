"""Which prompt is computed next: first come first served, but a short rest may pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest

from sidecar.app import App
from sidecar.core.prompt import ModelIds
from sidecar.engine.job import Job, JobEvent, Prefilled, Token
from sidecar.engine.prefill_queue import PrefillQueue
from sidecar.engine.text_engine import TextEngine
from testkit.jobs import (
    by_hand,
    drain,
    finish,
    is_idle,
    leased_engine,
    next_event,
    random_ids,
    run,
    submit,
)
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]

_STEP = 64
_LONG = 40 * _STEP


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def served(request: pytest.FixtureRequest, model_folder: ModelFolder) -> Iterator[App]:
    settings = {
        "MODEL_PATH": str(model_folder(request.param)),
        "PREFILL_STEP_SIZE": str(_STEP),
        "CACHE_SELFTEST": "off",
    }
    with running_sidecar(settings) as app:
        yield app


@pytest.fixture
def engine(served: App) -> Iterator[TextEngine]:
    with leased_engine(served) as engine:
        engine.clear()
        yield engine


@contextmanager
def begun_long(app: App, engine: TextEngine, seed: int) -> Iterator[Job]:
    """A long cold prompt of which two chunks are computed; it goes on at the end."""
    with by_hand(app, engine) as make:
        job = submit(engine, random_ids(seed, _LONG), 4)
        make(2)
        yield job


def has_begun(job: Job) -> bool:
    """Whether its first token is out."""
    return any(isinstance(event, Token) for event in drain(job))


def test_a_warm_prompt_passes_a_long_cold_one(served: App, engine: TextEngine) -> None:
    """It is answered while the long one is computed; both say what they say alone."""
    warm = random_ids(1, 30 * _STEP)
    run(engine, warm, 1)
    longer = ModelIds((*warm, *random_ids(2, 20)))
    expected = run(engine, longer, 4).choices
    alone = run(engine, random_ids(3, _LONG), 4).choices
    engine.clear()
    run(engine, warm, 1)
    with by_hand(served, engine) as make:
        long = submit(engine, random_ids(3, _LONG), 4)
        make(2)
        short = submit(engine, longer, 4)
        said: list[JobEvent] = []
        while not any(map(_is_end, said)):
            make(1)
            said += drain(short)
        passed = finish(engine, short, said)
    assert not has_begun(long)
    assert passed.cached >= len(warm) - 1
    assert passed.choices == expected
    assert finish(engine, long).failure is None
    assert run(engine, random_ids(3, _LONG), 4).choices == alone
    assert engine.store.check_integrity() == []


def test_a_second_long_prompt_waits_for_the_first(
    served: App, engine: TextEngine
) -> None:
    """First come, first served."""
    with begun_long(served, engine, 4) as first:
        second = submit(engine, random_ids(5, _LONG), 1)
    assert isinstance(next_event(second), Prefilled)
    assert has_begun(first)
    for job in (first, second):
        engine.release(job)


def test_a_request_of_many_answers_waits_for_its_places_and_keeps_none_waiting(
    served: App, engine: TextEngine
) -> None:
    """It needs all of them while one is taken; who needs one has it."""
    with by_hand(served, engine) as make:
        first = submit(engine, random_ids(20, 8), 400)
        make(4)
        many = submit(engine, random_ids(21, 8), 2, n=engine._loop._max_rows)
        later = submit(engine, random_ids(22, 8), 2)
        make(8)
        said = drain(later)
        assert any(isinstance(event, Token) for event in said)
        assert not has_begun(many)
        first.cancel()
        finish(engine, later, said)
    assert finish(engine, many).failure is None
    engine.release(first)


def test_short_prompts_pass_for_as_long_as_a_chunk_takes(
    served: App, engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chunks that take a second those that take 0.4 s pass for as many seconds."""
    queue = engine._loop.prefills
    turns: list[str] = []

    def took(_seconds: float) -> None:
        is_short = queue._passed is not None
        turns.append("short" if is_short else "long")
        PrefillQueue.took(queue, 0.4 if is_short else 1.0)

    monkeypatch.setattr(queue, "took", took)
    with by_hand(served, engine) as make:
        long = submit(engine, random_ids(6, _LONG), 4)
        make(2)
        short = [submit(engine, random_ids(10 + i, 8), 1) for i in range(30)]
        while not has_begun(long):
            make(1)
    runs = [len(list(group)) for kind, group in groupby(turns) if kind == "short"]
    assert runs[:4] == [3, 2, 3, 2]
    assert sum(runs) == 30
    for job in (long, *short):
        assert finish(engine, job).failure is None
    assert is_idle(engine)


@contextmanager
def slow_sidecar(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[App, TextEngine]]:
    """One whose chunks are short, as on a slow machine, and not by its settings."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "off"}
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        pacer = engine._loop.pacer
        monkeypatch.setattr(pacer, "chunk_len", lambda *, beside_streams: _STEP)
        yield app, engine


def test_a_slow_prompt_of_less_than_the_longest_chunk_is_passed(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine it takes many chunks, and a minute."""
    with slow_sidecar(model_folder, monkeypatch) as (app, engine):
        with by_hand(app, engine) as make:
            long = submit(engine, random_ids(60, 20 * _STEP), 2)
            make(2)
            short = submit(engine, random_ids(61, 8), 2)
            make(4)
            said = drain(short)
            assert any(isinstance(event, Token) for event in said)
            assert not has_begun(long)
        assert finish(engine, short, said).failure is None
        assert finish(engine, long).failure is None


def test_what_passes_for_too_long_is_made_up_for(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes many chunks: the long one keeps half of the time in all."""
    turns: list[str] = []
    with slow_sidecar(model_folder, monkeypatch) as (app, engine):
        queue = engine._loop.prefills

        def took(_seconds: float) -> None:
            turns.append("short" if queue._passed is not None else "long")
            PrefillQueue.took(queue, 1.0)

        monkeypatch.setattr(queue, "took", took)
        with by_hand(app, engine) as make:
            long = submit(engine, random_ids(62, 24 * _STEP), 2)
            make(2)
            short = [submit(engine, random_ids(n, 2 * _STEP), 1) for n in range(70, 86)]
            while not has_begun(long):
                make(1)
        for job in short:
            assert finish(engine, job).failure is None
        engine.release(long)
    assert 8 <= turns[:24].count("short") <= 12


def test_a_prompt_with_a_chunk_left_is_not_passed(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It will be done before another could begin."""
    with slow_sidecar(model_folder, monkeypatch) as (app, engine):
        with by_hand(app, engine) as make:
            long = submit(engine, random_ids(75, 2 * _STEP), 2)
            make(1)
            current = engine._loop.prefills.current
            assert current is not None
            assert 0 < current.target - current.done <= _STEP
            short = submit(engine, random_ids(76, 8), 2)
            make(1)
            said = drain(long)
            assert any(isinstance(event, Token) for event in said)
            assert not has_begun(short)
        assert finish(engine, long, said).failure is None
        engine.release(short)


def test_the_passed_one_can_be_cancelled(served: App, engine: TextEngine) -> None:
    """While another is in its place; what it computed is kept."""
    with by_hand(served, engine) as make:
        long = submit(engine, random_ids(7, _LONG), 4)
        make(2)
        short = [submit(engine, random_ids(80 + i, 8), 3) for i in range(6)]
        while engine._loop.prefills._passed is None:
            make(1)
        engine.release(long)
    for job in short:
        assert finish(engine, job).failure is None
    again = run(engine, random_ids(7, _LONG), 1)
    assert again.cached >= 2 * _STEP
    assert is_idle(engine)


def _is_end(event: object) -> bool:
    return type(event).__name__ == "ChoiceEnded"


def test_what_asks_for_more_places_than_are_left_waits(
    served: App, engine: TextEngine
) -> None:
    """The passed prompt's own place is not given away."""
    with begun_long(served, engine, 8) as long:
        short = submit(engine, random_ids(90, 8), 2, n=8, temperature=1.0)
    assert isinstance(next_event(short), Prefilled)
    assert has_begun(long)
    engine.release(long)
    assert finish(engine, short).failure is None
