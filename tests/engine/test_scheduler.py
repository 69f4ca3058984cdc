"""The batch loop: parity with lone runs, ends, cancels, limits."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from sidecar.app import App
from sidecar.core.errors import (
    BadRequest,
    Busy,
    ContextLengthExceeded,
    GenerationFailed,
    Unavailable,
)
from sidecar.core.prompt import Boundary, ModelIds
from sidecar.engine.job import ChoiceEnded, Job, JobFailed, Prefilled, Token
from sidecar.engine.sampling import LogitsProcessor
from sidecar.engine.text_engine import TextEngine
from sidecar.kv.checkpoints import places_of_parting
from testkit.jobs import (
    Outcome,
    by_hand,
    drain,
    finish,
    leased_engine,
    library_run,
    next_event,
    plain_run,
    random_ids,
    run,
    submit,
    wait_for,
)
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]
KINDS = ["dense", "hybrid", "sliding"]
LENGTHS = (5, 70, 33, 150)  # the sliding window is 64
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, model_folder: ModelFolder) -> Iterator[App]:
    """A sidecar on each kind of model, with small prefill chunks."""
    folder = str(model_folder(request.param))
    with running_sidecar({"MODEL_PATH": folder, "PREFILL_STEP_SIZE": "32"}) as app:
        yield app


@pytest.fixture
def engine(served: App) -> Iterator[TextEngine]:
    with leased_engine(served) as engine:
        yield engine


@pytest.fixture(scope="module")
def dense(model_folder: ModelFolder) -> Iterator[App]:
    folder = str(model_folder("dense"))
    with running_sidecar({"MODEL_PATH": folder, "PREFILL_STEP_SIZE": "32"}) as app:
        yield app


@pytest.fixture
def dense_engine(dense: App) -> Iterator[TextEngine]:
    with leased_engine(dense) as engine:
        yield engine


def run_together(
    engine: TextEngine, prompts: list[ModelIds], **options: object
) -> list:
    jobs = [submit(engine, ids, NUM_TOKENS, **options) for ids in prompts]
    with ThreadPoolExecutor(len(jobs)) as readers:
        return list(readers.map(lambda job: finish(engine, job), jobs))


def test_a_batch_says_what_each_would_say_alone(
    served: App, engine: TextEngine
) -> None:
    """Greedy: four lengths at once, each alone, and mlx-lm's own loop are equal."""
    prompts = [random_ids(length, length) for length in LENGTHS]
    together = run_together(engine, prompts)
    for ids, outcome in zip(prompts, together, strict=True):
        (said,) = outcome.choices
        assert outcome.cached == 0
        assert list(said.ids) == library_run(served, engine, ids, NUM_TOKENS)
        assert run(engine, ids, NUM_TOKENS).choices == [said]
        assert said.reason == "length"


def test_a_row_that_was_alone_takes_in_another(engine: TextEngine) -> None:
    """In mid-text, past a sliding window: both say what each says alone."""
    first, second = random_ids(7, 50), random_ids(8, 90)
    alone = [run(engine, ids, 80).choices for ids in (first, second)]
    job = submit(engine, first, 80)
    for _ in range(30):
        next_event(job)
    late = run(engine, second, 80)
    early = finish(engine, job)
    assert late.choices == alone[1]
    assert early.choices[0].ids == alone[0][0].ids
    assert engine.store.check_integrity() == []


def test_the_text_is_that_of_the_tokens(dense_engine: TextEngine) -> None:
    """A raw completion goes on where its prompt ends, a leading space included."""
    for seed in range(20):
        said = run(dense_engine, random_ids(seed, 10), 4).choices[0]
        assert said.text == dense_engine.model.tokenizer.decode(list(said.ids))


def test_warm_says_what_cold_says(served: App, engine: TextEngine) -> None:
    """A prompt that extends a kept one, prefilled in chunks or at once: equal."""
    first = random_ids(41, 90)
    answer = run(engine, first, 8).choices[0].ids
    longer = ModelIds((*first, *answer, *random_ids(42, 50)))
    warm = run(engine, longer, NUM_TOKENS)
    assert warm.cached > 0
    wanted = library_run(served, engine, longer, NUM_TOKENS)
    assert list(warm.choices[0].ids) == wanted


