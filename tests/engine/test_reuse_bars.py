"""How much is reused where it matters: tool loops, sub-agents, retries, streams."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

from sidecar.app import App
from sidecar.core.prompt import ModelIds
from sidecar.engine.job import Prefilled
from testkit.jobs import (
    Outcome,
    by_hand,
    drain,
    finish,
    leased_engine,
    random_ids,
    run,
    submit,
)
from testkit.scripted import Switch, scripted
from testkit.servers import running_sidecar
from testkit.tiny_models import WINDOW, make_model
from testkit.tool_loop import Agent, words

KINDS = ["dense", "hybrid", "sliding"]
# What a checkpoint may lie behind the place where two prompts part.
SLACK = 512


@dataclass
class Served:
    """A server that says what it is told."""

    app: App
    switch: Switch
    http: httpx.Client

    def agent(self, session: str, task: str, system_words: int = 100) -> Agent:
        """A new agent; those with equally long system prompts share it."""
        system = words("system", system_words)
        return Agent(self.http, self.switch, session, system, task)


MakeServer = Callable[[str], Served]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """One small server per kind of model: two layers, hidden 32."""
    servers: dict[str, Served] = {}
    folder = tmp_path_factory.mktemp("bars")
    with ExitStack() as stack:

        def make(kind: str) -> Served:
            if kind not in servers:
                model = make_model(folder / kind, kind, hidden=32)
                settings = {"MODEL_PATH": str(model), "CACHE_SELFTEST": "off"}
                switch = Switch()
                app = stack.enter_context(running_sidecar(settings, scripted(switch)))
                client = httpx.Client(base_url=app.url, timeout=120)
                servers[kind] = Served(app, switch, stack.enter_context(client))
            return servers[kind]

        yield make


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_loop_reuses_all_of_the_turn_before(
    kind: str, serve: MakeServer
) -> None:
    """Ten turns: prompt and completion of the last one, but for two tokens."""
    agent = serve(kind).agent("loop", "Write ten files.")
    for turn in range(10):
        agent.call(num_words=5 + 7 * turn, result_words=20)
    agent.say(10)
    for before, now in zip(agent.turns, agent.turns[1:], strict=False):
        assert now.cached >= before.total - 2


@pytest.mark.parametrize("kind", ["hybrid", "sliding"])
def test_short_turns_up_to_16k_tokens_compute_what_is_new(
    kind: str, serve: MakeServer
) -> None:
    """Layers that cannot be cut: completions of 20 to 600 tokens, far past a window."""
    agent = serve(kind).agent("long", "Write many files.")
    sizes = [2, 30, 280, 8, 60, 5, 120, 3, 200, 10, 40, 4]
    for size in sizes:
        agent.call(num_words=size, result_words=850)
    completions = [turn.completion for turn in agent.turns]
    assert min(completions) >= 20
    assert max(completions) in range(400, 700)
    assert agent.turns[-1].prompt > 14_000 > WINDOW
    for before, now in zip(agent.turns, agent.turns[1:], strict=False):
        new = now.prompt - before.total
        assert now.prompt - now.cached <= new + SLACK


@pytest.mark.parametrize("kind", KINDS)
def test_sub_agents_of_a_session_do_not_cost_the_main_thread(
    kind: str, serve: MakeServer
) -> None:
    """Four at a time, three turns each, between the turns of the main conversation."""
    served = serve(kind)
    main = served.agent("session", "Lead the work.", 150)
    main.call(5, 100)
    kept, known = [], []
    for turn in range(4):
        subs = [served.agent("session", f"Sub-task {turn}.{n}.", 150) for n in range(4)]
        for _ in range(3):
            for sub in subs:
                sub.call(1, 10)
        before = main.turns[-1]
        now = main.call(5, 60)
        kept.append(now.cached / before.total)
        known += [sub.turns[0].cached / sub.turns[0].prompt for sub in subs]
    assert sum(kept) / len(kept) >= 0.97
    assert min(kept) >= 0.9
    assert min(known) >= 0.7  # the system prompt is shared


@pytest.mark.parametrize("kind", KINDS)
def test_a_retry_continues_a_cancelled_prefill(
    kind: str, serve: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled at 80 % of 8k tokens: the second request computes at most 25 %."""
    ids = random_ids(80, 8000)
    app = serve(kind).app
    with leased_engine(app) as engine:
        # A quarter of the prompt in one chunk, whose place depends on the load, could
        # be the last.
        monkeypatch.setattr(engine._loop.pacer, "_step_size", 512)
        with by_hand(app, engine) as make:
            job = submit(engine, ids, 2)
            done = 0
            while done < 0.75 * len(ids):
                make(1)
                for event in drain(job):
                    assert isinstance(event, Prefilled)
                    done = event.done
            engine.release(job)
        assert done < len(ids)
        retry = run(engine, ids, 2)
    assert retry.failure is None
    assert len(ids) - retry.cached <= 0.25 * len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_that_share_prefixes_say_what_each_says_alone(
    kind: str, plain: MakeServer
) -> None:
    """Warm, cold, side by side, from one prefix or each other: greedy and equal."""
    served = plain(kind)
    prefix = random_ids(1, 300)
    prompts = [
        ModelIds((*prefix[:cut], *random_ids(number + 2, 20 + 13 * number)))
        for number, cut in enumerate((300, 300, 170, 300, 40))
    ]
    with leased_engine(served.app) as engine:
        alone = []
        for ids in prompts:
            served.app.gpu.call(engine.store.forget)
            alone.append(run(engine, ids, 16))
        assert all(outcome.cached == 0 for outcome in alone)
        for warm in (False, True):
            served.app.gpu.call(engine.store.forget)
            if warm:
                run(engine, prefix, 4)
            together = _run_together(engine, prompts * 2)
            said = [outcome.choices for outcome in together]
            assert said == [outcome.choices for outcome in alone] * 2
            assert any(outcome.cached for outcome in together)
        assert engine.store.check_integrity() == []


def _run_together(engine: object, prompts: list[ModelIds]) -> list[Outcome]:
    jobs = [submit(engine, ids, 16) for ids in prompts]  # type: ignore[arg-type]
    with ThreadPoolExecutor(len(jobs)) as readers:
        return list(readers.map(lambda job: finish(engine, job), jobs))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """Servers that say what their models say."""
    servers: dict[str, Served] = {}
    folder = tmp_path_factory.mktemp("plain")
    with ExitStack() as stack:

        def make(kind: str) -> Served:
            if kind not in servers:
                model = make_model(folder / kind, kind)
                settings = {
                    "MODEL_PATH": str(model), "CACHE_SELFTEST": "off",
                    "PREFILL_STEP_SIZE": "64",
                }  # fmt: skip
                app = stack.enter_context(running_sidecar(settings))
                client = stack.enter_context(httpx.Client(base_url=app.url))
                servers[kind] = Served(app, Switch(), client)
            return servers[kind]

        yield make
