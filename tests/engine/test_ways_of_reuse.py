"""What has not passed its self-test is not used; the rest is proved by and by."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from sidecar.app import App
from sidecar.engine import decode_batch
from sidecar.engine.decode_batch import DecodeBatch
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.job import Token
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import run_to_end
from sidecar.engine.scheduler import ChoiceRow
from sidecar.engine.selftest.self_test import Proof, ProofPlan, SelfTest, prove
from sidecar.engine.sequence import Sequence
from sidecar.engine.text_engine import TextEngine
from sidecar.kv.prefix_store import PrefixStore
from testkit import planted
from testkit.jobs import finish, leased_engine, random_ids, run, submit, wait_for
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]
_WAYS = {
    "chunks", "restore", "lend", "trim", "branch", "checkpoint", "disk", "batch",
    "ahead", "verify",
}  # fmt: skip
_WAIT_S = 120.0


def test_a_batch_that_is_wrong_is_not_used(model_folder: ModelFolder) -> None:
    """Parallel answers of such a model are those it gives alone."""
    settings = {"MODEL_PATH": str(model_folder("capped")), "CACHE_SELFTEST": "on_load"}
    prompts = [random_ids(i, 20 + 30 * i) for i in range(4)]
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        assert engine.selftest["batch"] == "failed"
        assert engine.selftest["restore"] == "ok"
        alone = [run(engine, ids, 12) for ids in prompts]
        jobs = [submit(engine, ids, 12) for ids in prompts]
        together = [finish(engine, job) for job in jobs]
        assert [t.failure for t in together] == [None] * 4
        assert [t.choices[0].ids for t in together] == [a.choices[0].ids for a in alone]


@pytest.mark.parametrize(
    ("fault", "failed", "passed"),
    [
        (planted.shifted_layer, "restore", "batch"),
        # What is restored is bit for bit what was computed, and yet not what is asked.
        (planted.looks_ahead, "chunks", "restore"),
    ],
    ids=["shifted layer", "looks ahead"],
)
def test_a_failed_way_of_reuse_is_not_used(
    fault: Callable[[], AbstractContextManager[None]],
    failed: str,
    passed: str,
    model_folder: ModelFolder,
) -> None:
    """Answers stay right: the prompt is computed again."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "on_load"}
    with fault(), running_sidecar(settings) as app, leased_engine(app) as engine:
        assert engine.selftest[failed] == "failed"
        assert engine.selftest[passed] == "ok"
        first, second = (run(engine, random_ids(1, 60), 8) for _ in range(2))
        assert second.cached == 0
        assert second.choices[0].ids == first.choices[0].ids


def _reversed(logits: mx.array) -> mx.array:
    return logits[..., ::-1]


def _refused(_logits: mx.array) -> mx.array:
    raise RuntimeError("there is no stream in this thread")


def _refused_with_two(logits: mx.array) -> mx.array:
    return _refused(logits) if len(logits) > 1 else logits


