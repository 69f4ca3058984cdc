"""
Mixed traffic for a long time: nothing wrong, nothing leaked.

    SOAK_MINUTES=30 pytest -m slow -n 0 -s tests/wire/test_soak.py

Five minutes by default, and some seconds of the same on each run of the suite.
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sidecar.app import App
from sidecar.infra.malloc import keep_freed_pages
from sidecar.pipeline.template import encoder
from testkit.answer_oracle import AnswerOracle
from testkit.lock_order import LockOrder, watched_locks
from testkit.mixed_traffic import Traffic
from testkit.raw_http import eventually
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]
MINUTES = float(os.environ.get("SOAK_MINUTES", "5"))
SEED = int(os.environ.get("SOAK_SEED", "1"))


@contextmanager
def watched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[App, LockOrder]]:
    """A sidecar whose locks are watched, its stores small enough to be full soon."""
    settings = {
        "MODEL_PATH": str(folder),
        "PREFILL_STEP_SIZE": "128",
        "PROMPT_CACHE_MAX_BYTES": "24MB",
        "TIMEOUT_CHAT_SECONDS": "120",
        "CACHE_VERIFY": "true",
        # What is remembered for half an hour would grow for half an hour.
        "PROMPT_CACHE_TTL_SECONDS": "30",
        "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS": "30",
        "HEALING_STORE_MAX_ENTRIES": "50",
    }
    monkeypatch.setattr(encoder, "_MAX_CACHED_CHARS", 1 << 18)
    with (
        watched_locks(monkeypatch) as order,
        running_sidecar(settings) as app,
    ):
        yield app, order


def check_nothing_leaked(app: App) -> None:
    """No lease of the pool or of the store, no job, no broken tree."""
    assert eventually(lambda: app.pool.num_leases == 0)
    with app.pool.lease("local") as served:
        engine = served.engine
        assert eventually(lambda: engine._admission.num_open == 0)
        app.gpu.call(lambda: None)  # what was given back is with the store now
        assert engine.store.check_integrity() == []
        # What was cancelled is dropped in a turn of the GPU thread, not at once.
        assert eventually(
            lambda: sum(row["leases"] for row in engine.store.rows()) == 0
        )
        counters = engine.store.counters.snapshot()
        assert counters.get("invariant_violation", 0) == 0


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_some_seconds_of_everything(
    kind: str, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of layers; locks in order; sampled answers as without a cache."""
    oracle = AnswerOracle(share=0.3)
    with watched(model_folder(kind), monkeypatch) as (app, order):
        oracle.listen(monkeypatch)
        traffic = Traffic(app.listener.port, SEED)
        traffic.run(8)
        check_nothing_leaked(app)
        oracle.check(app)
    assert traffic.wrong == []
    assert traffic.outcomes["turn: 200"] > 5
    assert oracle.num_checked > 2
    assert oracle.wrong == []
    assert order.num_taken > 1000
    assert order.violations() == []


@pytest.mark.slow
@pytest.mark.timeout(600 + 120 * MINUTES)  # the checks between parts take time too
def test_soak(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wrong answer, no leak of leases, threads, files or memory."""
    oracle = AnswerOracle(share=0.1)
    process = psutil.Process()
    keep_freed_pages()  # as the sidecar's own process does
    with watched(model_folder("hybrid"), monkeypatch) as (app, order):
        oracle.listen(monkeypatch)
        traffic = Traffic(app.listener.port, SEED)
        marks = []
        for part in range(10):
            traffic.run(MINUTES * 6)
            check_nothing_leaked(app)
            oracle.check(app)
            gc.collect()
            marks.append(process.memory_info().rss)
            print(
                f"part {part + 1} of 10: {sum(traffic.outcomes.values())} things, "
                f"{oracle.num_checked} answers checked, {len(oracle.wrong)} wrong, "
                f"{oracle.num_near_ties} near-ties, rss {marks[-1] >> 20} MiB, "
                f"{threading.active_count()} threads, {process.num_fds()} files",
                flush=True,
            )
            if part == 1:
                assert eventually(lambda: len(process.net_connections()) <= 1)
                files, threads = process.num_fds(), threading.active_count()
        assert eventually(lambda: threading.active_count() <= threads)
        assert eventually(lambda: process.num_fds() <= files)
    growth = max(marks[-3:]) / max(marks[1:4]) - 1
    print(f"rss after warm-up: {growth:+.2%}\n{dict(traffic.outcomes)}")
    assert traffic.wrong == []
    assert oracle.wrong == []
    assert oracle.num_checked > 100 * MINUTES / 5
    assert order.violations() == []
    assert growth < 0.02