def cold_and_warm(
    served: App, engine: TextEngine, number: int, /, **settings: object
) -> tuple[ModelIds, Outcome, Outcome]:
    """A prompt, and its answers before and after its beginning was computed."""
    first = random_ids(number, 60)
    answer = library_run(served, engine, first, 8)
    ids = ModelIds((*first, *answer, *random_ids(number + 1, 20)))
    cold = run(engine, ids, NUM_TOKENS, **settings)
    assert run(engine, first, 8).choices[0].ids == tuple(answer)
    warm = run(engine, ids, NUM_TOKENS, **settings)
    assert cold.cached == 0
    assert warm.cached >= 60
    return ids, cold, warm


def penalise(window: int, penalty: float) -> Callable[[list[int], np.ndarray], None]:
    """The definition, in numpy."""

    def change(ids: list[int], logits: np.ndarray) -> None:
        for token in set(ids[-window:]):
            value = logits[token]
            logits[token] = value / penalty if value > 0 else value * penalty

    return change


def test_penalties_see_the_same_history_warm_and_cold(
    served: App, engine: TextEngine
) -> None:
    """N3: with a window that reaches into the prompt, warm = cold = the definition."""
    settings = {"repetition_penalty": 0.5, "repetition_context_size": 25}
    ids, cold, warm = cold_and_warm(served, engine, 51, **settings)
    wanted, _ = plain_run(served, engine, ids, NUM_TOKENS, penalise(25, 0.5))
    assert list(cold.choices[0].ids) == wanted
    assert list(warm.choices[0].ids) == wanted
    plain, _ = plain_run(served, engine, ids, NUM_TOKENS, lambda _ids, _row: None)
    assert plain != wanted, "the penalty changed nothing: the test says nothing"


def test_a_seed_gives_the_same_tokens_alone_batched_warm_and_cold(
    served: App, engine: TextEngine
) -> None:
    """Sampling by seed does not notice the company or the cache."""
    settings = {
        "seed": 5, "temperature": 1.2, "top_p": 0.95, "top_k": 50, "min_p": 0.001,
        "repetition_penalty": 1.2, "presence_penalty": 0.1,
    }  # fmt: skip
    ids, cold, warm = cold_and_warm(served, engine, 61, **settings)
    others = [random_ids(63, 60), random_ids(64, 9)]
    batched = run_together(engine, [others[0], ids, others[1]], **settings)[1]
    assert cold.choices == warm.choices == batched.choices
    other_seed = run(engine, ids, NUM_TOKENS, **{**settings, "seed": 6})
    assert other_seed.choices != cold.choices


def test_several_answers_share_one_prefill(engine: TextEngine) -> None:
    """n = 3: greedy ones are equal to a lone run, seeded ones differ and repeat."""
    ids = random_ids(71, 100)
    three = run(engine, ids, NUM_TOKENS, n=3)
    assert three.chunks[-1] <= len(ids)
    assert three.choices == run(engine, ids, NUM_TOKENS).choices * 3
    settings = {"n": 3, "seed": 1, "temperature": 1.5}
    drawn = run(engine, ids, NUM_TOKENS, **settings)
    assert len({said.ids for said in drawn.choices}) == 3
    assert run(engine, ids, NUM_TOKENS, **settings).choices == drawn.choices


def test_cancelled_in_prefill_keeps_what_was_computed(
    served: App, engine: TextEngine
) -> None:
    """The next try begins where it stopped, and says what a cold run says."""
    ids = random_ids(81, 1500)
    job = submit(engine, ids)
    wait_for(job, Prefilled, 4)
    engine.release(job)
    again = run(engine, ids, NUM_TOKENS)
    assert 0 < again.cached < len(ids) - 1
    wanted = library_run(served, engine, ids, NUM_TOKENS)
    assert list(again.choices[0].ids) == wanted


def test_prompts_that_part_inside_a_message_leave_a_checkpoint_there(
    engine: TextEngine,
) -> None:
    """A group's and a direct message's system text: the third one begins behind it."""
    shared = random_ids(85, 700)
    prompts = [ModelIds((*shared, *random_ids(86 + n, 40))) for n in range(3)]
    for prompt in prompts[:2]:
        run(engine, prompt, 2)
    assert run(engine, prompts[2], 2).cached == len(shared)


def test_a_third_prompt_that_parts_a_little_earlier_begins_there_as_well(
    engine: TextEngine,
) -> None:
    """One token earlier; a model that can be cut goes on from there."""
    shared = random_ids(95, 700)
    tails = [random_ids(96 + n, 40) for n in range(3)]
    for prompt in (ModelIds((*shared, *tail)) for tail in tails[:2]):
        run(engine, prompt, 2)
    earlier = ModelIds((*shared[:-1], *tails[2]))
    assert run(engine, earlier, 2).cached >= len(shared) - 64


