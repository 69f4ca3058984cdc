"""Length classes instead of padding: a short row beside a long one costs neither."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.app import App
from sidecar.core.prompt import ModelIds
from sidecar.engine.job import Job
from sidecar.engine.text_engine import TextEngine
from testkit.jobs import (
    by_hand,
    finish,
    leased_engine,
    random_ids,
    run,
    submit,
)
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]
LONG, SHORT = 8000, 100


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def served(request: pytest.FixtureRequest, model_folder: ModelFolder) -> Iterator[App]:
    with running_sidecar({"MODEL_PATH": str(model_folder(request.param))}) as app:
        yield app


def kv_bytes(app: App, engine: TextEngine) -> list[int]:
    """Bytes of each batch's caches, room and padding included, smallest first."""

    def count() -> list[int]:
        batches = engine._loop._decode_batches._batches
        return sorted(
            sum(layer.nbytes for layer in batch.prompt_cache) for batch in batches
        )

    return app.gpu.call(count)


def decoding(engine: TextEngine, make: Callable[[int], None], ids: ModelIds) -> Job:
    """A job that has just begun to decode."""
    num_rows = len(engine._loop._rows)
    job = submit(engine, ids, 400)
    while len(engine._loop._rows) == num_rows:
        make(1)
    return job


def test_a_short_row_beside_a_long_one_pays_no_padding(served: App) -> None:
    """KV grows by the new row's own, at most a quarter more."""
    with leased_engine(served) as engine, by_hand(served, engine) as make:
        alone = decoding(engine, make, random_ids(1, SHORT))
        [own] = kv_bytes(served, engine)
        engine.release(alone)
        make(1)
        long = decoding(engine, make, random_ids(2, LONG))
        [before] = kv_bytes(served, engine)
        short = decoding(engine, make, random_ids(3, SHORT))
        new, old = kv_bytes(served, engine)
        assert new <= 1.25 * own
        # The long one's room may have come to its end: 512 tokens more from 8,192.
        assert old <= before + 2 * own
        for job in (long, short):
            engine.release(job)


def test_rows_of_one_length_share_a_batch(served: App) -> None:
    """Each batch reads all the weights for itself: there are no more than needed."""
    with leased_engine(served) as engine, by_hand(served, engine) as make:
        jobs = [decoding(engine, make, random_ids(10 + i, SHORT)) for i in range(4)]
        assert len(engine._loop._decode_batches._batches) == 1
        for job in jobs:
            engine.release(job)


def test_both_say_what_they_say_alone(served: App) -> None:
    """Whatever batch they are in."""
    with leased_engine(served) as engine:
        prompts = random_ids(4, 2000), random_ids(5, 60)
        alone = [run(engine, ids, 30).choices for ids in prompts]
        engine.clear()
        jobs = [submit(engine, ids, 30) for ids in prompts]
        assert [finish(engine, job).choices for job in jobs] == alone