@pytest.mark.parametrize("fault", [_reversed, _refused, _refused_with_two])
def test_steps_that_are_wrong_ahead_are_described_in_their_turn(
    fault: Callable[[mx.array], mx.array],
    model_folder: ModelFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a device on which a second thread describes something else, or nothing."""
    forward = LoadedModel.forward
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "on_load"}

    def answer(*failed: str) -> tuple[int, ...]:
        with running_sidecar(settings) as app, leased_engine(app) as engine:
            assert engine.failed_tests == failed
            return run(engine, random_ids(1, 60), 12).choices[0].ids

    def faulty(*arguments: Any, **named: Any) -> mx.array:
        logits = forward(*arguments, **named)
        is_ahead = threading.current_thread().name == "describing"
        return fault(logits) if is_ahead else logits

    expected = answer()
    monkeypatch.setattr(LoadedModel, "forward", faulty)
    assert answer("ahead") == expected


@pytest.mark.parametrize("selftest", ["on_load", "off"])
def test_what_fails_while_it_is_used_is_shown(
    selftest: str, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Its test had passed; the answer is right, and no other step is tried.

    Nor after the model was unloaded and loaded again.
    """
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": selftest}
    forward = LoadedModel.forward

    def faulty(*arguments: Any, **named: Any) -> mx.array:
        if threading.current_thread().name == "describing":
            raise RuntimeError("there is no stream in this thread")
        return forward(*arguments, **named)

    def check_shown(app: App, engine: TextEngine) -> None:
        assert engine.failed_tests == ("ahead",)
        report = httpx.get(f"{app.url}/admin/cache", timeout=30).json()
        assert report["selftest"]["ahead"] == "failed"

    with running_sidecar(settings) as app:
        with leased_engine(app) as engine:
            assert engine.failed_tests == ()
            expected = run(engine, random_ids(1, 60), 12).choices[0].ids
            with monkeypatch.context() as planted_fault:
                planted_fault.setattr(LoadedModel, "forward", faulty)
                assert run(engine, random_ids(1, 60), 12).choices[0].ids == expected
            check_shown(app, engine)
            name = engine.model.name
        answer = httpx.post(f"{app.url}/admin/models/{name}/unload", timeout=60)
        assert answer.status_code == 200
        with leased_engine(app) as engine:
            check_shown(app, engine)
            assert run(engine, random_ids(1, 60), 12).choices[0].ids == expected


def test_a_step_that_no_thread_can_describe_is_described_in_its_turn(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system may give no more threads: no request fails for it."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "off"}

    def refused() -> None:
        raise RuntimeError("can't start new thread")

    with running_sidecar(settings) as app, leased_engine(app) as engine:
        expected = run(engine, random_ids(1, 60), 12).choices[0].ids
        monkeypatch.setattr(decode_batch, "describing_thread", refused)
        assert run(engine, random_ids(1, 60), 12).choices[0].ids == expected
        assert engine.failed_tests == ("ahead",)


def test_the_second_step_beside_the_first_is_proved_too(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a CPU, where no request has it described there."""
    original, began = DecodeBatch.__init__, list[bool]()

    def watched(batch: DecodeBatch, *args: Any, **named: Any) -> None:
        began.append(named.get("begins_alone", False))
        original(batch, *args, **named)

    monkeypatch.setattr(DecodeBatch, "__init__", watched)
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "on_load"}
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        assert engine.selftest["ahead"] == "ok"
        assert any(began)


def test_no_first_token_waits_for_the_step_behind_it(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes to be described."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "off"}
    forward, go, waited = LoadedModel.forward, threading.Event(), list[bool]()

    def slow(*arguments: Any, **named: Any) -> mx.array:
        if threading.current_thread().name == "describing":
            waited.append(go.wait(_WAIT_S))
        return forward(*arguments, **named)

    with running_sidecar(settings) as app, leased_engine(app) as engine:
        engine._loop._decode_batches.begins_ahead = True
        expected = run(engine, random_ids(1, 60), 12).choices[0].ids
        monkeypatch.setattr(LoadedModel, "forward", slow)
        job = submit(engine, random_ids(1, 60), 12)
        wait_for(job, Token)
        assert not waited
        go.set()
        assert finish(engine, job).choices[0].ids == expected
        assert waited[0]


@pytest.mark.parametrize("fails_at", ["first step", "first token", "telling it"])
def test_no_failed_row_is_let_go_while_its_next_step_is_described(
    fails_at: str, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads would change its layers; whoever asks next is answered right."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "off"}
    forward, abandon, async_eval = LoadedModel.forward, Sequence.abandon, mx.async_eval
    begun, go, beside = threading.Event(), threading.Event(), list[bool]()

    def slow(*arguments: Any, **named: Any) -> mx.array:
        if threading.current_thread().name == "describing":
            begun.set()
            assert go.wait(_WAIT_S)
        return forward(*arguments, **named)

    def fails(*_arguments: Any) -> None:
        assert begun.wait(_WAIT_S)
        threading.Timer(0.2, go.set).start()
        raise RuntimeError("planted")

    def watched(sequence: Sequence, store: PrefixStore) -> None:
        beside.append(not go.is_set())
        abandon(sequence, store)

    with running_sidecar(settings) as app, leased_engine(app) as engine:
        engine._loop._decode_batches.begins_ahead = True
        expected = run(engine, random_ids(1, 60), 12).choices[0].ids
        with monkeypatch.context() as planted_fault:
            planted_fault.setattr(LoadedModel, "forward", slow)
            planted_fault.setattr(Sequence, "abandon", watched)
            if fails_at == "first step":
                planted_fault.setattr(mx, "async_eval", fails)
            elif fails_at == "first token":
                planted_fault.setattr(DecodeBatch, "first_token", fails)
            else:
                planted_fault.setattr(ChoiceRow, "take_early", fails)
            assert run(engine, random_ids(1, 60), 12).failure is not None
        assert mx.async_eval is async_eval
        assert beside == [False]
        assert engine.failed_tests == ()
        assert run(engine, random_ids(1, 60), 12).choices[0].ids == expected


def test_without_a_self_test_steps_go_ahead(model_folder: ModelFolder) -> None:
    """As all ways of reuse are used then."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "off"}
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        assert engine._loop._decode_batches.ahead_limit.max_rows == math.inf


def test_what_the_load_has_no_time_for_is_proved_later(
    model_folder: ModelFolder,
) -> None:
    """Until then it is off, and said to be."""
    settings = {"MODEL_PATH": str(model_folder("dense"))}
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        batches = engine._loop._decode_batches

        def begin() -> tuple[dict[str, str], set[str], bool, float]:
            run_to_end(prove(engine, SelfTest(engine.model), ProofPlan(0.0)))
            told, off = dict(engine.selftest), set(engine.store.switched_off)
            return told, off, batches.may_batch, batches.ahead_limit.max_rows

        told, off, may_batch, max_rows_ahead = app.gpu.call(begin)
        splitter = {"splitter": "ok"}  # no way of reuse; tried before
        assert told == splitter | dict.fromkeys(_WAYS, "pending")
        assert off == _WAYS - {"batch", "ahead", "verify"}
        assert (may_batch, max_rows_ahead) == (False, 0)
        deadline = time.monotonic() + _WAIT_S
        while "pending" in engine.selftest.values():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert engine.selftest == splitter | dict.fromkeys(_WAYS, "ok")
        assert engine.store.switched_off == set()
        assert (batches.may_batch, batches.ahead_limit.max_rows) == (True, math.inf)


@pytest.mark.parametrize("waits_for", ["nobody", "a request"])
def test_a_running_request_goes_first(
    waits_for: str, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for ever: on a server that never rests nothing would be reused."""
    monkeypatch.setattr("sidecar.engine.selftest.self_test._PATIENCE_S", 1e9)
    settings = {"MODEL_PATH": str(model_folder("dense"))}
    with running_sidecar(settings) as app, leased_engine(app) as engine:

        def look() -> tuple[bool, bool]:
            is_idle = waits_for == "nobody"
            proof = Proof(SelfTest(engine.model), lambda _: None, lambda: is_idle)
            now = proof.has_work()
            monkeypatch.setattr("sidecar.engine.selftest.self_test._PATIENCE_S", -1.0)
            return now, proof.has_work()

        assert app.gpu.call(look) == (waits_for == "nobody", True)


def test_a_proof_ends(model_folder: ModelFolder) -> None:
    """An idle server does not turn round for nothing."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SELFTEST": "on_load"}
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        assert set(engine.selftest.values()) == {"ok"}
        assert not gpu_thread().call(lambda: gpu_thread()._turns.has_work())
