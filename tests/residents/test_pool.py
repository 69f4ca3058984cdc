"""The pool: loading, leases, who leaves for whom, and what clients hear of it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

from sidecar.app import App, build
from sidecar.config.settings import load_config
from sidecar.core.errors import (
    InsufficientMemory,
    ModelBusy,
    ModelLoadFailed,
    ModelNotFound,
    ModelPinned,
    ModelTooLarge,
    SidecarError,
    TooSlow,
    Unavailable,
)
from sidecar.engine.loading.checkpoint_files import MemoryLimit
from sidecar.residents.catalog import Catalog, Names
from sidecar.residents.model_state import ModelSpec, ModelView, Tell
from sidecar.residents.pool import ResidentPool
from sidecar.residents.weight_eviction import PoolLimits, WeightEviction
from testkit.raw_http import Answer, eventually, exchange, request
from testkit.servers import NO_FILE, running_sidecar

CHAT = b'{"model": "%s", "messages": [{"role": "user", "content": "hi"}]}'
GB = 10**9


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Weights:
    """The memory of a machine; `held` is what models have taken of it."""

    limit_bytes: int = 100 * GB
    held: int = 0
    late: int = 0  # of what a model gives back, so much comes later
    pressed: bool = False
    loading_bytes: list[int] = field(default_factory=list)

    @property
    def limit(self) -> MemoryLimit:
        return MemoryLimit(self.limit_bytes, "MAX_MODEL_MEMORY")

    def unaccounted(self, num_bytes: int) -> int:
        return self.held - num_bytes

    def is_pressed(self) -> bool:
        return self.pressed

    @contextmanager
    def loading(self, num_bytes: int) -> Iterator[None]:
        self.loading_bytes.append(num_bytes)
        yield


@dataclass(eq=False)
class Engine:
    """The least that the pool asks of a model; takes and gives its bytes."""

    weights: Weights
    num_bytes: int
    max_context: int = 128
    takes_images: bool = False
    num_closed: int = 0

    def __post_init__(self) -> None:
        self.weights.held += self.num_bytes

    def close(self) -> int:
        self.num_closed += 1
        if self.num_closed > 1:
            return 0
        freed = self.num_bytes - min(self.weights.late, self.num_bytes)
        self.weights.held -= freed
        return freed


class House:
    """A pool of models whose sizes are declared, in a memory that is made up."""

    def __init__(
        self, sizes: dict[str, int], limit: int = 100, **limits: float
    ) -> None:
        self.clock, self.weights = Clock(), Weights(limit * GB)
        self.loads: list[str] = []
        self.engines: dict[str, Engine] = {}
        self.failures: dict[str, SidecarError] = {}
        self.go = threading.Event()
        self.go.set()
        specs = tuple(ModelSpec(name, size_bytes=n * GB) for name, n in sizes.items())
        names = Names(specs[0].id, {spec.id: spec.aliases for spec in specs})
        self.catalog = Catalog(specs, names)
        asked = {"load_wait_s": 5.0, **limits}
        self.pool: ResidentPool[Engine] = ResidentPool(
            lambda: self.catalog,
            self._load,
            self.weights,
            PoolLimits(**asked),  # type: ignore[arg-type]
        )

    def _load(self, spec: ModelSpec, tell: Tell) -> Engine:
        tell("weights_loading")
        self.loads.append(spec.id)
        assert self.go.wait(120)
        if failure := self.failures.pop(spec.id, None):
            raise failure
        self.engines[spec.id] = Engine(self.weights, spec.size_bytes)
        return self.engines[spec.id]

    def use(self, *names: str) -> None:
        """A request for each, one after the other."""
        for name in names:
            with self.pool.lease(name):
                pass

    def loaded(self) -> list[str]:
        return sorted(e.id for e in self.pool.entries() if e.state == "loaded")

    def entry(self, name: str) -> ModelView:
        return self.pool.entry(name)


def look(pool: ResidentPool[Engine]) -> None:
    """What the pool does of itself every few seconds."""
    with pool._worker.changed:
        pool._worker.poll()
        pool._worker.wake()


@pytest.fixture
def houses() -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(sizes: dict[str, int], limit: int = 100, **limits: float) -> House:
        made.append(House(sizes, limit, **limits))
        return made[-1]

    yield make
    for house in made:
        house.go.set()
        house.pool.close()


Houses = Callable[..., House]


@pytest.mark.parametrize("name", ["", "default", "local", "openai/local", "a"])
def test_the_default_model_answers_to_all_its_names(houses: Houses, name: str) -> None:
    """Id, aliases, and no name at all."""
    house = houses({"a": 1, "b": 1})
    with house.pool.lease(name) as engine:
        assert engine is house.engines["a"]


def test_an_unknown_name_says_what_there_is(houses: Houses) -> None:
    """404 with the close names; nothing is leased."""
    pool = houses({"qwen3-4b": 1}).pool
    with pytest.raises(ModelNotFound, match=r"qwen3-8b.*qwen3-4b") as caught:
        pool.lease("qwen3-8b").__enter__()
    assert caught.value.param == "model"
    assert pool.num_leases == 0


def test_leases_are_counted_and_given_back_even_on_failure(houses: Houses) -> None:
    """A lease ends with its block, however the block ends."""
    pool = houses({"a": 1}).pool
    with pool.lease("a"), pool.lease("a"):
        assert pool.num_leases == 2
    with pytest.raises(KeyError), pool.lease("a"):
        raise KeyError
    assert pool.num_leases == 0
    assert pool.lease_counts == {"hits": 2, "misses": 1}
    pool.unload("a")
    assert not pool.is_loaded("a", 0.0)  # as a stream asks that then watches the load
    assert pool.lease_counts["misses"] == 2


def test_many_requests_for_a_cold_model_are_one_load(houses: Houses) -> None:
    """E9: all wait for the same load and get the same engine."""
    house = houses({"a": 1})
    house.go.clear()

    def ask(_number: int) -> Engine:
        with house.pool.lease("a") as engine:
            return engine

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(ask, number) for number in range(8)]
        assert eventually(lambda: house.entry("a").state == "loading")
        house.go.set()
        engines = {id(found.result()) for found in waiting}
    assert (house.loads, len(engines)) == (["a"], 1)


def test_a_load_that_takes_too_long_is_unavailable(houses: Houses) -> None:
    """503 with a time to come back, after load_wait_s; the load goes on."""
    house = houses({"a": 1}, load_wait_s=0.05)
    house.go.clear()
    house.pool.start_loading()
    assert eventually(lambda: house.entry("a").state == "loading")
    with pytest.raises(Unavailable, match="still loading") as caught:
        house.pool.lease("a").__enter__()
    assert caught.value.retry_after_s is not None
    house.go.set()
    assert eventually(lambda: house.entry("a").state == "loaded")
    house.use("a")
    assert house.entry("a").max_input_tokens == 128


def test_a_failed_load_is_told_to_each_request(houses: Houses) -> None:
    """500 with the reason, at once; the entry keeps it, and memory is as before."""
    house = houses({"a": 1})
    house.failures["a"] = ModelLoadFailed("weights are missing")
    for _ in range(2):
        with pytest.raises(ModelLoadFailed, match="weights are missing"):
            house.use("a")
    assert house.loads == ["a"]
    assert house.entry("a").state == "failed"
    assert house.entry("a").load_error == "weights are missing"
    assert (house.pool.num_leases, house.weights.held) == (0, 0)


def test_a_failed_load_is_tried_again_by_hand_or_after_a_minute(
    houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = houses({"a": 1})
    for again in ("load", "wait"):
        house.failures["a"] = ModelLoadFailed("no")
        with pytest.raises(ModelLoadFailed):
            house.use("a")
        if again == "wait":
            monkeypatch.setattr("sidecar.residents.load_waits._RETRY_FAILED_S", 0.0)
            house.use("a")
        else:
            assert house.pool.load("a").load_error is None
            house.pool.unload("a")


def test_the_one_used_longest_ago_goes_first(houses: Houses) -> None:
    """E2: limit 10, two of 4 are there, a third one of 4 needs 5."""
    house = houses({"a": 4, "b": 4, "c": 4}, limit=10)
    house.use("a", "b", "a", "c")
    assert house.loaded() == ["a", "c"]
    assert house.engines["b"].num_closed == 1


@pytest.mark.parametrize("limits", [{}, {"max_models": 1}])
def test_where_all_is_pinned_nobody_waits(
    houses: Houses, limits: dict[str, float]
) -> None:
    """30 s were waited before a 503 that was certain; a forced unload makes room."""
    house = houses({"a": 60, "b": 60}, load_wait_s=600.0, **limits)
    house.use("a")
    house.pool.set_pinned("a", pinned=True)
    with pytest.raises(InsufficientMemory, match=r"a 60.*pinned"):
        house.use("b")
    with pytest.raises(InsufficientMemory):
        house.pool.is_loaded("b", 600.0)  # as streams ask
    assert house.entry("b").state == "unloaded"
    house.pool.unload("a", force=True)
    house.use("b")
    assert house.loaded() == ["b"]


def test_who_waits_for_a_load_is_told_of_the_end(houses: Houses) -> None:
    house = houses({"a": 1}, load_wait_s=600.0)
    house.go.clear()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(house.use, "a")
        assert eventually(lambda: house.entry("a").state == "loading")
        house.pool.drain()
        assert "shutting down" in str(waiting.exception(120))
    *_, last = house.pool.watch_load("a", 600.0)
    assert last == ("error", "the server is shutting down")
    house.go.set()


def test_who_waits_when_all_becomes_pinned_is_told(houses: Houses) -> None:
    house = houses({"a": 60, "b": 60}, load_wait_s=600.0)
    with ThreadPoolExecutor(1) as threads, house.pool.lease("a"):
        waiting = threads.submit(house.use, "b")
        assert eventually(lambda: house.pool._worker.entries["b"].is_wanted)
        house.pool.set_pinned("a", pinned=True)
        assert isinstance(waiting.exception(120), InsufficientMemory)


def test_a_pinned_one_stays(houses: Houses) -> None:
    """E3."""
    house = houses({"a": 4, "b": 4, "c": 4}, limit=10)
    house.use("a", "b")
    house.pool.set_pinned("a", pinned=True)
    house.use("c")
    assert house.loaded() == ["a", "c"]


def test_a_leased_one_stays_and_its_end_is_waited_for(houses: Houses) -> None:
    """E4."""
    house = houses({"a": 8, "b": 8}, limit=10, load_wait_s=60.0)
    with ThreadPoolExecutor(1) as threads:
        with house.pool.lease("a"):
            waiting = threads.submit(house.use, "b")
            assert not waiting.done()
            assert house.loaded() == ["a"]
        waiting.result(120)
    assert house.loaded() == ["b"]


def test_without_room_the_refusal_says_who_holds_it(houses: Houses) -> None:
    house = houses({"a": 8, "b": 8}, limit=10, load_wait_s=0.05)
    with house.pool.lease("a"), pytest.raises(InsufficientMemory) as caught:
        house.use("b")
    assert "model b needs 8.0 GB of 10.0 GB, held by: a 8.0 GB (1 in use)" in str(
        caught.value
    )
    assert house.loads == ["a"]
    house.use("b")  # and what was refused is not remembered as a failure
    assert house.loaded() == ["b"]


def test_headroom_is_given_up_where_it_cannot_be(houses: Houses) -> None:
    """E5: 5 and 5 of 10; one is pinned, so there is no room for anyone's KV."""
    house = houses({"a": 5, "b": 5}, limit=10)
    house.use("a")
    house.pool.set_pinned("a", pinned=True)
    house.use("b")
    assert house.loaded() == ["a", "b"]


