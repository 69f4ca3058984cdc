"""Jobs on a real engine, driven as a request's thread drives them."""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from sidecar.app import App
from sidecar.core.events import TokenLogprob
from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.core.requests import GenerationOptions, SamplingParams
from sidecar.engine.gpu_scheduler import GpuScheduler
from sidecar.engine.job import ChoiceEnded, Job, JobEvent, JobFailed, Prefilled, Token
from sidecar.engine.sampling import Sampling, settle
from sidecar.engine.text_engine import TextEngine

_WAIT_S = 120.0


@dataclass
class Said:
    """What one choice of a job generated."""

    text: str = ""
    ids: tuple[int, ...] = ()
    reason: str = ""
    stop_string: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass
class Outcome:
    """What came of a job; `cached` tokens of its prompt were not computed."""

    choices: list[Said]
    cached: int = 0
    chunks: list[int] = field(default_factory=list)
    failure: Exception | None = None


def random_ids(seed: int, length: int) -> ModelIds:
    """A prompt of ordinary tokens."""
    chance = random.Random(seed)
    return ModelIds(tuple(chance.randrange(5, 3000) for _ in range(length)))


@contextmanager
def by_hand(app: App, engine: TextEngine) -> Iterator[Callable[[int], None]]:
    """
    Stop the engine's steps; what is yielded makes that many.

    So a test sees jobs at the moment it means, however busy the machine is. At the end
    the engine goes on by itself.
    """
    loop, turns = engine._loop, GpuScheduler()
    turns.add(loop)

    def make(steps: int) -> None:
        for _ in range(steps):
            app.gpu.call(turns.take)
        app.gpu.call(turns.hand_over)

    app.gpu.remove_worker(loop)
    try:
        yield make
    finally:
        app.gpu.add_worker(loop)


def step_until(make: Callable[[int], None], check: Callable[[], bool]) -> None:
    """
    Make steps until a check holds; fails the test if it does not.

    How many it takes hangs on the machine: prompts and rows share the time.
    """
    for _ in range(500):
        if check():
            return
        make(1)
    raise AssertionError("it does not come to hold in 500 steps")


@contextmanager
def leased_engine(app: App) -> Iterator[TextEngine]:
    """The engine of a running sidecar."""
    with app.pool.lease("local") as served:
        yield served.engine


def submit(
    engine: TextEngine, ids: ModelIds, max_tokens: int = 16, **options: Any
) -> Job:
    """
    Submit a job; options of SamplingParams and GenerationOptions by their names.

    `constraint` is what the answer is held to.
    """
    constraint = options.pop("constraint", None)
    names = SamplingParams.__dataclass_fields__
    asked = SamplingParams(**{k: v for k, v in options.items() if k in names})
    rest = {k: v for k, v in options.items() if k not in names}
    whole = GenerationOptions(sampling=asked, max_tokens=max_tokens, **rest)
    prompt = ModelPrompt(ids)
    return engine.submit(prompt, settled(engine, asked), whole, constraint)


def settled(engine: TextEngine, asked: SamplingParams) -> Sampling:
    """Sampling as the service settles it; the tiny models are greedy by default."""
    from sidecar.config.settings import GenerationConfig

    return settle(asked, GenerationConfig(), engine.model.generation_config)


def finish(engine: TextEngine, job: Job, read: Iterable[JobEvent] = ()) -> Outcome:
    """Read a job to its end, after the events `read` before, and release it."""
    outcome = Outcome([Said() for _ in range(job.spec.n)])
    left, earlier = job.spec.n, iter(read)
    try:
        while left and outcome.failure is None:
            event = next(earlier, None) or next_event(job)
            left -= isinstance(event, ChoiceEnded)
            _note(outcome, event)
    finally:
        engine.release(job)
    return outcome


def next_event(job: Job) -> JobEvent:
    """The next event; fails the test if none comes."""
    event = job.next_event(_WAIT_S)
    assert event is not None, "the engine went silent"
    return event


def wait_for(job: Job, kind: type, count: int = 1) -> None:
    """Read events until `count` of a kind have come."""
    while count:
        count -= isinstance(next_event(job), kind)


def drain(job: Job, quiet_s: float = 0.0) -> list[JobEvent]:
    """All events that are there, and those that come until it is quiet."""
    events = []
    while (event := job.next_event(quiet_s)) is not None:
        events.append(event)
    return events


def _note(outcome: Outcome, event: JobEvent) -> None:
    if isinstance(event, Prefilled):
        outcome.cached = event.cached
        outcome.chunks.append(event.done)
    elif isinstance(event, JobFailed):
        outcome.failure = event.error
    else:
        said = outcome.choices[event.choice]
        said.text += event.text
        if isinstance(event, Token):
            if event.logprob:
                said.logprobs.append(event.logprob)
        else:
            said.ids, said.reason = event.token_ids, event.reason
            said.stop_string = event.stop_string


def run(
    engine: TextEngine, ids: ModelIds, max_tokens: int = 16, **options: Any
) -> Outcome:
    """Submit and finish."""
    return finish(engine, submit(engine, ids, max_tokens, **options))


def library_run(app: App, engine: TextEngine, ids: ModelIds, count: int) -> list[int]:
    """What mlx-lm's own stream_generate says, greedy."""
    from mlx_lm import stream_generate

    model = engine.model

    def generate() -> list[int]:
        prompt = list(ids)
        said = stream_generate(model.model, model.tokenizer, prompt, max_tokens=count)
        return [response.token for response in said]

    return app.gpu.call(generate)


def plain_run(
    app: App,
    engine: TextEngine,
    ids: ModelIds,
    count: int,
    change: Callable[[list[int], np.ndarray], None],
) -> tuple[list[int], list[np.ndarray]]:
    """
    Greedy decoding without any cache: one full forward pass a token.

    Args:
        change: alters the logits in place, given all ids so far.
    Returns:
        The tokens, and the log-probabilities they were chosen by.
    """
    model = engine.model.model

    def generate() -> tuple[list[int], list[np.ndarray]]:
        so_far, rows = list(ids), []
        for _ in range(count):
            logits = np.array(model(mx.array([so_far]))[0, -1].astype(mx.float32))
            change(so_far, logits)
            rows.append(logits - np.logaddexp.reduce(logits))
            so_far.append(int(np.argmax(logits)))
        return so_far[len(ids) :], rows

    return app.gpu.call(generate)


def is_idle(engine: TextEngine, within_s: float = _WAIT_S) -> bool:
    """Whether the engine has no job left, soon."""
    deadline = time.monotonic() + within_s
    while engine._admission.num_open and time.monotonic() < deadline:
        time.sleep(0.005)
    return engine._admission.num_open == 0
