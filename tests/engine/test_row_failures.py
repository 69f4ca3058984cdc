"""A defect in one row's text ends that row's job, and no other."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import App
from sidecar.core.errors import GenerationFailed, UnsupportedSchema
from sidecar.core.prompt import ModelIds
from sidecar.engine import decode_batches
from sidecar.engine.scheduler import ChoiceRow
from testkit.jobs import finish, leased_engine, random_ids, run, submit
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
