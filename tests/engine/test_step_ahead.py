"""A step that is described ahead is the one that would have been described in turn."""

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import BatchKVCache, KVCache

from sidecar.core.prompt import ModelPrompt
from sidecar.engine import decode_batch, decode_batches
from sidecar.engine.constrained_row import ConstrainedRow, Constraint
from sidecar.engine.decode_batch import DecodeBatch, for_readers_s
from sidecar.engine.decode_batches import DecodeBatches
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.job import JobSpec
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import finish, read_model, run_to_end
from sidecar.engine.loading.model_source import find_model
from sidecar.engine.sampling import Sampling
from sidecar.engine.selftest.rows import GREEDY
from sidecar.engine.selftest.self_test import SelfTest
from sidecar.engine.step_ahead import SavedState, max_rows_described
from sidecar.engine.vision.vision_encoder import FeatureMemo
from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import KVLayers, arrays_of, evaluate
from testkit.jobs import random_ids
from testkit.tiny_vision import make_seeing

KINDS = ["dense", "sliding", "hybrid", "experts"]
TinyModel = Callable[[str], LoadedModel]


@dataclass(frozen=True)
class Planned:
    """
    A row of a play.

    Args:
        joins: the step before which it joins. leaves: the one before which it is taken
            out; None: it says all.
    """

    length: int
    sampling: Sampling
    max_tokens: int
    joins: int = 0
    leaves: int | None = None
    num_top: int | None = None
    banned: tuple[int, ...] = ()
    shift: int = 0


@dataclass
class Played:
    """What was said, the layers of each row at its end, steps described ahead."""

    said: list[Any]
    layers: dict[int, list[list[Any]]]
    num_ahead: int


SAMPLINGS = (
    GREEDY,
    replace(GREEDY, temperature=1.0, top_p=0.9, top_k=20, seed=5),
    replace(GREEDY, temperature=0.7, repetition_penalty=1.3, seed=6),
    # Which of three is the likeliest hangs on how often each was said.
    replace(
        GREEDY,
        frequency_penalty=2.0,
        logit_bias=((7, 60.0), (8, 59.5), (9, 58.9)),
    ),
)
ROWS = st.builds(
    Planned,
    length=st.integers(2, 40),
    sampling=st.sampled_from(SAMPLINGS),
    max_tokens=st.integers(1, 30),
    joins=st.integers(0, 12),
    leaves=st.none() | st.integers(2, 30),
    num_top=st.sampled_from([None, None, 0, 3]),
    banned=st.sampled_from([(), (), (7, 256)]),
)
NO_GRAMMARS: Any = SimpleNamespace(stop_ids=())


class PanicException(BaseException):
    """As Rust code raises it."""


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each step that is described ahead."""
    rows, own = list[list[int]](), DecodeBatch._describe_ahead

    def watched(batch: DecodeBatch, stream: mx.Stream) -> None:
        rows.append([*batch.uids])
        own(batch, stream)

    monkeypatch.setattr(DecodeBatch, "_describe_ahead", watched)
    return rows


def prefilled(model: LoadedModel, ids: tuple[int, ...]) -> KVLayers:
    layers = model.new_cache()
    if len(ids) > 1:
        model.forward(mx.array([ids[:-1]]), layers)
    evaluate(layers)
    return layers


def values(layers: KVLayers) -> list[list[Any]]:
    """What layers hold, without the room behind a plain one's tokens."""
    found = []
    for layer in layers:
        state = layer.state[:2] if type(layer) is KVCache else layer.state
        arrays = [a.tolist() for a in state if isinstance(a, mx.array)]
        found.append([*arrays, getattr(layer, "offset", None)])
    return found


@contextmanager
def watched_steps() -> Iterator[list[bool]]:
    """Of each step, whether it was described ahead."""
    used: list[bool] = []
    own = DecodeBatch._take_ahead

    def take(batch: DecodeBatch) -> Any:
        step = own(batch)
        used.append(step is not None)
        return step

    DecodeBatch._take_ahead = take  # type: ignore[method-assign]
    try:
        yield used
    finally:
        DecodeBatch._take_ahead = own  # type: ignore[method-assign]