def test_what_is_too_large_alone_evicts_nobody(houses: Houses) -> None:
    """E6."""
    house = houses({"a": 4, "big": 11}, limit=10)
    house.use("a")
    with pytest.raises(ModelTooLarge, match=r"big cannot.*11.0 GB.*10.0 GB"):
        house.use("big")
    assert house.loaded() == ["a"]


def test_small_ones_do_not_go_in_vain(houses: Houses) -> None:
    """What gives less than a tenth of what is missing outlives a larger one."""
    house = houses({"tiny": 1, "a": 60, "b": 60}, limit=100)
    house.use("tiny", "a")
    house.use("b")  # needs 75, and 39 are free
    assert house.loaded() == ["b", "tiny"]


def test_no_more_models_than_asked_for(houses: Houses) -> None:
    house = houses({"a": 1, "b": 1, "c": 1}, max_models=2)
    house.use("a", "b", "c")
    assert house.loaded() == ["b", "c"]


def test_memory_that_comes_back_late_is_waited_for() -> None:
    """E7: else the next load would find it taken."""
    weights, waits = Weights(10 * GB), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            weights.held = 0  # what hung on comes free

    room = WeightEviction[Engine](weights, PoolLimits(settle_s=10.0), wait)
    house = House({"a": 8})
    house.pool.close()
    entry = house.pool._worker.entries["a"]
    weights.late = 8 * GB
    entry.loaded(Engine(weights, 8 * GB), 0.0)
    assert entry.resident is not None
    assert room.settle(entry.resident, [entry]) == 8 * GB
    assert len(waits) == 3