@pytest.mark.parametrize(
    ("message_ends", "depths"),
    [((), {636, 700}), ((100,), {100, 636, 700}), ((100, 690), {690, 700})],
)
def test_where_prompts_part_there_are_checkpoints_before_it(
    message_ends: tuple[int, ...], depths: set[int]
) -> None:
    """At the last message's end, a little before the parting, and at it."""
    ends = tuple(Boundary(depth, 3) for depth in (*message_ends, 900))
    assert {place.depth for place in places_of_parting(ends, 700)} == depths


def test_cancelled_in_prefill_frees_the_engine_within_a_chunk(
    dense_engine: TextEngine,
) -> None:
    """At most the chunk being computed still comes."""
    job = submit(dense_engine, random_ids(91, 6000))
    wait_for(job, Prefilled, 3)
    dense_engine.release(job)
    drain(job)
    late = drain(job, 0.1)
    assert len(late) <= 1
    assert all(isinstance(event, Prefilled) for event in late)
    assert run(dense_engine, random_ids(92, 10)).choices[0].reason == "length"


def test_cancelled_in_decode_frees_the_engine_within_a_step(
    dense_engine: TextEngine,
) -> None:
    """At most the step being computed still comes; its neighbour goes on."""
    neighbour = submit(dense_engine, random_ids(94, 10), 400)
    job = submit(dense_engine, random_ids(93, 10), 5000)
    wait_for(job, Token, 5)
    dense_engine.release(job)
    drain(job)
    assert len(drain(job, 0.1)) <= 1
    said = finish(dense_engine, neighbour).choices[0]
    assert len(said.ids) == 400
    assert run(dense_engine, random_ids(94, 10), 400).choices == [said]


def test_cancelled_in_the_queue_never_starts(model_folder: ModelFolder) -> None:
    """A job that gives up while it waits costs nothing."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "BATCH_MAX_SIZE": "1"}
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        with by_hand(app, engine) as make:
            first = submit(engine, random_ids(1, 10), 4000)
            make(2)
            second = submit(engine, random_ids(2, 10), 10)
            make(2)
            engine.release(second)
            engine.release(first)
        assert run(engine, random_ids(3, 10)).choices[0].reason == "length"
        assert drain(second) == []


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_stop_string_ends_the_text_before_it(
    dense_engine: TextEngine, cut: int
) -> None:
    """Wherever it falls between tokens: nothing of it is shown, reason stop."""
    ids = random_ids(101, 12)
    whole = run(dense_engine, ids, 30).choices[0].text
    stop = whole[20 : 20 + cut]
    first = whole.index(stop)
    ended = run(dense_engine, ids, 30, stop=("never", stop)).choices[0]
    assert ended.text == whole[:first]
    assert (ended.reason, ended.stop_string) == ("stop", stop)
    assert len(ended.ids) < 30


def test_a_stop_string_that_never_comes_changes_nothing(
    dense_engine: TextEngine,
) -> None:
    """What was held back is flushed at the length limit."""
    ids = random_ids(101, 12)
    plain = run(dense_engine, ids, 30).choices[0]
    last = plain.text[-1]
    watched = run(dense_engine, ids, 30, stop=(last + "\0",)).choices[0]
    assert watched == plain


def test_logprobs_are_those_of_the_model(dense: App, dense_engine: TextEngine) -> None:
    """The chosen token's and the best three, as a plain forward pass gives them."""
    ids = random_ids(111, 20)
    said = run(dense_engine, ids, 6, top_logprobs=3).choices[0]
    tokens, rows = plain_run(dense, dense_engine, ids, 6, lambda _ids, _row: None)
    assert [item.token_id for item in said.logprobs] == tokens
    for item, row in zip(said.logprobs, rows, strict=True):
        best = np.argsort(-row)[:3]
        assert [top[1] for top in item.top] == list(best)
        assert item.logprob == pytest.approx(row[item.token_id], abs=1e-3)
        assert [top[2] for top in item.top] == pytest.approx(list(row[best]), abs=1e-3)
        assert item.token == dense_engine.model.tokenizer.decode([item.token_id])


def test_logprobs_only_if_asked(dense_engine: TextEngine) -> None:
    """None asked: none made. Zero asked: the chosen token's alone."""
    ids = random_ids(111, 20)
    assert run(dense_engine, ids, 3).choices[0].logprobs == []
    bare = run(dense_engine, ids, 3, top_logprobs=0).choices[0].logprobs
    assert [item.top for item in bare] == [(), (), ()]