def new_batches(model: LoadedModel, is_allowed: bool) -> DecodeBatches:
    batches = DecodeBatches(model)
    batches.may_go_ahead(is_allowed)
    batches.begins_ahead = True  # as where a device computes
    return batches


def play(model: LoadedModel, plan: list[Planned], is_allowed: bool) -> Played:
    """Decode the rows of a plan on the GPU thread."""

    def decode() -> Played:
        batches, said, layers = new_batches(model, is_allowed), [], {}
        waiting, running, step = dict(enumerate(plan)), set[int](), 0
        while waiting or running:
            for uid in [u for u, row in waiting.items() if row.joins <= step]:
                row = waiting.pop(uid)
                ids = random_ids(uid, row.length)
                spec = JobSpec(
                    ModelPrompt(ids), row.sampling, row.max_tokens,
                    top_logprobs=row.num_top,
                    constraint=Constraint(NO_GRAMMARS, banned=row.banned)
                    if row.banned
                    else None,
                )  # fmt: skip
                layers_then = prefilled(model, ids)
                single = batches.begin(uid, spec, layers_then, shift=row.shift)
                batches.join(uid, single, len(ids))
                running.add(uid)
            for uid in [u for u in running if plan[u].leaves == step]:
                if uid % 2:  # the others' are not asked for
                    layers[uid] = values(batches.extract(uid))
                batches.remove([uid])
                running.remove(uid)
            for response in batches.next() if running else []:
                said.append((response.uid, response.token, response.logprobs))
                if response.finish_reason is not None:
                    layers[response.uid] = values(response.prompt_cache)
                    running.remove(response.uid)
            step += 1
        return Played(said, layers, 0)

    with watched_steps() as used:
        played = gpu_thread().call(decode)
    played.num_ahead = sum(used)
    return played


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_layers_are_the_same(kind: str, tiny_model: TinyModel) -> None:
    """Rows that join, end, are taken out, draw, are penalised, give logprobs."""
    model = tiny_model(kind)

    @settings(max_examples=12)
    @given(st.lists(ROWS, min_size=1, max_size=4))
    def same(plan: list[Planned]) -> None:
        ahead, in_turn = play(model, plan, True), play(model, plan, False)
        assert (ahead.said, ahead.layers) == (in_turn.said, in_turn.layers)
        assert in_turn.num_ahead == 0

    same()


@pytest.mark.parametrize("leaves", [None, 6, 7])
@pytest.mark.parametrize(
    "sampling", SAMPLINGS, ids=["greedy", "drawn", "penalised", "biased"]
)
def test_rows_that_stay_forget_what_was_described_in_vain(
    sampling: Sampling, leaves: int | None, tiny_model: TinyModel
) -> None:
    """Whenever another row ends, is taken out or joins."""
    plan = [
        Planned(8, sampling, 24), Planned(9, sampling, 25),
        Planned(10, sampling, 11, leaves=leaves), Planned(4, sampling, 9, joins=5),
    ]  # fmt: skip
    ahead, in_turn = (play(tiny_model("dense"), plan, way) for way in (True, False))
    assert (ahead.said, ahead.layers) == (in_turn.said, in_turn.layers)
    assert ahead.num_ahead > 10


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_all_steps_of_a_steady_batch_are(
    kind: str, tiny_model: TinyModel
) -> None:
    """But for the first, the last, and those in which a buffer grows."""
    plan = [Planned(20 + n, SAMPLINGS[n], 40) for n in range(4)]
    assert play(tiny_model(kind), plan, True).num_ahead >= 30


def test_a_row_alone_has_all_steps_but_its_first_described_ahead(
    tiny_model: TinyModel, described: list[list[int]]
) -> None:
    """Its second beside the first; one that begins beside others has none yet."""
    assert play(tiny_model("dense"), [Planned(9, GREEDY, 20)], True).num_ahead == 20
    plan = [Planned(9, GREEDY, 20), Planned(9, GREEDY, 8, joins=5)]
    play(tiny_model("dense"), plan, True)
    assert [0, 1] in described
    assert [1] not in described


