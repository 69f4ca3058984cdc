"""A context that rotates: its first four tokens and its last ones, never others."""

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from sidecar.app import App
from sidecar.core.errors import BadRequest, ContextLengthExceeded
from sidecar.core.prompt import ModelIds
from sidecar.engine import source_maker
from sidecar.engine.gpu_scheduler import GpuScheduler
from sidecar.engine.job import Token
from sidecar.engine.text_engine import TextEngine
from testkit.jobs import (
    Outcome,
    finish,
    leased_engine,
    library_run,
    next_event,
    random_ids,
    run,
    submit,
)
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]
WINDOW, NUM_TOKENS = 48, 40


@pytest.fixture(scope="module", params=["dense", "hybrid", "sliding", "experts"])
def served(request: pytest.FixtureRequest, model_folder: ModelFolder) -> Iterator[App]:
    settings = {
        "MODEL_PATH": str(model_folder(request.param)),
        "PREFILL_STEP_SIZE": "32",
        "CACHE_SELFTEST": "on_load",
        "MAX_KV_SIZE": "1000",
    }
    with running_sidecar(settings) as app:
        yield app


@pytest.fixture
def engine(served: App) -> Iterator[TextEngine]:
    with leased_engine(served) as engine:
        engine.clear()
        yield engine


def by_library(app: App, engine: TextEngine, ids: ModelIds, count: int) -> list[int]:
    """Greedy ids by mlx-lm's rotating layers, one token after the other."""
    model = engine.model.model

    def generate() -> list[int]:
        cache = [
            RotatingKVCache(WINDOW, keep=4) if type(layer) is KVCache else layer
            for layer in engine.model.new_cache()
        ]
        said: list[int] = []
        fed = list(ids)
        while len(said) < count:
            logits = model(mx.array([[fed.pop(0)]]), cache=cache)
            mx.eval(logits)
            if not fed:
                said.append(int(mx.argmax(logits[0, -1]).item()))
                fed.append(said[-1])
        return said

    return app.gpu.call(generate)


def rotated(engine: TextEngine, ids: ModelIds, **options: object) -> Outcome:
    return run(engine, ids, NUM_TOKENS, context_len=WINDOW, **options)


@pytest.mark.parametrize(
    "length", [5, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 150]
)
def test_it_says_what_the_library_says(
    served: App, engine: TextEngine, length: int
) -> None:
    """Whether the prompt or the answer is what passes the window."""
    ids = random_ids(length, length)
    expected = by_library(served, engine, ids, NUM_TOKENS)
    for _ in range(2):  # the second time with what the first one left
        [said] = rotated(engine, ids).choices
        assert list(said.ids) == expected
        assert said.reason == "length"
    assert engine.store.check_integrity() == []


def test_what_it_says_is_read_as_it_is_said(served: App, engine: TextEngine) -> None:
    """Not at its end, whether it forgot before its first token or behind it."""
    loop, turns = engine._loop, GpuScheduler()
    turns.add(loop)
    for length in (150, WINDOW - 2):
        job = submit(engine, random_ids(3, length), NUM_TOKENS, context_len=WINDOW)
        served.gpu.remove_worker(loop)
        try:
            for _ in range(20):
                served.gpu.call(turns.take)
            read = [*iter(lambda job=job: job.next_event(0.0), None)]
        finally:
            served.gpu.add_worker(loop)
        assert sum(isinstance(event, Token) for event in read) >= 8
        engine.release(job)


def test_what_it_kept_serves_others(served: App, engine: TextEngine) -> None:
    """The first window is an ordinary prefix; what came behind it is nobody's."""
    ids = random_ids(1, 150)
    first = rotated(engine, ids)
    assert first.cached == 0
    again = rotated(engine, ids)
    whole = run(engine, ids, NUM_TOKENS)
    assert list(whole.choices[0].ids) == library_run(served, engine, ids, NUM_TOKENS)
    assert whole.cached <= WINDOW
    if not engine.store.needs_checkpoints:
        assert again.cached == WINDOW - 1
        assert whole.cached == WINDOW


def test_others_decode_beside_it_as_alone(served: App, engine: TextEngine) -> None:
    """Rows that rotate leave their batch; the others stay in theirs."""
    prompts = [random_ids(20 + n, n) for n in (10, WINDOW - 5, WINDOW, 90)]
    alone = [run(engine, ids, NUM_TOKENS).choices[0].ids for ids in prompts]
    expected = [by_library(served, engine, ids, NUM_TOKENS) for ids in prompts]
    engine.clear()
    jobs = [submit(engine, ids, NUM_TOKENS) for ids in prompts]
    rotating = [submit(engine, i, NUM_TOKENS, context_len=WINDOW) for i in prompts]
    assert [finish(engine, job).choices[0].ids for job in jobs] == alone
    found = [list(finish(engine, job).choices[0].ids) for job in rotating]
    assert found == expected
    assert [job.has_rotated for job in rotating] == [True] * 4
    assert engine.store.check_integrity() == []


