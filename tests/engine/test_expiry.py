"""KV of a server that nobody asks goes in its time, and wakes nobody before."""

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.kv_expiry import Expiry
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv import eviction
from sidecar.kv.eviction import KVBudget, Limits
from sidecar.kv.prefix_store import PrefixStore
from testkit.clock import Clock
from testkit.raw_http import eventually
from testkit.sequences import run, some_ids
from testkit.servers import running_sidecar

TinyModel = Callable[[str], LoadedModel]
TIMED = ("sidecar.kv.eviction", "sidecar.kv.leases", "sidecar.kv.prefix_store")


class Waits:
    """What the watch waits for: it is told how long, and the test lets it go on."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def __call__(self, seconds: float) -> bool:
        self.asked.put(seconds)
        return self._ends.get()

    def next(self) -> float:
        return self.asked.get(timeout=120)

    def go_on(self, *, is_closed: bool = False) -> None:
        self._ends.put(is_closed)


@pytest.fixture
def waits() -> Iterator[Waits]:
    one = Waits()
    yield one
    one.go_on(is_closed=True)


def test_it_wakes_when_something_expires_and_not_before(
    tiny_model: TinyModel, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait ends where the store may have something to let go."""
    clock = Clock(monkeypatch, *TIMED)
    gpu = gpu_thread()
    model = tiny_model("dense")
    store = PrefixStore(KVBudget(Limits(1 << 30, ttl_s=100)), model.new_cache)
    Expiry(store.budget, gpu, waits)
    assert waits.next() == pytest.approx(100)
    gpu.call(lambda: run(store, some_ids(1, 50)))
    clock.advance(60)
    gpu.call(lambda: run(store, some_ids(2, 50)))
    clock.advance(40)
    waits.go_on()
    assert waits.next() == pytest.approx(60)
    assert store.match_len((*some_ids(1, 50), 1)) == 0
    assert store.match_len((*some_ids(2, 50), 1)) == 50
    clock.advance(60)
    waits.go_on()
    assert waits.next() == pytest.approx(100), (
        "empty: what comes now has all of its time before it"
    )
    assert store.num_bytes == 0


def test_what_is_asked_for_meanwhile_stays(
    tiny_model: TinyModel, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the GPU thread is left alone."""
    clock, gpu = Clock(monkeypatch, *TIMED), gpu_thread()
    store = PrefixStore(
        KVBudget(Limits(1 << 30, ttl_s=100)), tiny_model("dense").new_cache
    )
    expired = []
    monkeypatch.setattr(store.budget, "expire", lambda: expired.append(1))
    Expiry(store.budget, gpu, waits)
    gpu.call(lambda: run(store, some_ids(1, 50)))
    waits.next()
    clock.advance(99)
    gpu.call(lambda: run(store, some_ids(1, 50)))
    clock.advance(1)
    waits.go_on()
    assert waits.next() == pytest.approx(99)
    assert expired == []


def test_an_idle_server_lets_its_kv_go(model_folder: Callable[[str], Path]) -> None:
    """Wired into the server as it is built."""
    settings = {
        "MODEL_PATH": str(model_folder("dense")),
        "PROMPT_CACHE_TTL_SECONDS": "1",
    }
    with running_sidecar(settings) as app:
        said = {"role": "user", "content": "x " * 50}
        body = {"messages": [said], "max_tokens": 2}
        url = f"{app.url}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=120).status_code == 200
        with app.pool.lease("local") as served:
            store = served.engine.store
            assert eventually(lambda: store.rows() == [])


def test_without_a_limit_it_only_looks_whether_there_is_one(
    tiny_model: TinyModel, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROMPT_CACHE_TTL_SECONDS=0: nothing expires, until it is set meanwhile."""
    clock = Clock(monkeypatch, *TIMED)
    store = PrefixStore(
        KVBudget(Limits(1 << 30, ttl_s=0)), tiny_model("dense").new_cache
    )
    gpu_thread().call(lambda: run(store, some_ids(1, 50)))
    Expiry(store.budget, gpu_thread(), waits)
    assert waits.next() == pytest.approx(120)
    store.budget.use(Limits(1 << 30, ttl_s=60))
    clock.advance(120)
    waits.go_on()
    waits.next()
    assert store.num_bytes == 0
    assert eviction.expires_in([store._tree], Limits(1)) == float("inf")
