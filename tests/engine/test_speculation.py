"""Speculated answers are those of plain steps, token for token, whatever is drafted."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import App
from sidecar.engine.speculation import padded_kv
from sidecar.engine.text_engine import TextEngine
from testkit.jobs import (
    Outcome,
    by_hand,
    finish,
    leased_engine,
    random_ids,
    run,
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
        yield app, engine


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, model_folder: ModelFolder
) -> Iterator[TextEngine]:
    for _, engine in _engine_of(request.param, model_folder):
        yield engine


@pytest.fixture(scope="module")
def hybrid(model_folder: ModelFolder) -> Iterator[tuple[App, TextEngine]]:
    yield from _engine_of("hybrid", model_folder)


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
    real = engine.submit
    engine.submit = lambda *a: real(*a, further=lambda: [source])  # type: ignore[method-assign]
    batches = engine._loop._decode_batches
    called = batches._speculated

    def counted() -> list[Any]:
        found = called()
        taken.append(len(found))
        return found

    batches._speculated = counted  # type: ignore[method-assign]
    try:
        return finish(engine, submit(engine, ids, count, **options)), sum(taken)
    finally:
        del engine.submit, batches._speculated


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("seed", range(CASES))
def test_the_tokens_are_those_of_plain_steps(
    engine: TextEngine, seed: int, monkeypatch: pytest.MonkeyPatch, *, is_padded: bool
) -> None:
    """Also with the buffers' whole length attended to, as on CUDA."""
    monkeypatch.setattr(padded_kv, "needs_padding", lambda: is_padded)
    chance = random.Random(seed)
    ids = random_ids(seed, chance.choice([6, 40, 70, 150]))
    options, count = some_options(chance), chance.choice([20, 40, 90])
    expected = plain(engine, ids, count, **options)
    (said,) = expected.choices
    source = [*ids[-4:], *misread(said.ids, chance.choice([0, 0.1, 0.4]), chance)]
    found, num_taken = speculated(engine, ids, count, source, **options)
    assert found.choices[0].ids == said.ids
    assert found.choices[0].text == said.text
    assert found.choices[0].reason == said.reason
    assert len(found.choices[0].logprobs) == len(said.logprobs)
    for one, other in zip(found.choices[0].logprobs, said.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=2e-3)
    if len(said.ids) > 30 and source[4:] == list(said.ids):
        assert num_taken > len(said.ids) // 2
    again = run(engine, (*ids, *said.ids, *random_ids(seed + 1, 5)), 8)
    assert (
        again.choices[0].ids
        == plain(engine, (*ids, *said.ids, *random_ids(seed + 1, 5)), 8).choices[0].ids
    )


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
    real, batches = engine.submit, engine._loop._decode_batches
    engine.submit = lambda *a: real(*a, further=lambda: [source])  # type: ignore[method-assign]
    with by_hand(app, engine) as step:
        job = submit(engine, ids, 60, temperature=0)
        del engine.submit
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