def test_what_does_not_come_back_stays_counted_until_it_does() -> None:
    """E7: a later load is not let into bytes that are not there."""
    clock, weights = Clock(), Weights(10 * GB)

    def wait(seconds: float) -> None:
        clock.now += seconds

    room = WeightEviction[Engine](weights, PoolLimits(settle_s=1.0), wait, clock)
    house = House({"a": 8, "b": 4})
    house.pool.close()
    first, second = house.pool._worker.entries.values()
    weights.late = 8 * GB
    first.loaded(Engine(weights, 8 * GB), 0.0)
    assert first.resident is not None
    assert room.settle(first.resident, [first]) == 0
    first.unloaded(0)
    plan = room.plan(second, [first, second])
    assert (plan.fits, plan.victim) == (False, None)
    weights.held = 0
    assert room.plan(second, [first, second]).fits


def test_idle_ones_leave_after_their_time(houses: Houses) -> None:
    """E8: not the leased, not the pinned, not one whose own time says so."""
    house = houses({"a": 1, "b": 1, "c": 1, "d": 1}, ttl_s=600.0)
    pool = house.pool
    pool._worker.clock = house.clock
    house.use("a", "b", "c", "d")
    pool.set_pinned("b", pinned=True)
    pool.set_ttl("d", 0.0)
    with pool.lease("c"):
        house.clock.now += 601
        look(pool)
        assert eventually(lambda: house.loaded() == ["b", "c", "d"])
    house.clock.now += 599
    look(pool)
    assert not house.pool._worker.entries["c"].is_leaving  # its request has just ended