def test_each_of_several_answers_rotates(served: App, engine: TextEngine) -> None:
    for length in (WINDOW - 5, 90):
        ids = random_ids(length, length)
        expected = by_library(served, engine, ids, NUM_TOKENS)
        found = rotated(engine, ids, n=3)
        assert [list(said.ids) for said in found.choices] == [expected] * 3


def test_drafts_end_where_the_window_is_full(
    served: App, engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that repeats a text is drafted until then, and said as without."""
    monkeypatch.setattr(engine._loop._decode_batches.prices, "of", lambda _: 1.0)
    monkeypatch.setattr(engine._source_maker, "add", source_maker._fill)
    ids = random_ids(4, WINDOW - 20)
    expected = by_library(served, engine, ids, NUM_TOKENS)
    source, real = [*ids[-4:], *expected], engine.submit
    monkeypatch.setattr(engine, "submit", lambda *a: real(*a, further=lambda: [source]))
    job = submit(engine, ids, NUM_TOKENS, context_len=WINDOW)
    [said] = finish(engine, job).choices
    assert list(said.ids) == expected
    assert job.has_rotated
    assert 0 < sum(count.accepted for count in job.draft_counts.values()) < 20


@pytest.mark.parametrize("options", [
    {"temperature": 0.9, "seed": 7},
    {"repetition_penalty": 1.3, "repetition_context_size": 20},
    {"top_logprobs": 3},
])  # fmt: skip
def test_a_row_keeps_its_own_draws(
    served: App, engine: TextEngine, options: dict[str, object]
) -> None:
    """Where a row leaves a batch of others in mid-answer, and where it is alone."""
    ids = random_ids(9, WINDOW - 10)
    [alone] = rotated(engine, ids, **options).choices
    beside = [submit(engine, random_ids(n, WINDOW - 10), 60) for n in (30, 31)]
    job = submit(engine, ids, NUM_TOKENS, context_len=WINDOW, **options)
    [said] = finish(engine, job).choices
    for other in beside:
        finish(engine, other)
    assert said.ids == alone.ids
    assert [one.token_id for one in said.logprobs] == [
        one.token_id for one in alone.logprobs
    ]


def test_a_cancelled_one_leaves_nothing_false(served: App, engine: TextEngine) -> None:
    ids = random_ids(3, WINDOW - 5)
    for num_read in (1, 8, 20):
        job = submit(engine, ids, 200, context_len=WINDOW)
        while num_read:
            num_read -= isinstance(next_event(job), Token)
        engine.release(job)
        assert list(run(engine, ids, NUM_TOKENS).choices[0].ids) == library_run(
            served, engine, ids, NUM_TOKENS
        )
    assert engine.store.check_integrity() == []


def test_what_cannot_be_is_refused(engine: TextEngine) -> None:
    maximum = engine.max_context
    for asked in (1, 15, maximum + 1):
        with pytest.raises(BadRequest, match=f"context_len must be 16..{maximum}"):
            submit(engine, random_ids(1, 8), context_len=asked)
    with pytest.raises(ContextLengthExceeded):
        submit(engine, random_ids(1, maximum))


@pytest.mark.parametrize("num_prompt", [20, WINDOW])
def test_a_context_that_is_long_enough_does_not_rotate(
    served: App, engine: TextEngine, num_prompt: int
) -> None:
    """The last token of an answer is fed to nobody, and needs no place."""
    ids = random_ids(1, num_prompt)
    for num_tokens, rotates in ((WINDOW - num_prompt + 1, False),
                                (WINDOW - num_prompt + 2, True)):  # fmt: skip
        job = submit(engine, ids, num_tokens, context_len=WINDOW)
        [said] = finish(engine, job).choices
        assert job.has_rotated == rotates
        assert list(said.ids) == by_library(served, engine, ids, num_tokens)


def test_a_whole_context_rotates_too(served: App, engine: TextEngine) -> None:
    """With the largest window that can be asked for."""
    maximum = engine.max_context
    ids = random_ids(2, maximum - 3)
    whole = run(engine, ids, 3).choices[0].ids
    job = submit(engine, ids, 6, context_len=maximum)
    assert finish(engine, job).choices[0].ids[:3] == whole
    assert job.has_rotated