def test_the_models_end_of_turn_is_no_text(app: App) -> None:
    """The built-in model stops by itself; its end token is neither text nor id."""
    with leased_engine(app) as engine, app.pool.lease("local") as served:
        text = '<|im_start|>user\nSay "hi"<|im_end|>\n<|im_start|>assistant\n'
        ids = ModelIds(served.pipeline.encoder.encode(text).ids)
        said = run(engine, ids, 200).choices[0]
        assert said.reason == "stop"
        assert "<|im_end|>" not in said.text
        assert not engine.model.stop_ids & set(said.ids)


def test_jobs_run_side_by_side(dense: App, dense_engine: TextEngine) -> None:
    """A short answer does not wait for a long one that came first."""
    with by_hand(dense, dense_engine) as make:
        long = submit(dense_engine, random_ids(121, 10), 300)
        make(3)
        short = submit(dense_engine, random_ids(122, 10), 5)
        make(10)
    assert finish(dense_engine, short).choices[0].reason == "length"
    with by_hand(dense, dense_engine):
        events = drain(long)
    dense_engine.release(long)
    assert events
    assert not any(isinstance(event, ChoiceEnded) for event in events)


def test_tokens_are_handed_over_when_the_next_step_is_computed(
    dense: App, dense_engine: TextEngine
) -> None:
    """Not before, unless a prompt waits: its chunk would come in between."""
    loop = dense_engine._loop
    dense.gpu.remove_worker(loop)
    try:
        stream = submit(dense_engine, random_ids(125, 10), 5000)
        while not any(isinstance(event, Token) for event in drain(stream)):
            dense.gpu.call(lambda: loop.interrupt(beside_streams=False))
        seen = []
        for _ in range(4):
            dense.gpu.call(lambda: loop.decode(is_free=True))
            seen.append(len([e for e in drain(stream) if isinstance(e, Token)]))
        assert seen == [0, 0, 1, 1], "the first was told before its step"
        newcomer = submit(dense_engine, random_ids(126, 10), 2)
        dense.gpu.call(lambda: loop.decode(is_free=True))
        assert len(drain(stream)) == 2
    finally:
        dense.gpu.add_worker(loop)
    assert finish(dense_engine, newcomer).failure is None
    dense_engine.release(stream)


def test_a_long_prefill_does_not_starve_running_streams(
    dense: App, dense_engine: TextEngine
) -> None:
    """Between the chunks of a newcomer, the stream goes on."""
    with by_hand(dense, dense_engine) as make:
        stream = submit(dense_engine, random_ids(123, 10), 5000)
        make(2)
        newcomer = submit(dense_engine, random_ids(124, 3000), 2)
        num_chunks = num_tokens = 0
        while num_chunks < 10:
            make(1)
            num_chunks += sum(isinstance(e, Prefilled) for e in drain(newcomer))
            num_tokens += sum(isinstance(e, Token) for e in drain(stream))
    assert num_tokens >= 3
    assert finish(dense_engine, newcomer).failure is None
    dense_engine.release(stream)


def test_a_full_queue_is_busy(model_folder: ModelFolder) -> None:
    """429 with a time to come back; a released job's place can be taken."""
    settings = {
        "MODEL_PATH": str(model_folder("dense")),
        "MAX_CONCURRENT_REQUESTS": "1",
        "MAX_QUEUED_REQUESTS": "1",
    }
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        jobs = [submit(engine, random_ids(1, 5), 4000) for _ in range(2)]
        with pytest.raises(Busy) as caught:
            submit(engine, random_ids(1, 5))
        assert caught.value.retry_after_s is not None
        assert "2 places" in caught.value.message
        engine.release(jobs.pop())
        jobs.append(submit(engine, random_ids(1, 5)))
        for job in jobs:
            engine.release(job)
        assert engine._admission.num_open == 0


def test_waiting_too_long_in_the_queue_is_unavailable(
    model_folder: ModelFolder,
) -> None:
    """A job that gets no place in time fails; the running one does not notice."""
    settings = {
        "MODEL_PATH": str(model_folder("dense")),
        "BATCH_MAX_SIZE": "1",
        "QUEUE_TIMEOUT_SECONDS": "0.2",
    }
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        running = submit(engine, random_ids(1, 5), 30_000)
        wait_for(running, Token)
        waited = finish(engine, submit(engine, random_ids(2, 5)))
        assert isinstance(waited.failure, Unavailable)
        assert isinstance(next_event(running), Token)
        engine.release(running)


