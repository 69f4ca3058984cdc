"""Length classes instead of padding: a short row beside a long one costs neither."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.app import App
from sidecar.engine.job import Token
from tests.support.jobs import (
    finish,
    leased_engine,
    random_ids,
    run,
    submit,
    wait_for,
)
from tests.support.servers import running_sidecar

ModelFolder = Callable[[str], Path]
LONG, SHORT = 8000, 100


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def served(request: pytest.FixtureRequest, model_folder: ModelFolder) -> Iterator[App]:
    with running_sidecar({"MODEL_PATH": str(model_folder(request.param))}) as app:
        yield app


def kv_bytes(app: App) -> list[int]:
    """Bytes of each batch's caches, room and padding included, smallest first."""

    def count() -> list[int]:
        with app.pool.lease("local") as served:
            batches = served.engine._loop._lanes._batches
            return sorted(
                sum(layer.nbytes for layer in batch.prompt_cache) for batch in batches
            )

    return app.gpu.call(count)


def test_a_short_row_beside_a_long_one_pays_no_padding(served: App) -> None:
    """KV grows by the new row's own, at most a quarter more."""
    with leased_engine(served) as engine:
        alone = submit(engine, random_ids(1, SHORT), 400)
        wait_for(alone, Token, 5)
        [own] = kv_bytes(served)
        engine.release(alone)
        long = submit(engine, random_ids(2, LONG), 3000)
        wait_for(long, Token, 5)
        [before] = kv_bytes(served)
        short = submit(engine, random_ids(3, SHORT), 400)
        wait_for(short, Token, 5)
        new, old = kv_bytes(served)
        assert new <= 1.25 * own
        assert old <= before + own  # a step of room, if the long one came to its end
        for job in (long, short):
            engine.release(job)


def test_rows_of_one_length_share_a_batch(served: App) -> None:
    """Each batch reads all the weights for itself: there are no more than needed."""
    with leased_engine(served) as engine:
        jobs = [submit(engine, random_ids(10 + i, SHORT), 200) for i in range(4)]
        for job in jobs:
            wait_for(job, Token, 5)
        assert len(engine._loop._lanes._batches) == 1
        for job in jobs:
            engine.release(job)


def test_both_say_what_they_say_alone(served: App) -> None:
    """Whatever batch they are in."""
    with leased_engine(served) as engine:
        prompts = random_ids(4, 2000), random_ids(5, 60)
        alone = [run(engine, ids, 30).choices for ids in prompts]
        engine.clear_cache()
        jobs = [submit(engine, ids, 30) for ids in prompts]
        assert [finish(engine, job).choices for job in jobs] == alone
