"""A defect in one row's text ends that row's job, and no other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import BatchKVCache

from sidecar.app import App
from sidecar.core.errors import GenerationFailed, UnsupportedSchema
from sidecar.core.prompt import ModelIds
from sidecar.engine import decode_batches
from sidecar.engine.decode_batch import DecodeBatch
from sidecar.engine.job import Job, JobFailed, Token
from sidecar.engine.scheduler import ChoiceRow
from sidecar.engine.text_engine import TextEngine
from sidecar.kv.prefix_store import PrefixStore
from testkit.jobs import (
    by_hand,
    drain,
    finish,
    leased_engine,
    random_ids,
    run,
    step_until,
    submit,
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


def fails_once(
    kind: type, name: str, patch: pytest.MonkeyPatch, *, is_late: bool = False
) -> list[bool]:
    """
    Have a method raise in its first call from now on; filled by that call.

    Args:
        is_late: whether it does its work before.
    """
    original, calls = getattr(kind, name), list[bool]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(True)
        if len(calls) == 1:
            if is_late:
                original(*args, **kwargs)
            raise RuntimeError("planted failure")
        return original(*args, **kwargs)

    patch.setattr(kind, name, failing)
    return calls


def check_sound(served: App, engine: TextEngine) -> None:
    """Nothing is left of jobs that ended, and a next one is answered."""
    assert eventually(lambda: served.gpu.call(lambda: engine.is_idle))
    assert engine._admission.num_open == 0
    assert engine.store.check_integrity() == []
    nodes = [*engine.store._tree.nodes()]
    assert not any(node.leases or node.borrower for node in nodes)
    assert engine._loop._rows == {}
    assert not engine._loop._decode_batches.has_rows
    assert run(engine, random_ids(9, 50), 4).failure is None


@contextmanager
def stepped(served: App) -> Iterator[tuple[TextEngine, Callable[[int], None]]]:
    """The engine, and what makes its steps; sound when its own go on."""
    with leased_engine(served) as engine:
        with by_hand(served, engine) as make:
            yield engine, make
        check_sound(served, engine)


def sizes(engine: TextEngine) -> list[int]:
    """Of the decode batches."""
    return sorted(len(b.uids) for b in engine._loop._decode_batches._batches)


def num_told(job: Job) -> int:
    """How often it was told that it failed, of what it was told since."""
    return [type(event) for event in drain(job)].count(JobFailed)


def test_a_row_that_cannot_be_read_out_harms_no_other(
    served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has left; what its prompt computed is lost, and nothing else."""
    with leased_engine(served) as engine:
        alone = run(engine, random_ids(2, 90), 200)
        left = submit(engine, random_ids(1, 40), 5000)
        stays = submit(engine, random_ids(2, 90), 200)
        with by_hand(served, engine) as make:
            step_until(make, lambda: sizes(engine) == [2])
            calls = fails_once(DecodeBatch, "extract_cache", monkeypatch)
            engine.release(left)
            step_until(make, lambda: sizes(engine) == [1])
            assert calls
        assert finish(engine, stays).choices[0].ids == alone.choices[0].ids
        check_sound(served, engine)


