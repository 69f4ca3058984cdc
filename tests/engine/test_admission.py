"""Admission by memory: what is admitted fits, and what is refused is told why."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from sidecar.app import App
from sidecar.core.errors import InsufficientMemory, MemoryPressure
from sidecar.core.prompt import Boundary, ModelIds, ModelPrompt
from sidecar.core.requests import GenerationOptions, SamplingParams
from sidecar.engine.job import Job, Token
from sidecar.engine.memory_model import MemoryModel
from sidecar.engine.process_memory import Demand
from sidecar.engine.text_engine import TextEngine
from testkit.jobs import (
    finish,
    is_idle,
    leased_engine,
    random_ids,
    run,
    settled,
    submit,
    wait_for,
)
from testkit.servers import held_gpu, running_sidecar

ModelFolder = Callable[[str], Path]
LENGTH = 2000
WORDS = re.compile(
    r"a prompt of (\d+) tokens needs \d+ MiB, and \d+ MiB of \d+ MiB are left: "
    r"the largest context that fits now is (\d+) tokens"
)


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def served(request: pytest.FixtureRequest, model_folder: ModelFolder) -> Iterator[App]:
    settings = {
        "MODEL_PATH": str(model_folder(request.param)), "PREFILL_STEP_SIZE": "64",
        "CACHE_VERIFY": "true",
    }  # fmt: skip
    with running_sidecar(settings) as app:
        yield app


@pytest.fixture
def engine(served: App) -> Iterator[TextEngine]:
    """With an empty store and a limit that a test may change."""
    with leased_engine(served) as engine:
        limit = engine.guard.process.limit_bytes
        engine.clear()
        served.gpu.call(engine.guard.process.sample)
        yield engine
        engine.guard.process.limit_bytes = limit
        served.gpu.call(engine.guard.process.sample)


def leave(app: App, engine: TextEngine, free: Demand) -> None:
    """Set the limit so that exactly so much is free, and told to be."""

    def change() -> None:
        stored = engine.store.num_bytes
        engine.guard.process.limit_bytes = mx.get_active_memory() - stored + free.total
        engine.guard.process.sample()

    app.gpu.call(change)


def just_fitting(engine: TextEngine, length: int) -> Demand:
    """What a prompt of that length is asked to leave room for."""
    return engine.guard.model.demand(length + 1)


def test_what_just_fits_is_served(served: App, engine: TextEngine) -> None:
    """Admission counts all that the prefill asks for."""
    leave(served, engine, just_fitting(engine, LENGTH))
    with pytest.raises(InsufficientMemory) as refused:
        submit(engine, random_ids(1, LENGTH + 20))
    found = WORDS.fullmatch(refused.value.message)
    assert found
    assert (int(found[1]), int(found[2])) == (LENGTH + 20, LENGTH + 1)
    assert run(engine, random_ids(1, LENGTH), 2).failure is None


def test_a_fork_that_just_fits_is_served(served: App, engine: TextEngine) -> None:
    """What it shares with a stored conversation is held twice, or can be evicted."""
    trunk = random_ids(2, LENGTH - 50)
    end = Boundary(len(trunk), 1)
    finish(engine, submit_with(engine, (*trunk, *random_ids(3, LENGTH)), (end,)))
    leave(served, engine, just_fitting(engine, LENGTH))
    outcome = run(engine, ModelIds((*trunk, *random_ids(4, 50))), 2)
    assert outcome.cached == len(trunk)
    assert outcome.failure is None
    assert engine.store.check_integrity() == []


def test_checkpoints_give_way(served: App, engine: TextEngine) -> None:
    """They are taken where there is room, and no prompt fails for the sake of one."""
    length = 4 * LENGTH
    ends = tuple(Boundary(depth, 2) for depth in range(64, length, 64))
    leave(served, engine, just_fitting(engine, length))
    outcome = finish(engine, submit_with(engine, random_ids(5, length), ends))
    assert outcome.failure is None


def submit_with(
    engine: TextEngine, ids: tuple[int, ...], boundaries: tuple[Boundary, ...]
) -> Job:
    """A prompt that tells where its messages end."""
    prompt = ModelPrompt(ModelIds(ids), boundaries)
    options = GenerationOptions(sampling=SamplingParams(), max_tokens=2)
    return engine.submit(prompt, settled(engine, options.sampling), options)


def test_what_is_free_is_of_one_moment(served: App, engine: TextEngine) -> None:
    """KV that was just given back counts as stored and as in use."""
    for number in range(3):
        assert run(engine, random_ids(10 + number, 700), 2).failure is None
        assert is_idle(engine)
        stored = engine.store.num_bytes
        active = served.gpu.call(mx.get_active_memory)
        free = engine.guard.process.limit_bytes - active + stored
        assert engine.guard.process.free_bytes == pytest.approx(free, abs=64 << 10)


def test_a_limit_that_is_raised_again_counts_at_once(
    served: App, engine: TextEngine
) -> None:
    """Nothing need run for it: the numbers are not those of the last step."""
    limit = engine.guard.process.limit_bytes
    engine.guard.process.limit_bytes = 1 << 20
    for _ in range(2):
        with pytest.raises(InsufficientMemory):
            submit(engine, random_ids(40, 9), 2)
    engine.guard.process.limit_bytes = limit
    assert run(engine, random_ids(40, 9), 2).failure is None


def held_bytes() -> mx.array:
    """4 MiB; GPU thread only."""
    array = mx.zeros((1 << 20,), mx.float32)
    mx.eval(array)
    return array


def test_nobody_is_refused_by_numbers_of_before(
    served: App, engine: TextEngine
) -> None:
    """What has left since the last step, and what is idle, is free."""
    left, idle = served.gpu.call(lambda: ([held_bytes()], [held_bytes()]))
    process = engine.guard.process
    end = process.watch_idle(lambda: idle.clear() or 1)
    fitting = just_fitting(engine, LENGTH)
    leave(served, engine, Demand(fitting.held - (7 << 20), fitting.peak))
    left.clear()
    try:
        assert run(engine, random_ids(41, LENGTH), 2).failure is None
    finally:
        end()
    assert idle == []


def test_two_at_once_are_promised_no_byte_twice(
    served: App, engine: TextEngine
) -> None:
    """What the first will take is not free for the second; once it is over, it is."""
    one, two = random_ids(20, LENGTH), random_ids(21, LENGTH)
    leave(served, engine, just_fitting(engine, LENGTH + 50))
    with held_gpu(served):
        first = submit(engine, one, 2)
        assert engine.fitting_context < LENGTH // 2
        with pytest.raises(InsufficientMemory, match="largest context that fits now"):
            submit(engine, two, 2)
    assert finish(engine, first).failure is None
    assert run(engine, two, 2).failure is None


def test_what_is_admitted_beside_others_is_served(
    served: App, engine: TextEngine
) -> None:
    """Those that run, that are half computed and that wait keep what they need."""
    leave(served, engine, just_fitting(engine, 2 * LENGTH))
    running = submit(engine, random_ids(30, 500), 400)
    wait_for(running, Token)
    with held_gpu(served):
        long = submit(engine, random_ids(31, LENGTH), 2)
        short = submit(engine, random_ids(32, 40), 2)  # passes the long one
        last = submit(engine, random_ids(33, engine.fitting_context - 1), 2)
        with pytest.raises(InsufficientMemory):
            submit(engine, random_ids(34, 300), 2)
    for job in (short, long, last, running):
        assert finish(engine, job).failure is None


def test_several_answers_are_counted(served: App, engine: TextEngine) -> None:
    """Each choice decodes with KV of its own."""
    leave(served, engine, just_fitting(engine, LENGTH))
    with pytest.raises(InsufficientMemory, match="largest context that fits now"):
        submit(engine, random_ids(40, LENGTH), 2, n=4)
    assert run(engine, random_ids(40, LENGTH // 4), 2, n=2).failure is None


def test_running_out_of_memory_in_the_prefill_is_told_like_at_admission(
    served: App, engine: TextEngine
) -> None:
    """Need, limit and what would fit; and that does."""
    leave(served, engine, just_fitting(engine, LENGTH))
    with held_gpu(served):
        job = submit(engine, random_ids(50, LENGTH), 2)
        taken = engine.guard.model.demand(LENGTH).total // 3
        engine.guard.process.limit_bytes -= taken  # as if something else had grown
    failure = finish(engine, job).failure
    assert isinstance(failure, MemoryPressure)
    found = WORDS.fullmatch(failure.message)
    assert found, failure.message
    assert int(found[1]) == LENGTH
    assert LENGTH // 4 < int(found[2]) < LENGTH
    assert is_idle(engine)
    assert run(engine, random_ids(51, int(found[2]) - 50), 2).failure is None


def test_demands_of_several_add_up() -> None:
    """All of them hold their KV, one at a time prefills."""
    model = MemoryModel(kv_per_token=10, per_token=5, per_pair=0, fixed=100)
    one, two = model.demand(1000), model.demand(500, num_copies=2)
    assert one.held == 100 + 10 * 1280  # as long as a buffer for 256 tokens more
    assert two.held == 2 * (100 + 10 * 768)
    assert (one + two) == Demand(one.held + two.held, one.peak)
    assert model.rest(1000, 1, 400).held == one.held - 100 - 4000
