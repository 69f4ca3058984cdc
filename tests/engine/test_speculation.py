"""Speculated answers are those of plain steps, token for token, whatever is drafted."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import App
from sidecar.core.prompt import ModelIds
from sidecar.engine import source_maker
from sidecar.engine.constrained_row import Constraint
from sidecar.engine.job import Job
from sidecar.engine.speculation import speculating_batch
from sidecar.engine.text_engine import TextEngine
from testkit.jobs import (
    Outcome,
    Said,
    by_hand,
    finish,
    leased_engine,
    random_ids,
    run,
    step_until,
    submit,
)
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]
KINDS = ["dense", "hybrid", "sliding", "quantized"]
CASES = 40  # tests/rest.txt has most of them


def _engine_of(
    kind: str, model_folder: ModelFolder
) -> Iterator[tuple[App, TextEngine]]:
    is_quantized = kind == "quantized"
    bits = {"KV_BITS": "8", "KV_GROUP_SIZE": "32", "QUANTIZED_KV_START": "60"}
    settings = {
        **(bits if is_quantized else {}),
        "MODEL_PATH": str(model_folder("dense" if is_quantized else kind)),
        "SPECULATION": "auto",
        "CACHE_SELFTEST": "off",
    }
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        # As if a longer call cost nothing: all that can be tried is.
        engine._loop._decode_batches.prices.of = lambda length: 1.0  # type: ignore[method-assign]
        # What may be repeated is known before the first step, however busy it is here.
        engine._source_maker.add = source_maker._fill  # type: ignore[method-assign]
        yield app, engine


@dataclass(frozen=True)
class Served:
    """A running sidecar and its engine."""

    app: App
    engine: TextEngine


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, model_folder: ModelFolder
) -> Iterator[Served]:
    for app, engine in _engine_of(request.param, model_folder):
        yield Served(app, engine)


@pytest.fixture(scope="module")
def hybrid(model_folder: ModelFolder) -> Iterator[tuple[App, TextEngine]]:
    yield from _engine_of("hybrid", model_folder)


def begun(engine: TextEngine, ids: ModelIds, said: Said, count: int) -> Job:
    """A greedy answer on nothing that was kept, drafted from what it will say."""
    engine.clear()
    with repeating(engine, [*ids[-4:], *said.ids]):
        return submit(engine, ids, count, temperature=0)


@contextmanager
def repeating(engine: TextEngine, source: list[int]) -> Iterator[None]:
    """What is submitted may repeat this."""
    real = engine.submit
    engine.submit = lambda *a: real(*a, further=lambda: [source])  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.submit


def some_options(chance: random.Random) -> dict[str, Any]:
    """What a request may ask of its sampling and its end."""
    options: dict[str, Any] = {"temperature": chance.choice([0, 0, 0.7, 1.2])}
    options["seed"] = chance.randrange(1000)
    if chance.random() < 0.3:
        options["repetition_penalty"] = 1.2
    if chance.random() < 0.2:
        options["presence_penalty"] = 0.7
    if chance.random() < 0.3:
        options |= {"top_k": 20, "top_p": 0.9}
    if chance.random() < 0.3:
        options["top_logprobs"] = chance.randrange(3)
    return options


def misread(ids: tuple[int, ...], share: float, chance: random.Random) -> list[int]:
    """Ids of which some are others."""
    return [chance.randrange(5, 3000) if chance.random() < share else i for i in ids]


def plain(engine: TextEngine, *asked: Any, **options: Any) -> Outcome:
    """Without speculation, on nothing that was kept."""
    config = engine._config
    engine.clear()
    engine._config = replace(config, speculation="off")
    try:
        return run(engine, *asked, **options)
    finally:
        engine._config = config


def speculated(
    engine: TextEngine, ids: Any, count: int, source: list[int], **options: Any
) -> tuple[Outcome, int]:
    """With a source; and how many tokens of it were taken."""
    engine.clear()
    taken: list[int] = []
    batches = engine._loop._decode_batches
    called = batches._speculated

    def counted() -> list[Any]:
        found = called()
        taken.append(len(found))
        return found

    batches._speculated = counted  # type: ignore[method-assign]
    try:
        with repeating(engine, source):
            return finish(engine, submit(engine, ids, count, **options)), sum(taken)
    finally:
        del batches._speculated


_FORMS = (
    r'start: "{\"name\": \"" /[a-z ]{0,40}/ "\", \"number\": " /[0-9]{1,12}/ "}"',
    r'start: ("the first line\n" | "the second line\n"){2,9}',
)


def some_constraint(engine: TextEngine, chance: random.Random) -> Constraint | None:
    """What an answer is held to: nothing, a form, or a number of thoughts."""
    kind, grammars = chance.choice(["", "", "form", "budget"]), engine.grammars
    if kind == "form":
        return Constraint(grammars, grammars.compile(chance.choice(_FORMS)))
    if kind == "budget":
        encode = engine.model.tokenizer.encode
        close = tuple(encode("</think>", add_special_tokens=False))
        budget = chance.randrange(1, 30)
        return Constraint(grammars, None, "</think>", budget=budget, close_ids=close)
    return None


@dataclass(frozen=True)
class Case:
    """A prompt, and what is asked of its answer."""

    ids: ModelIds
    count: int
    options: dict[str, Any]


def some_case(engine: TextEngine, seed: int) -> Case:
    """Drawn from a seed."""
    chance = random.Random(seed)
    ids = random_ids(seed, chance.choice([6, 40, 70, 150]))
    options = some_options(chance)
    options["constraint"] = some_constraint(engine, chance)
    if chance.random() < 0.2:
        options["stop"] = (chance.choice("aeiost"),)
    return Case(ids, chance.choice([12, 24, 48]), options)


def check_tokens(engine: TextEngine, seed: int) -> None:
    """What is said, and what is kept of it, are what plain steps say and keep."""
    case, chance = some_case(engine, seed), random.Random(seed + 1)
    ids = case.ids
    (said,) = plain(engine, ids, case.count, **case.options).choices
    source = [*ids[-4:], *misread(said.ids, chance.choice([0, 0.1, 0.4]), chance)]
    found, num_taken = speculated(engine, ids, case.count, source, **case.options)
    (one,) = found.choices
    assert (one.ids, one.text, one.reason) == (said.ids, said.text, said.reason)
    assert one.stop_string == said.stop_string
    assert len(one.logprobs) == len(said.logprobs)
    for mine, other in zip(one.logprobs, said.logprobs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=2e-3)
    is_right = source[4:] == list(said.ids) and not case.options["constraint"]
    if len(said.ids) > 20 and is_right:
        assert num_taken > len(said.ids) // 2
    if chance.random() < 0.7:
        return
    longer = ModelIds((*ids, *said.ids, *random_ids(seed + 1, 5)))
    again = run(engine, longer, 8).choices[0].ids
    assert again == plain(engine, longer, 8).choices[0].ids


def check_company(app: App, engine: TextEngine, seed: int) -> None:
    """Another row joins, and one of the two may be given up; neither changes."""
    case, chance = some_case(engine, seed), random.Random(seed + 1)
    other = some_case(engine, seed + 500)
    (said,) = plain(engine, case.ids, case.count, **case.options).choices
    (beside,) = plain(engine, other.ids, other.count, **other.options).choices
    engine.clear()
    source = [*case.ids[-4:], *misread(said.ids, chance.choice([0, 0.3]), chance)]
    with by_hand(app, engine) as step:
        with repeating(engine, source):
            jobs = [submit(engine, case.ids, case.count, **case.options)]
        step(chance.randrange(1, 12))
        jobs.append(submit(engine, other.ids, other.count, **other.options))
        step(chance.randrange(1, 6))
        gone = chance.choice([None, None, 0, 1])
        if gone is not None:
            jobs[gone].cancel()
            step(2)
    for place, expected in enumerate((said, beside)):
        if place == gone:
            engine.release(jobs[place])
        else:
            (one,) = finish(engine, jobs[place]).choices
            assert (one.ids, one.text, one.reason) == (
                expected.ids,
                expected.text,
                expected.reason,
            )
    assert engine.store.check_integrity() == []
    longer = ModelIds((*case.ids, *said.ids[:7], *random_ids(seed + 1, 5)))
    again = run(engine, longer, 8).choices[0].ids
    assert again == plain(engine, longer, 8).choices[0].ids


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("seed", range(CASES))
def test_the_tokens_are_those_of_plain_steps(
    served: Served, seed: int, monkeypatch: pytest.MonkeyPatch, *, is_padded: bool
) -> None:
    """Also with the buffers' whole length attended to, as on CUDA."""
    monkeypatch.setattr(speculating_batch, "is_attention_planned", lambda: is_padded)
    check_tokens(served.engine, seed)


