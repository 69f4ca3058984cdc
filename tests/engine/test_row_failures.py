"""A defect in one row's text ends that row's job, and no other."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import App
from sidecar.core.errors import GenerationFailed
from sidecar.engine import decode_batch
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
        monkeypatch.setattr(decode_batch, "_MAX_PADDING", 0)
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