def test_idle_ones_leave_though_others_are_asked_all_the_time(
    houses: Houses,
) -> None:
    """Each request wakes the pool; its own round comes all the same."""
    house = houses({"a": 1, "b": 1}, ttl_s=600.0)
    worker = house.pool._worker
    worker.clock, worker._looked_at = house.clock, house.clock.now
    house.use("b")
    house.clock.now += 601

    def asked_again() -> bool:
        house.use("a")
        house.clock.now += 0.1
        return house.loaded() == ["a"]

    assert eventually(asked_again)


def test_what_had_no_room_is_tried_again_at_once(houses: Houses) -> None:
    """It is no fault of the model's."""
    house = houses({"a": 1})
    house.failures["a"] = InsufficientMemory("beside what runs", retry_after_s=10)
    with pytest.raises(InsufficientMemory) as caught:
        house.use("a")
    assert caught.value.retry_after_s == 10
    house.use("a")
    assert house.loads == ["a", "a"]


def test_what_is_loaded_serves_who_waited_before_it_may_leave(
    houses: Houses,
) -> None:
    """Two models and room for one: each load is for an answer, not for the next."""
    house = houses({"a": 1, "b": 1}, max_models=1, load_wait_s=60.0)
    with ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(lambda name: [house.use(name) for _ in range(5)], name)
            for name in ("a", "b")
        ]
        for one in asked:
            one.result(120)
    assert len(house.loads) <= 10


