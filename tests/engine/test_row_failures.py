"""A defect in one row's text ends that row's job, and no other."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import App
from sidecar.core.errors import GenerationFailed, UnsupportedSchema
from sidecar.core.prompt import ModelIds
from sidecar.engine import decode_batches
from sidecar.engine.decode_batch import DecodeBatch
from sidecar.engine.job import JobFailed, Token
from sidecar.engine.scheduler import ChoiceRow
from sidecar.engine.text_engine import TextEngine
from testkit.jobs import (
    by_hand,
    drain,
    finish,
    leased_engine,
    random_ids,
    run,
    submit,
    wait_for,
)
from testkit.raw_http import eventually
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="module")
def served(model_folder: ModelFolder) -> Iterator[App]:
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "off"}
    with running_sidecar(settings) as app:
        yield app


@pytest.mark.parametrize("where", ["take", "end"])
@pytest.mark.parametrize("apart", [False, True], ids=["one batch", "two batches"])
def test_only_the_job_whose_row_failed_fails(
    where: str, apart: bool, served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever batch it is in, and in the middle of it or at its end."""
    if apart:
        monkeypatch.setattr(decode_batches, "_MAX_PADDING", 0)
    bad, good = random_ids(1, 40), random_ids(2, 90)
    original: Callable[..., None] = getattr(ChoiceRow, where)

    def failing(row: ChoiceRow, *args: Any, **kwargs: Any) -> None:
        if row.job.spec.model_ids is bad and (where == "end" or len(row.sampled) == 3):
            raise RuntimeError("planted failure")
        original(row, *args, **kwargs)

    with leased_engine(served) as engine:
        alone = run(engine, good, 24)
        monkeypatch.setattr(ChoiceRow, where, failing)
        jobs = [submit(engine, ids, 24) for ids in (bad, good)]
        lost, kept = (finish(engine, job) for job in jobs)
        assert isinstance(lost.failure, GenerationFailed)
        assert kept.failure is None
        assert kept.choices == alone.choices
        assert engine.store.check_integrity() == []
        monkeypatch.undo()
        again = run(engine, bad, 4)
        assert again.failure is None


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("at", [3, 24], ids=["in the middle", "at its last token"])
def test_what_a_refused_answer_was_lent_is_kept(
    kind: str, at: int, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form was at fault: the KV of its prompt is sound, and another's too."""
    original = ChoiceRow.take
    shared, more = random_ids(1, 200), random_ids(2, 40)
    bad = ModelIds((*shared, *more))

    def failing(row: ChoiceRow, *args: Any) -> None:
        if row.job.spec.model_ids == bad and len(row.sampled) == at - 1:
            raise UnsupportedSchema("planted")
        original(row, *args)

    settings = {"MODEL_PATH": str(model_folder(kind)), "CACHE_SELFTEST": "off"}
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        run(engine, shared, 4)
        monkeypatch.setattr(ChoiceRow, "take", failing)
        lost = run(engine, bad, 24)
        assert isinstance(lost.failure, UnsupportedSchema)
        assert engine.store.check_integrity() == []
        monkeypatch.undo()
        assert run(engine, bad, 4).cached == len(bad) - 1
        assert run(engine, shared, 4).cached == len(shared) - 1


def test_a_prompt_that_cannot_be_begun_is_told_so(
    served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for its deadline; those beside it and after it are not touched."""
    bad, good = random_ids(1, 40), random_ids(2, 90)
    with leased_engine(served) as engine:
        alone = run(engine, good, 24)
        original = engine.store.restore

        def failing(ids: Any, *more: Any) -> Any:
            if ids is bad:
                raise RuntimeError("planted failure")
            return original(ids, *more)

        monkeypatch.setattr(engine.store, "restore", failing)
        jobs = [submit(engine, ids, 24) for ids in (good, bad)]
        kept, lost = (finish(engine, job) for job in jobs)
        assert isinstance(lost.failure, GenerationFailed)
        assert kept.choices == alone.choices
        monkeypatch.undo()
        assert run(engine, bad, 4).failure is None


def fails_once(kind: type, name: str, patch: pytest.MonkeyPatch) -> list[bool]:
    """Have a method raise in its first call from now on; filled by that call."""
    original, calls = getattr(kind, name), list[bool]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        if len(calls) == 1:
            raise RuntimeError("planted failure")
        return original(*args, **kwargs)

    patch.setattr(kind, name, failing)
    return calls


def check_sound(served: App, engine: TextEngine) -> None:
    """Nothing is left of jobs that ended, and a next one is answered."""
    assert eventually(lambda: served.gpu.call(lambda: engine.is_idle))
    assert engine.store.check_integrity() == []
    assert engine._loop._rows == {}
    assert not engine._loop._decode_batches.has_rows
    assert run(engine, random_ids(9, 50), 4).failure is None


def test_a_row_that_cannot_be_read_out_harms_no_other(
    served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has left; what its prompt computed is lost, and nothing else."""
    with leased_engine(served) as engine:
        alone = run(engine, random_ids(2, 90), 60)
        left = submit(engine, random_ids(1, 40), 5000)
        stays = submit(engine, random_ids(2, 90), 60)
        with by_hand(served, engine) as make:
            make(12)
            wait_for(left, Token)
            calls = fails_once(DecodeBatch, "extract_cache", monkeypatch)
            engine.release(left)
            make(2)
            assert calls
        assert finish(engine, stays).choices[0].ids == alone.choices[0].ids
        check_sound(served, engine)


@pytest.mark.parametrize("name", ["filter", "_to_batch", "next"])
def test_all_rows_of_a_batch_that_an_error_hits_are_told(
    name: str, served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one leaves it, or one joins, or it decodes: nobody waits for ever."""
    with leased_engine(served) as engine, by_hand(served, engine) as make:
        jobs = [submit(engine, random_ids(seed, 40), 5000) for seed in (1, 2)]
        make(12)
        calls = fails_once(DecodeBatch, name, monkeypatch)
        engine.release(jobs.pop(0))
        if name == "_to_batch":
            make(4)  # one is alone now
            jobs.append(submit(engine, random_ids(3, 40), 5000))
        make(6)
        assert calls
        for job in jobs:
            events = drain(job)
            assert isinstance(events[-1], JobFailed)
            assert sum(isinstance(event, JobFailed) for event in events) == 1
            engine.release(job)
    with leased_engine(served) as engine:
        check_sound(served, engine)


def test_a_job_one_of_whose_answers_cannot_be_begun_ends_whole(
    served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once, and none of its other answers goes on; another's does."""
    original = decode_batches.DecodeBatches.join
    with leased_engine(served) as engine, by_hand(served, engine) as make:
        alone = submit(engine, random_ids(2, 90), 5000)
        make(6)
        batches = engine._loop._decode_batches
        joined = list[int]()

        def failing(*args: Any, **kwargs: Any) -> None:
            joined.append(1)
            if len(joined) == 2:
                raise RuntimeError("planted failure")
            original(batches, *args, **kwargs)

        monkeypatch.setattr(batches, "join", failing)
        lost = submit(engine, random_ids(1, 40), 5000, n=3)
        make(8)
        assert len(joined) == 2
        failures = [e for e in drain(lost) if isinstance(e, JobFailed)]
        assert len(failures) == 1
        assert [row.job for row in engine._loop._rows.values()] == [alone]
        drain(alone)
        make(2)
        assert drain(alone)
        for job in (alone, lost):
            engine.release(job)
        make(2)
    with leased_engine(served) as engine:
        check_sound(served, engine)