@pytest.mark.parametrize(
    ("num_choices", "has_device", "is_described"),
    [(1, True, True), (2, True, False), (1, False, False)],
)
def test_a_second_step_is_described_beside_the_first_where_that_helps(
    num_choices: int, has_device: bool, is_described: bool, tiny_model: TinyModel
) -> None:
    """Beside further choices it would be in vain; a CPU has the first to compute."""
    model, ids = tiny_model("dense"), random_ids(1, 9)
    spec = JobSpec(ModelPrompt(ids), GREEDY, 20, n=num_choices)

    def begun() -> DecodeBatch:
        batches = new_batches(model, True)
        if not has_device:
            batches.begins_ahead = DecodeBatches(model).begins_ahead
        return batches.begin(0, spec, prefilled(model, ids))

    assert (gpu_thread().call(begun)._take_ahead() is not None) is is_described


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampling", SAMPLINGS[1:], ids=["drawn", "penalised", "biased"]
)
def test_a_row_that_leaves_at_once_leaves_what_its_prompt_left(
    sampling: Sampling, kind: str, tiny_model: TinyModel
) -> None:
    """The step that was described beside its first one is forgotten."""
    plan = [Planned(4, GREEDY, 5, joins=3), Planned(9, sampling, 20, leaves=0)]
    ahead, in_turn = (play(tiny_model(kind), plan, way) for way in (True, False))
    assert (ahead.said, ahead.layers) == (in_turn.said, in_turn.layers)
    assert 1 in ahead.layers