@pytest.mark.parametrize("seed", range(CASES // 4))
def test_a_second_row_may_join_at_any_time(served: Served, seed: int) -> None:
    check_company(served.app, served.engine, seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_answers(
    served: Served, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four architectures: three of four alone, one beside another."""
    for seed in range(1000 + 125 * part, 1000 + 125 * (part + 1)):
        is_padded = bool(seed % 2)
        monkeypatch.setattr(
            speculating_batch, "is_attention_planned", lambda on=is_padded: on
        )
        try:
            if seed % 4:
                check_tokens(served.engine, seed)
            else:
                check_company(served.app, served.engine, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("seed", range(3))
def test_a_second_row_may_join_behind_a_draft_that_was_wrong(
    hybrid: tuple[App, TextEngine], seed: int
) -> None:
    """A state that went back is brought on before its row enters a batch."""
    app, engine = hybrid
    chance = random.Random(seed)
    ids, other = random_ids(seed, 40), random_ids(seed + 50, 30)
    expected = plain(engine, ids, 60, temperature=0).choices[0]
    beside = plain(engine, other, 20, temperature=0).choices[0]
    engine.clear()
    source = [*ids[-4:], *misread(expected.ids, 0.3, chance)]
    batches = engine._loop._decode_batches
    with by_hand(app, engine) as step:
        with repeating(engine, source):
            job = submit(engine, ids, 60, temperature=0)
        for _ in range(60):
            step(1)
            if any(batch._unfed for batch in batches._batches):
                break
        assert any(batch._unfed for batch in batches._batches)
        second = submit(engine, other, 20, temperature=0)
        step(4)
    assert finish(engine, second).choices[0].ids == beside.ids
    assert finish(engine, job).choices[0].ids == expected.ids


def test_a_stop_token_within_a_draft_ends_the_answer(
    hybrid: tuple[App, TextEngine],
) -> None:
    _, engine = hybrid
    ids, stops = random_ids(7, 40), engine.model.stop_ids
    said = plain(engine, ids, 40, temperature=0).choices[0].ids
    source = [*ids[-4:], *said]
    object.__setattr__(engine.model, "stop_ids", stops | {said[20]})
    try:
        expected = plain(engine, ids, 40, temperature=0).choices[0]
        found, num_taken = speculated(engine, ids, 40, source, temperature=0)
    finally:
        object.__setattr__(engine.model, "stop_ids", stops)
    assert expected.reason == "stop"
    assert num_taken
    assert (found.choices[0].ids, found.choices[0].reason) == (expected.ids, "stop")


def test_a_row_is_drafted_again_when_it_is_alone_again(
    hybrid: tuple[App, TextEngine],
) -> None:
    app, engine = hybrid
    ids, other = random_ids(3, 40), random_ids(4, 30)
    said = plain(engine, ids, 60, temperature=0).choices[0]
    batches = engine._loop._decode_batches
    with by_hand(app, engine) as step:
        job = begun(engine, ids, said, 60)
        step(2)
        second = submit(engine, other, 4, temperature=0)
        sizes = lambda: [len(batch.uids) for batch in batches._batches]  # noqa: E731
        step_until(step, lambda: sizes() == [2])
        calls = job.draft_counts["lookup"].calls
        step_until(step, lambda: sizes() == [1])
        assert finish(engine, second).choices[0].reason == "length"
        step_until(step, lambda: job.draft_counts["lookup"].calls > calls)
    assert finish(engine, job).choices[0].ids == said.ids


def test_no_draft_is_tried_while_another_prompt_is_computed(
    hybrid: tuple[App, TextEngine],
) -> None:
    """A run is longer than a step: whoever waits for a first token comes before."""
    app, engine = hybrid
    ids, other = random_ids(3, 40), random_ids(4, 700)
    said = plain(engine, ids, 60, temperature=0).choices[0]
    with by_hand(app, engine) as step:
        job = begun(engine, ids, said, 60)
        step(1)
        second = submit(engine, other, 4, temperature=0)
        while not engine._loop._rows or engine._loop.prefills:
            calls = sum(each.calls for each in job.draft_counts.values())
            step(1)
            if engine._loop.prefills:
                assert calls == sum(each.calls for each in job.draft_counts.values())
    finish(engine, second)
    assert finish(engine, job).choices[0].ids == said.ids


@pytest.mark.parametrize("length", [41, 45, 59])
def test_no_run_goes_past_the_token_where_kv_is_quantised(
    model_folder: ModelFolder, length: int
) -> None:
    """Before it plain steps attend to KV as it is, from it on to quantised KV."""
    for _, engine in _engine_of("quantized", model_folder):
        ids = random_ids(length, length)
        asked: dict[str, Any] = {"temperature": 0, "top_logprobs": 0}
        (said,) = plain(engine, ids, 60, **asked).choices
        source = [*ids[-4:], *said.ids]
        found, num_taken = speculated(engine, ids, 60, source, **asked)
        assert num_taken > 40
        for mine, other in zip(found.choices[0].logprobs, said.logprobs, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-6)