def test_nobody_leaves_in_vain(houses: Houses) -> None:
    """A large one waits for one that is in use: the idle ones stay till then."""
    house = houses({"a": 40, "b": 40, "large": 95}, load_wait_s=0.05)
    house.use("a", "b")
    with house.pool.lease("a"), pytest.raises(InsufficientMemory):
        house.use("large")
    assert house.loaded() == ["a", "b"]
    assert house.loads == ["a", "b"]


def test_files_that_change_while_they_load_make_no_second_copy(
    houses: Houses,
) -> None:
    house = houses({"a": 1})
    house.go.clear()
    house.pool.start_loading()
    assert eventually(lambda: house.entry("a").state == "loading")
    whole = house.catalog
    for state in ("incomplete", "unloaded"):
        spec = ModelSpec("a", size_bytes=GB, state=state)  # type: ignore[arg-type]
        house.catalog = Catalog((spec,), whole.names)
        assert house.pool.rescan(at_once=True)
    house.go.set()
    house.use("a")
    assert house.loads == ["a"]


def test_a_loaded_one_goes_on_whatever_becomes_of_its_files(houses: Houses) -> None:
    house = houses({"a": 1})
    house.use("a")
    torn = ModelSpec("a", size_bytes=GB, state="incomplete", fault="a shard is missing")
    house.catalog = Catalog((torn,), house.catalog.names)
    assert house.pool.rescan(at_once=True)
    house.use("a")
    assert house.pool.unload("a") == GB
    with pytest.raises(ModelLoadFailed, match="shard"):
        house.use("a")