def test_buffers_that_are_full_grow_in_turn(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that computes, before the step that needs it."""
    grown, grow = list[tuple[str, int]](), kv_layers._grow

    def watched(atom: Any, num_tokens: int) -> None:
        grown.append((threading.current_thread().name, num_tokens))
        grow(atom, num_tokens)

    monkeypatch.setattr(kv_layers, "_grow", watched)
    plan = [Planned(200, GREEDY, 350), Planned(190, GREEDY, 340)]
    ahead = play(tiny_model("dense"), plan, True)
    by_ahead, grown[:] = [*grown], []
    in_turn = play(tiny_model("dense"), plan, False)
    assert (ahead.said, ahead.layers) == (in_turn.said, in_turn.layers)
    assert by_ahead == grown
    assert {name for name, _ in grown} == {"gpu"}
    assert len(grown) >= 4
    assert ahead.num_ahead >= 320


def test_what_is_described_ahead_copies_no_kv(tiny_model: TinyModel) -> None:
    """An array that somebody else holds is copied when it is written to."""
    model, length = tiny_model("dense"), 9000

    def most(is_allowed: bool) -> tuple[int, int]:
        ids = random_ids(1, length)
        layers = model.new_cache()
        for start in range(0, length - 1, 500):
            end = min(start + 500, length - 1)
            model.forward(mx.array([ids[start:end]]), layers)
            evaluate(layers)
        buffer = max(a.nbytes for a in arrays_of(layers))
        before = mx.get_active_memory()
        batches = new_batches(model, is_allowed)
        spec = JobSpec(ModelPrompt(ids), GREEDY, 60)
        batches.join(1, batches.begin(1, spec, layers), length)
        del layers
        for _ in range(10):
            batches.next()
        mx.clear_cache()
        mx.reset_peak_memory()
        for _ in range(10):
            batches.next()
        return mx.get_peak_memory() - before, buffer

    def measured(is_allowed: bool) -> tuple[int, int]:
        with watched_steps() as used:
            found = gpu_thread().call(lambda: most(is_allowed))
        assert (sum(used) >= 15) is is_allowed
        return found

    (ahead, buffer), (in_turn, _) = measured(True), measured(False)
    assert ahead < in_turn + buffer / 2


def test_only_the_describing_thread_describes_and_only_then(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass through the model runs beside another one."""
    model, seen, within = tiny_model("dense"), list[str](), threading.Lock()
    forward = LoadedModel.forward

    def watched(*arguments: Any, **named: Any) -> mx.array:
        assert within.acquire(blocking=False), "two at a time"
        try:
            seen.append(threading.current_thread().name)
            return forward(*arguments, **named)
        finally:
            within.release()

    monkeypatch.setattr(LoadedModel, "forward", watched)
    play(model, [Planned(9, GREEDY, 20), Planned(5, GREEDY, 25, joins=6)], True)
    assert set(seen) == {"gpu", "describing"}
    assert seen.count("describing") > seen.count("gpu")


def test_nothing_is_described_behind_the_last_step(
    tiny_model: TinyModel, described: list[list[int]]
) -> None:
    """How many tokens a row may have is known."""
    found = play(tiny_model("dense"), [Planned(9, GREEDY, 20)], True)
    assert len(described) == found.num_ahead > 15


@pytest.mark.parametrize("error", [ValueError, PanicException])
def test_a_step_that_cannot_be_described_ahead_is_described_in_turn(
    error: type[BaseException],
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says so once for all its batches, and the answers are the same."""
    monkeypatch.setattr(decode_batches, "_MAX_PADDING", -1)
    model = tiny_model("hybrid")
    plan = [Planned(9, SAMPLINGS[2], 20), Planned(9, GREEDY, 20)]
    expected, forward = play(model, plan, False), LoadedModel.forward

    def failing(*arguments: Any, **named: Any) -> mx.array:
        logits = forward(*arguments, **named)
        if threading.current_thread().name == "describing":
            raise error("there is no stream in this thread")
        return logits

    monkeypatch.setattr(LoadedModel, "forward", failing)
    with caplog.at_level(logging.ERROR):
        found = play(model, plan, True)
    assert (found.said, found.layers) == (expected.said, expected.layers)
    assert found.num_ahead == 0
    assert [r.message for r in caplog.records] == [
        "no more steps are described ahead: one could not be"
    ]


@pytest.mark.parametrize(
    ("expected", "reads"),
    [
        (0, lambda ids, _: ids.tolist()),
        (1, lambda ids, layers: len(ids) > 1 and layers[0].offset.tolist()),
        (0, lambda _, layers: mx.eval(layers[0].keys)),
    ],
    ids=["the tokens", "how deep rows are", "the keys"],
)
def test_a_pass_that_computes_is_found(
    expected: float, reads: Callable[[mx.array, KVLayers], Any], tiny_model: TinyModel
) -> None:
    """Two threads would compute one array at a time."""
    model = tiny_model("dense")

    def forward(ids: mx.array, layers: KVLayers) -> mx.array:
        logits = model.forward(ids, layers)
        reads(ids, layers)
        return logits

    gpu = gpu_thread()
    most = gpu.call(lambda: max_rows_described(forward, model.new_cache))
    assert (most, model.max_rows_ahead) == (expected, math.inf)


@pytest.mark.parametrize(
    ("kind", "max_rows_ahead"),
    [("seeing", math.inf), ("seeing-25", math.inf), ("seeing-sliding", math.inf),
     ("seeing-hybrid", 1)],
)  # fmt: skip
def test_models_that_see_go_ahead_unless_they_compute(
    kind: str, max_rows_ahead: float, tmp_path: Path
) -> None:
    """mlx-vlm's qwen3_5 reads its padding in Python at each step."""
    source = find_model(str(make_seeing(tmp_path / kind, kind)))

    def read() -> LoadedModel:
        steps = read_model(source, trust=False, memo=FeatureMemo(1 << 20))
        return run_to_end(finish(run_to_end(steps), None))

    gpu = gpu_thread()
    model = gpu.call(read)
    assert gpu.call(lambda: model.max_rows_ahead) == max_rows_ahead
    plan = [Planned(20, GREEDY, 30, shift=3), Planned(9, GREEDY, 12, joins=9)]
    ahead, in_turn = (play(model, plan, way) for way in (True, False))
    assert (ahead.said, ahead.layers) == (in_turn.said, in_turn.layers)
    assert ahead.num_ahead > 10
    gpu.call(model.release)


def test_layers_that_cannot_be_given_back_are_found(tiny_model: TinyModel) -> None:
    """Such as hold another cache, which is changed as well."""
    model = tiny_model("dense")

    class Nested(BatchKVCache):  # type: ignore[misc]
        def __init__(self, left_padding: list[int]) -> None:
            super().__init__(left_padding)
            self.inner = BatchKVCache(left_padding)

    class Single(KVCache):  # type: ignore[misc]
        def merge(self, caches: list[KVCache]) -> Nested:
            return Nested([0] * len(caches))

    gpu = gpu_thread()
    layers = model.new_cache()
    most = gpu.call(
        lambda: max_rows_described(model.forward, lambda: [Single() for _ in layers])
    )
    assert most == 1


def test_the_self_test_goes_ahead_alone_and_beside_others(
    tiny_model: TinyModel, described: list[list[int]]
) -> None:
    """From a row's second step on."""
    test = SelfTest(tiny_model("dense"))
    for name in {*test.pending} - {"ahead"}:
        test.skip(name)
    result = gpu_thread().call(lambda: run_to_end(test.advance()))
    assert (result.name, result.outcome) == ("ahead", "ok")
    assert described[:3] == [[0], [0], [0]]
    assert [0, 1] in described


def test_what_could_not_be_described_once_stays_off(tiny_model: TinyModel) -> None:
    """However often it is allowed; a running batch forgets what it has described."""
    model, ids = tiny_model("dense"), random_ids(1, 9)

    def check() -> None:
        batches = new_batches(model, True)
        spec = JobSpec(ModelPrompt(ids), GREEDY, 30)
        batches.join(0, batches.begin(0, spec, prefilled(model, ids)), len(ids))
        (batch,) = batches._batches
        assert batch._ahead is not None
        batches.may_go_ahead(False)
        assert batch._ahead is None
        batches.next()
        assert batch._ahead is None
        batches.may_go_ahead(True)
        batches.next()
        assert batch._ahead is not None
        batches.ahead_limit.fail()
        batches.may_go_ahead(True)
        assert batches.ahead_limit.max_rows == 0

    gpu_thread().call(check)


@pytest.mark.parametrize("is_allowed", [True, False], ids=["ahead", "in turn"])
def test_what_a_test_forces_sees_no_step_in_vain(
    is_allowed: bool, tiny_model: TinyModel
) -> None:
    """Also where steps may go ahead only after it has joined."""
    model, ids, seen = tiny_model("dense"), random_ids(1, 9), list[int]()

    def watch(said: mx.array, logits: mx.array) -> mx.array:
        seen.append(said.shape[0])
        return logits

    def check() -> None:
        batches = new_batches(model, is_allowed)
        spec = JobSpec(ModelPrompt(ids), GREEDY, 30)
        layers = prefilled(model, ids)
        single = batches.begin(0, spec, layers, processors=[watch])
        batches.join(0, single, len(ids))
        batches.may_go_ahead(True)
        for _ in range(5):
            batches.next()
        assert batches.ahead_limit.num_taken == 0
        assert seen == [1, 2, 3, 4, 5, 6]

    gpu_thread().call(check)


def test_a_row_that_is_held_to_something_is_described_in_turn(
    tiny_model: TinyModel,
) -> None:
    """Its mask hangs on the token before; beside it no other row goes ahead."""
    plan = [Planned(9, GREEDY, 20, banned=(7,)), Planned(8, GREEDY, 20)]
    assert play(tiny_model("dense"), plan, True).num_ahead == 0
    plan[1] = Planned(8, GREEDY, 40)
    assert play(tiny_model("dense"), plan, True).num_ahead >= 15


@pytest.mark.parametrize("is_allowed", [True, False], ids=["ahead", "in turn"])
@pytest.mark.parametrize("window", [None, 20], ids=["among others", "of its own"])
def test_what_stands_for_a_token_is_fed_from_the_first_on(
    is_allowed: bool, window: int | None, tiny_model: TinyModel
) -> None:
    """In a batch that was empty before, and in one of its own; as computed at once."""
    dense, ids = tiny_model("dense"), random_ids(0, 60)
    [first, *_] = play(dense, [Planned(60, GREEDY, 2)], False).said
    model = replace(dense, printed_stops={first[1]: 11})

    def said() -> list[int]:
        spec = JobSpec(ModelPrompt(ids), GREEDY, 12)
        batches, tokens = new_batches(model, is_allowed), list[int]()
        single = batches.begin(0, spec, prefilled(model, ids))
        batches.join(0, single, len(ids), window=window)
        while batches.has_rows:
            tokens += [response.token for response in batches.next()]
        return tokens

    def expected() -> list[int]:
        tokens, layers = list[int](), prefilled(model, ids)
        fed = ids[-1]
        for _ in range(12):
            logits = model.forward(mx.array([[fed]]), layers)
            token = int(mx.argmax(logits[0, -1]).item())
            tokens.append(token)
            fed = 11 if token == first[1] else token
        return tokens

    found = gpu_thread().call(said)
    assert found == gpu_thread().call(expected)
    assert found[0] == first[1]


@pytest.mark.parametrize("is_allowed", [True, False], ids=["ahead", "in turn"])
def test_a_grammar_is_told_each_token(
    is_allowed: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one, too, of rows that begin alone and beside others."""
    taken, take = list[tuple[int, int]](), ConstrainedRow.take

    def watched(row: ConstrainedRow, token: int) -> None:
        taken.append((id(row), token))
        take(row, token)

    monkeypatch.setattr(ConstrainedRow, "take", watched)
    plan = [
        Planned(9, GREEDY, 8, banned=(7,)),
        Planned(8, GREEDY, 9, banned=(7,), joins=3),
    ]
    found = play(tiny_model("dense"), plan, is_allowed)
    rows = list(dict.fromkeys(row for row, _ in taken))
    for uid, row in enumerate(rows):
        said = [token for of, token, _ in found.said if of == uid]
        told = [token for of, token in taken if of == row]
        assert told == said
    assert len(rows) == 2


def test_readers_go_first_where_there_is_time() -> None:
    """Half of what MLX takes longer; a quarter of a millisecond each, three at most."""
    assert for_readers_s(16, 0.010) == 0.003
    assert for_readers_s(2, 0.010) == 0.0005
    assert for_readers_s(16, 0.002) == 0.001
    assert for_readers_s(16, 0.0) == for_readers_s(16, -0.001) == 0.0


def test_readers_are_given_that_time(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step that is described ahead on."""
    slept = list[float]()
    clock = SimpleNamespace(perf_counter=itertools.count().__next__, sleep=slept.append)
    monkeypatch.setattr(decode_batch, "time", clock)
    monkeypatch.setattr(decode_batch, "_READERS_S", 100.0)
    batches = play(tiny_model("dense"), [Planned(9, GREEDY, 20)], True)
    assert len(slept) == batches.num_ahead
    assert max(slept) > 0


def test_state_is_given_back_whole() -> None:
    """What was assigned within it, what was replaced, what was not there."""

    def check() -> None:
        layer = SimpleNamespace(keys=mx.zeros(3), offset=4, cache=[mx.ones(2), None])
        before = SavedState([layer])
        layer.keys[1] = 5.0
        layer.cache[0] += 1
        layer.cache[1] = mx.ones(1)
        layer.offset, layer.added = 5, True
        before.restore()
        assert layer.keys.tolist() == [0, 0, 0]
        assert (layer.cache[0].tolist(), layer.cache[1]) == ([1, 1], None)
        assert (layer.offset, hasattr(layer, "added")) == (4, False)

    gpu_thread().call(check)


def test_quantised_kv_is_not_described_ahead(tiny_model: TinyModel) -> None:
    """Its layers take the place of plain ones at a depth of their own."""
    model = tiny_model("dense")
    quantized: Any = SimpleNamespace(
        start=0, bits=8, group_size=64, apply=lambda _: None
    )
    found = play(replace(model, quantization=quantized), [Planned(9, GREEDY, 20)], True)
    assert found.num_ahead == 0