@pytest.mark.parametrize("name", ["filter", "_to_batch", "next"])
def test_all_rows_of_a_batch_that_an_error_hits_are_told(
    name: str, served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one leaves it, or one joins, or it decodes: nobody waits for ever."""
    with stepped(served) as (engine, make):
        jobs = [submit(engine, random_ids(seed, 40), 5000) for seed in (1, 2)]
        step_until(make, lambda: sizes(engine) == [2])
        if name == "_to_batch":
            engine.release(jobs.pop(0))
            step_until(make, lambda: sizes(engine) == [1])
            jobs.append(submit(engine, random_ids(3, 40), 5000))
        calls = fails_once(DecodeBatch, name, monkeypatch)
        if name == "filter":
            engine.release(jobs.pop(0))
        step_until(make, lambda: bool(calls))
        make(1)
        assert sizes(engine) == []
        assert [num_told(job) for job in jobs] == [1] * len(jobs)
        for job in jobs:
            engine.release(job)


@pytest.mark.parametrize("max_tokens", [60, 5000], ids=["ends", "goes on"])
def test_a_row_that_ends_in_a_step_that_fails_is_told(
    max_tokens: int, served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has left its batch already; all answers of a job are told at once."""
    with stepped(served) as (engine, make):
        jobs = [
            submit(engine, random_ids(1, 40), 50),
            submit(engine, random_ids(2, 40), max_tokens, n=2),
        ]
        step_until(make, lambda: sizes(engine) == [3])
        calls = fails_once(BatchKVCache, "filter", monkeypatch)
        step_until(make, lambda: bool(calls))
        make(1)
        assert [num_told(job) for job in jobs] == [1, 1]
        for job in jobs:
            engine.release(job)


@pytest.mark.parametrize("is_let_go", [True, False])
def test_a_row_of_another_batch_goes_on(
    is_let_go: bool, served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where letting go of a lost row raises: the others are told."""
    original = DecodeBatch.next

    def failing(batch: DecodeBatch) -> Any:
        if len(batch.uids) == 2:
            raise RuntimeError("planted failure")
        return original(batch)

    with stepped(served) as (engine, make):
        lost = [submit(engine, random_ids(seed, 40), 5000) for seed in (2, 3)]
        step_until(make, lambda: sizes(engine) == [2])
        monkeypatch.setattr(decode_batches, "_MAX_PADDING", 0)
        other = submit(engine, random_ids(1, 90), 5000)
        step_until(make, lambda: sizes(engine) == [1, 2])
        with monkeypatch.context() as planted_fault:
            if not is_let_go:
                fails_once(PrefixStore, "abandon", planted_fault, is_late=True)
            planted_fault.setattr(DecodeBatch, "next", failing)
            step_until(make, lambda: sizes(engine) == [1])
        drain(other)
        step_until(make, lambda: any(isinstance(e, Token) for e in drain(other)))
        assert [num_told(job) for job in lost] == [1, 1]
        for job in (other, *lost):
            engine.release(job)


def test_a_lone_row_that_cannot_be_lent_from_is_told(
    served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had to catch up with is half in its caches: nobody decodes on them."""
    with stepped(served) as (engine, make):
        lender = submit(engine, random_ids(1, 60), 5000)
        step_until(make, lambda: sizes(engine) == [1])
        drain(lender)
        calls = fails_once(DecodeBatch, "_catch_up", monkeypatch)
        borrower = submit(engine, random_ids(1, 60), 8)
        step_until(make, lambda: bool(calls))
        make(1)
        assert num_told(lender) == 1
        for job in (lender, borrower):
            engine.release(job)


def test_a_job_one_of_whose_answers_cannot_be_begun_ends_whole(
    served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once, and none of its other answers goes on; another's does."""
    original = decode_batches.DecodeBatches.join
    with stepped(served) as (engine, make):
        alone = submit(engine, random_ids(2, 90), 5000)
        step_until(make, lambda: sizes(engine) == [1])
        batches, joined = engine._loop._decode_batches, list[int]()

        def failing(*args: Any, **kwargs: Any) -> None:
            joined.append(1)
            if len(joined) == 2:
                raise RuntimeError("planted failure")
            original(batches, *args, **kwargs)

        monkeypatch.setattr(batches, "join", failing)
        lost = submit(engine, random_ids(1, 40), 5000, n=3)
        step_until(make, lambda: len(joined) == 2)
        assert num_told(lost) == 1
        assert [row.job for row in engine._loop._rows.values()] == [alone]
        drain(alone)
        step_until(make, lambda: any(isinstance(e, Token) for e in drain(alone)))
        for job in (alone, lost):
            engine.release(job)


def test_what_fails_before_each_step_ends_the_rows(
    served: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no batch's error; without an end it would be tried for ever."""
    with stepped(served) as (engine, make):
        job = submit(engine, random_ids(1, 40), 5000)
        step_until(make, lambda: sizes(engine) == [1])

        def failing(_batches: decode_batches.DecodeBatches) -> list[int]:
            raise RuntimeError("planted failure")

        with monkeypatch.context() as planted_fault:
            planted_fault.setattr(decode_batches.DecodeBatches, "full_windows", failing)
            make(1)
        assert num_told(job) == 1
        engine.release(job)