def test_one_that_cannot_be_closed_does_not_stop_the_pool(
    houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = houses({"a": 1, "b": 1}, max_models=1)
    house.use("a")

    def broken() -> int:
        raise RuntimeError("no")

    monkeypatch.setattr(house.engines["a"], "close", broken)
    house.use("b")
    assert house.loaded() == ["b"]


def test_under_pressure_the_oldest_idle_one_leaves(houses: Houses) -> None:
    """E11's second level: the process is nearly full, whoever filled it."""
    house = houses({"a": 1, "b": 1})
    house.use("a", "b")
    house.weights.pressed = True
    look(house.pool)
    assert eventually(lambda: house.loaded() == ["b"])


def test_the_time_of_a_load_is_foretold_from_the_last_ones(houses: Houses) -> None:
    """E10: 10 s for 5 GB, then 4 s for 4 GB."""
    room = WeightEviction[Engine](Weights(), PoolLimits())
    assert room.load_s(5 * GB) is None
    room.learn(5 * GB, 10.0)
    assert room.load_s(GB) == 2.0
    room.learn(4 * GB, 4.0)
    assert room.load_s(GB) == 1.7


def test_who_cannot_wait_is_told_and_the_next_one_finds_it(houses: Houses) -> None:
    """E28: a router may send the first request elsewhere; the load goes on."""
    house = houses({"a": 5, "b": 5})
    house.pool._room.learn(5 * GB, 10.0)
    house.go.clear()
    with pytest.raises(TooSlow, match="about 10 s") as caught:
        house.pool.lease("b", 2.0).__enter__()
    assert caught.value.param == "mlx_max_ttft_s"
    house.go.set()
    assert eventually(lambda: house.loaded() == ["b"])
    with house.pool.lease("b", 2.0) as engine:
        assert engine is house.engines["b"]


def test_where_nothing_is_known_it_is_waited_for_as_long_as_borne(
    houses: Houses,
) -> None:
    house = houses({"a": 5}, load_wait_s=600.0)
    house.go.clear()
    with pytest.raises(Unavailable, match="still loading"):
        house.pool.lease("a", 0.05).__enter__()


def test_a_pinned_one_that_is_too_large_does_not_stop_the_start(
    houses: Houses,
) -> None:
    """E12: a warning; the others are served."""
    house = houses({"a": 1, "big": 200})
    house.pool.set_pinned("big", pinned=True)
    house.pool.start_loading()
    assert eventually(lambda: house.loaded() == ["a"])
    assert house.loads == ["a"]


def test_a_default_one_that_is_too_large_is_failed_at_the_start(houses: Houses) -> None:
    """It is not waited for without end: the reason is there at once."""
    house = houses({"big": 200, "a": 1})
    house.pool.start_loading()
    entry = house.entry("big")
    assert entry.state == "failed"
    assert "its weights take 200.0 GB" in (entry.load_error or "")


def test_who_waits_for_an_end_that_does_not_come_goes_on(
    houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forced unload that gives up lets the requests in that waited behind it."""
    monkeypatch.setattr("sidecar.residents.pool._UNLOAD_WAIT_S", 0.5)
    house = houses({"a": 1}, load_wait_s=600.0)
    with ThreadPoolExecutor(2) as threads, house.pool.lease("a"):
        leaving = threads.submit(house.pool.unload, "a", force=True)
        assert eventually(lambda: house.pool._worker.entries["a"].is_leaving)
        waiting = threads.submit(house.use, "a")
        with pytest.raises(ModelBusy, match="still in use after 0.5 s"):
            leaving.result(120)
        waiting.result(120)


def test_what_was_set_anew_is_tried_at_once(houses: Houses) -> None:
    """Not a minute later, as others that failed."""
    house = houses({"a": 1})
    house.failures["a"] = ModelLoadFailed("no such draft model")
    for _ in range(2):
        with pytest.raises(ModelLoadFailed):
            house.use("a")
    house.pool.try_again("a")
    house.use("a")
    assert house.loads == ["a", "a"]


def test_by_hand(houses: Houses) -> None:
    """E13: pinned and busy ones are not unloaded, unless they are forced."""
    house = houses({"a": 1}, load_wait_s=0.05)
    pool = house.pool
    assert pool.load("a", pin=True).pinned
    with pytest.raises(ModelPinned):
        pool.unload("a")
    with pool.lease("a"):
        with pytest.raises(ModelBusy):
            pool.unload("a", force=True)
        assert house.loaded() == ["a"]
    assert pool.unload("a", force=True) == GB
    assert pool.unload("a", force=True) == 0
    assert house.entry("a").state == "unloaded"


def test_who_watches_a_load_hears_its_steps_and_its_end(houses: Houses) -> None:
    house = houses({"a": 1})
    house.go.clear()
    house.pool.start_loading()
    assert eventually(lambda: house.entry("a").step == "weights_loading")
    steps = house.pool.watch_load("a", 60.0)
    assert next(steps) == ("weights_loading", None)
    house.go.set()
    assert [step for step in steps if step] == [("ready", None)]


def test_what_is_found_anew_is_served_and_what_is_gone_is_not(houses: Houses) -> None:
    """A loaded one stays for as long as it is used, for nobody new."""
    house = houses({"a": 1, "b": 1})
    specs = (ModelSpec("a", size_bytes=GB), ModelSpec("c", size_bytes=GB))
    with house.pool.lease("b"):
        house.catalog = Catalog(specs, Names("a", {"a": (), "c": ()}))
        assert not house.pool.rescan(at_once=False)  # a moment ago there was no c
        assert house.pool.rescan(at_once=True)
        house.use("c")
        assert house.loaded() == ["c"]
        assert house.engines["b"].num_closed == 0
        with pytest.raises(ModelNotFound):
            house.use("b")
    assert eventually(lambda: house.engines["b"].num_closed == 1)
    assert eventually(lambda: "b" not in house.pool._worker.entries)


def test_an_unknown_name_is_looked_for_if_that_was_long_ago(houses: Houses) -> None:
    """Who has just put a model there asks for it; who guesses names costs nothing."""
    house = houses({"a": 1})
    house.pool._worker.clock = house.clock
    house.pool._found_at = house.clock.now
    house.catalog = Catalog(
        (ModelSpec("a"), ModelSpec("b")), Names("a", {"a": (), "b": ()})
    )
    with pytest.raises(ModelNotFound):
        house.use("b")
    house.clock.now += 11
    house.use("b")
    assert house.loaded() == ["b"]


def test_closing_lets_every_model_go_once(houses: Houses) -> None:
    """E29."""
    house = houses({"a": 1, "b": 1})
    house.use("a", "b")
    house.pool.close()
    house.pool.close()
    assert [engine.num_closed for engine in house.engines.values()] == [1, 1]
    assert house.weights.held == 0


def ask(app: App, path: str, model: str | None = None) -> Answer:
    body = None if model is None else CHAT % model.encode()
    return exchange(app.listener.port, request(path, body))


def test_over_http_an_unknown_model_is_404(app: App) -> None:
    """The client's user reads which models there are."""
    answer = ask(app, "/v1/chat/completions", "gpt-4")
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"
    assert "local" in answer.json["error"]["message"]


def test_over_http_a_failed_load_is_500_and_health_says_so(tmp_path: Path) -> None:
    """A folder without weights: /health is degraded, requests get the reason."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with running_sidecar({"MODEL_PATH": str(tmp_path)}, ready=False) as app:
        assert eventually(lambda: ask(app, "/health").json["status"] == "degraded")
        health = ask(app, "/health")
        assert (health.status, health.json["models"][0]["state"]) == (200, "failed")
        assert tmp_path.name in health.json["reason"]
        answer = ask(app, "/v1/chat/completions", "local")
        assert answer.status == 500
        assert answer.json["error"]["code"] == "model_load_failed"
        assert tmp_path.name in answer.json["error"]["message"]
        assert ask(app, "/metrics").status == 200
        assert ask(app, "/v1/models").status == 200


def test_a_failed_load_does_not_say_where_the_model_lies(tmp_path: Path) -> None:
    """Errors hold no path of this machine, only the model's name."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    with running_sidecar({"MODEL_PATH": str(folder)}, ready=False) as app:
        assert eventually(lambda: ask(app, "/health").json["status"] == "degraded")
        answer = ask(app, "/v1/chat/completions", "local")
        assert str(tmp_path) not in answer.body.decode()


@contextmanager
def never_loaded() -> Iterator[App]:
    """A sidecar that answers while its model is forever about to load."""
    flags = {"MLX_PORT": "0", "LOAD_WAIT_SECONDS": "0.1", "MODEL_DIR": "none"}
    app = build(load_config(flags, NO_FILE, {}))
    thread = threading.Thread(target=app.listener.serve_forever, args=(0.05,))
    thread.start()
    go = threading.Event()

    def load(_offer: ModelSpec, _tell: Callable[[str], None]) -> NoReturn:
        go.wait(120)
        raise ModelLoadFailed("never")

    app.pool._worker.load = load
    try:
        yield app
    finally:
        go.set()
        app.stop_listening()
        app.close()
        thread.join(120)


def test_over_http_a_loading_model_is_503_with_retry_after() -> None:
    """Another server may serve this now; /health says loading."""
    with never_loaded() as app:
        health = ask(app, "/health")
        assert (health.status, health.json["status"]) == (200, "loading")
        answer = ask(app, "/v1/chat/completions", "local")
        assert answer.status == 503
        assert answer.json["error"]["code"] == "service_unavailable"
        assert int(answer.header("retry-after") or 0) > 0