def test_the_context_limits_prompt_and_answer(model_folder: ModelFolder) -> None:
    """A prompt that leaves no room is refused; an answer gets what is left."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "MAX_KV_SIZE": "64"}
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        assert engine.max_context == 64
        with pytest.raises(ContextLengthExceeded, match="64 tokens.*has 64"):
            submit(engine, random_ids(1, 64))
        said = run(engine, random_ids(1, 60), 1000).choices[0]
        assert (len(said.ids), said.reason) == (4, "length")


@pytest.mark.parametrize(
    ("ids", "options", "param"),
    [
        ((), {}, "messages"),
        ((1, 1 << 20), {}, "prompt"),
        ((1, -1), {}, "prompt"),
        ((1,), {"n": 9}, "n"),
        ((1,), {"logit_bias": ((99999, 1.0),)}, "logit_bias"),
    ],
)
def test_what_the_model_cannot_take_is_refused(
    dense_engine: TextEngine, ids: tuple[int, ...], options: dict, param: str
) -> None:
    """Before it reaches the GPU thread, by a BadRequest that names the field."""
    with pytest.raises(BadRequest) as caught:
        submit(dense_engine, ModelIds(ids), **options)
    assert caught.value.param == param
    assert dense_engine._admission.num_open == 0


def test_a_draining_engine_takes_nothing_new(model_folder: ModelFolder) -> None:
    """What runs goes on to its end."""
    settings = {"MODEL_PATH": str(model_folder("dense"))}
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        running = submit(engine, random_ids(1, 5), 50)
        engine._admission.drain()
        with pytest.raises(Unavailable):
            submit(engine, random_ids(2, 5))
        assert finish(engine, running).choices[0].reason == "length"


FAILING = 77  # the max_tokens that marks the job whose processor fails


class FailsAt:
    """A logits processor that raises at its n-th call."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __call__(self, _tokens: mx.array, logits: mx.array) -> mx.array:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("planted")
        return logits


def failing(calls: int) -> Callable[[Job, int], list[LogitsProcessor]]:
    def processors(job: Job, _choice: int) -> list[LogitsProcessor]:
        return [FailsAt(calls)] if job.spec.max_tokens == FAILING else []

    return processors


def test_a_failure_at_the_first_token_fails_its_own_job_only(
    model_folder: ModelFolder,
) -> None:
    """The neighbour in the batch goes on, and so does the engine."""
    settings = {"MODEL_PATH": str(model_folder("dense"))}
    with running_sidecar(settings, failing(1)) as app, leased_engine(app) as engine:
        neighbour = submit(engine, random_ids(1, 10), 300)
        wait_for(neighbour, Token)
        failed = run(engine, random_ids(2, 10), FAILING)
        assert isinstance(failed.failure, GenerationFailed)
        assert len(finish(engine, neighbour).choices[0].ids) == 300


def test_a_failure_in_a_step_does_not_stop_the_engine(
    model_folder: ModelFolder,
) -> None:
    """The step's jobs fail, as their state is lost; the next job is served."""
    settings = {"MODEL_PATH": str(model_folder("dense"))}
    with running_sidecar(settings, failing(5)) as app, leased_engine(app) as engine:
        failed = run(engine, random_ids(2, 10), FAILING)
        assert isinstance(failed.failure, GenerationFailed)
        assert "planted" in failed.failure.message
        assert run(engine, random_ids(3, 10)).choices[0].reason == "length"


def test_a_failure_in_a_step_spares_who_was_not_in_it(
    model_folder: ModelFolder,
) -> None:
    """A job that waited in the queue had nothing to do with it and is served."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "BATCH_MAX_SIZE": "1"}
    with running_sidecar(settings, failing(30)) as app, leased_engine(app) as engine:
        doomed = submit(engine, random_ids(2, 10), FAILING)
        waiting = submit(engine, random_ids(3, 10), 5)
        assert isinstance(finish(engine, doomed).failure, GenerationFailed)
        assert finish(engine, waiting).failure is None


def test_job_failed_is_the_last_event(model_folder: ModelFolder) -> None:
    """Nothing comes after a failure."""
    settings = {"MODEL_PATH": str(model_folder("dense"))}
    with running_sidecar(settings, failing(3)) as app, leased_engine(app) as engine:
        job = submit(engine, random_ids(2, 10), FAILING)
        events = [next_event(job)]
        while not isinstance(events[-1], JobFailed):
            events.append(next_event(job))
        app.gpu.call(lambda: None)  # whatever else it would say is said
        events += drain(job)
        engine.release(job)
        assert isinstance(events[-1], JobFailed)
        assert sum(isinstance(event, JobFailed) for event in events) == 1
