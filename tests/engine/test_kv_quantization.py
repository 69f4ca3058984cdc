"""KV_BITS: what mlx-lm says with quantised KV, reused exactly, in fewer bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import stream_generate

from sidecar.app import App
from sidecar.config.settings import Config, load_config
from sidecar.config.sources import ConfigError
from sidecar.core.errors import ModelLoadFailed
from sidecar.core.prompt import ModelIds
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.job import Token
from sidecar.engine.loading.loader import load
from sidecar.engine.loading.model_place import ModelSource
from sidecar.engine.loading.model_source import find_model
from sidecar.engine.memory_model import MemoryModel
from sidecar.engine.selftest.self_test import run_selftest
from sidecar.engine.text_engine import TextEngine
from sidecar.kv.kv_layers import is_quantized
from sidecar.kv.quantization import KVQuantization
from testkit.jobs import (
    finish,
    leased_engine,
    random_ids,
    run,
    submit,
    wait_for,
)
from testkit.servers import NO_FILE, running_sidecar

ModelFolder = Callable[[str], Path]

_GROUP = 32  # the tiny models' heads are that wide
_STEP = 64


def settings(folder: Path, bits: int, start: int = 0) -> dict[str, str]:
    return {
        "MODEL_PATH": str(folder),
        "KV_BITS": str(bits),
        "KV_GROUP_SIZE": str(_GROUP),
        "QUANTIZED_KV_START": str(start),
        "PREFILL_STEP_SIZE": str(_STEP),
    }


def library_says(
    app: App, engine: TextEngine, ids: ModelIds, count: int, bits: int, start: int
) -> list[int]:
    """mlx-lm's own generation with quantised KV, greedy."""
    model = engine.model

    def generate() -> list[int]:
        said = stream_generate(
            model.model, model.tokenizer, list(ids), max_tokens=count,
            kv_bits=bits, kv_group_size=_GROUP, quantized_kv_start=start,
            prefill_step_size=start or _STEP,  # the library quantises between chunks
        )  # fmt: skip
        return [response.token for response in said]

    return app.gpu.call(generate)


def nodes_of(engine: TextEngine) -> list[Any]:
    return list(engine.store._tree.nodes())


@pytest.mark.parametrize("start", [0, 100, 140], ids=["at once", "prefill", "decode"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_it_says_what_the_library_says(
    kind: str, bits: int, start: int, model_folder: ModelFolder
) -> None:
    """Wherever the quantising begins: both do it at the same token, if a chunk ends."""
    ids = random_ids(1, 130)
    with (
        running_sidecar(settings(model_folder(kind), bits, start)) as app,
        leased_engine(app) as engine,
    ):
        said = run(engine, ids, 24).choices[0]
        assert list(said.ids) == library_says(app, engine, ids, 24, bits, start)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_streams_side_by_side_say_what_each_says_alone(
    kind: str, model_folder: ModelFolder
) -> None:
    """mlx-lm's batch caches hold no quantised KV, so each has a lane of its own."""
    prompts = [random_ids(seed, length) for seed, length in ((1, 90), (2, 200))]
    with (
        running_sidecar(settings(model_folder(kind), 8)) as app,
        leased_engine(app) as engine,
    ):
        alone = [run(engine, ids, 20).choices for ids in prompts]
        engine.clear()
        jobs = [submit(engine, ids, 20) for ids in prompts]
        assert [finish(engine, job).choices for job in jobs] == alone


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_short_prompt_reads_no_quantised_kv_of_a_long_one(
    kind: str, model_folder: ModelFolder
) -> None:
    """Below the start its KV is in full; then both share that, in their own ways."""
    shared = random_ids(1, 200)
    long = ModelIds((*shared, *random_ids(2, 200)))
    shorts = [ModelIds((*shared, *random_ids(seed, 40))) for seed in range(3, 9)]
    with (
        running_sidecar(settings(model_folder(kind), 4, start=300)) as app,
        leased_engine(app) as engine,
    ):
        alone = []
        for ids in (long, *shorts):
            engine.clear()
            alone.append(run(engine, ids, 16).choices)
        engine.clear()
        ended = [run(engine, ids, 16) for ids in (long, *shorts, long)]
        assert [one.choices for one in ended] == [*alone, alone[0]]
        cached = [one.cached for one in ended]
        assert cached[:2] == [0, 0]
        assert ended[-1].cached == len(long) - 1 or kind == "hybrid"
        # A long prompt that parts before the start computes what follows on full KV.
        branch = ModelIds((*shared, *random_ids(9, 180)))
        warm = run(engine, branch, 16).choices
        engine.clear()
        assert run(engine, branch, 16).choices == warm
        if kind == "dense":  # the first short one left its own behind
            assert all(n >= 200 for n in cached[2:])
        assert engine.store.check_integrity() == []


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_warm_says_what_cold_says(
    kind: str, bits: int, model_folder: ModelFolder
) -> None:
    """Lent, copied and branched."""
    with (
        running_sidecar(settings(model_folder(kind), bits)) as app,
        leased_engine(app) as engine,
    ):
        first = random_ids(3, 150)
        nexts = [ModelIds((*first, *random_ids(seed, 60))) for seed in (4, 5)]
        cold = []
        for ids in nexts:
            engine.clear()
            cold.append(run(engine, ids, 20).choices)
        engine.clear()
        run(engine, first, 4)
        warm = [run(engine, ids, 20) for ids in nexts]
        assert [outcome.choices for outcome in warm] == cold
        assert all(outcome.cached >= 149 for outcome in warm)
        assert engine.store.check_integrity() == []


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_prompt_that_grows_past_the_start_says_what_it_says_cold(
    kind: str, model_folder: ModelFolder
) -> None:
    """Its KV is quantised at one depth, wherever the chunks of its turns end."""
    start = 300
    with (
        running_sidecar(settings(model_folder(kind), 4, start)) as app,
        leased_engine(app) as engine,
    ):
        told = []
        for seed, length in enumerate((240, 257, 281, 290, 297, 300, 301, 310)):
            first = random_ids(seed, length)
            grown = ModelIds((*first, *random_ids(seed + 50, 120)))
            engine.clear()
            cold = likely(engine, grown)
            engine.clear()
            run(engine, first, 2)
            warm = likely(engine, grown)
            assert warm[1] >= length - 1
            told.append(max(abs(a - b) for a, b in zip(cold[0], warm[0], strict=True)))
        assert max(told) < 1e-4, told


def likely(engine: TextEngine, ids: ModelIds) -> tuple[list[float], int]:
    """How likely a few greedy tokens are, and how much of the prompt was reused."""
    outcome = run(engine, ids, 6, top_logprobs=0)
    [said] = outcome.choices
    return [one.logprob for one in said.logprobs], outcome.cached


def test_a_path_stored_partly_plain_is_joined(model_folder: ModelFolder) -> None:
    """A short chat runs plain; another copies from it and goes on past the start."""
    with (
        running_sidecar(settings(model_folder("dense"), 8, start=160)) as app,
        leased_engine(app) as engine,
    ):
        short = random_ids(6, 100)
        middle = ModelIds((*short, *random_ids(7, 90)))  # past the start
        running = submit(engine, short, 40)
        wait_for(running, Token)
        run(engine, middle, 2)
        finish(engine, running)
        kinds = [is_quantized(n.buffer.arrays[0]) for n in nodes_of(engine)]
        assert set(kinds) == {True, False}
        again = run(engine, ModelIds((*middle, *random_ids(9, 20))), 12)
        assert again.cached >= len(middle)
        assert engine.store.check_integrity() == []
        expected = library_says(
            app, engine, ModelIds((*middle, *random_ids(9, 20))), 12, 8, 160
        )
        assert list(again.choices[0].ids) == expected


def test_the_store_holds_fewer_bytes(model_folder: ModelFolder) -> None:
    """fp32 in 8 bits, with a scale and a bias for 32: 10 bits of 32."""
    folder = model_folder("dense")
    held = {}
    for bits in ("OFF", "8"):
        with (
            running_sidecar({**settings(folder, 8), "KV_BITS": bits}) as app,
            leased_engine(app) as engine,
        ):
            run(engine, random_ids(10, 900), 2)
            held[bits] = engine.store.num_bytes
            key = engine.model.key
            assert ("8" in key.split()) == (bits == "8")
    assert held["8"] / held["OFF"] == pytest.approx(10 / 32, rel=0.1)


def test_the_way_of_reuse_is_proved_at_the_load(model_folder: ModelFolder) -> None:
    """The self-test runs on quantised KV, whatever the start."""
    quantization = KVQuantization(4, _GROUP, 5000)
    for kind in ("dense", "hybrid"):
        source = find_model(str(model_folder(kind)))

        def results(source: ModelSource = source) -> Any:
            model = load(source, trust=False, quantization=quantization)
            return run_selftest(model)

        found = gpu_thread().call(results)
        assert {r.outcome for r in found} == {"ok"}
        assert "batch" not in [r.name for r in found]


@pytest.mark.parametrize(
    ("kind", "group", "reason"),
    [("sliding", 32, "RotatingKVCache"), ("dense", 64, "divisible")],
)
def test_what_cannot_be_quantised_is_refused_at_the_start(
    kind: str, group: int, reason: str, model_folder: ModelFolder
) -> None:
    """With the settings to change, and the reason."""
    wanted = KVQuantization(8, group, 5000)
    source = find_model(str(model_folder(kind)))
    with pytest.raises(ModelLoadFailed, match=reason) as caught:
        gpu_thread().call(lambda: load(source, trust=False, quantization=wanted))
    assert f"KV_BITS=8, KV_GROUP_SIZE={group}" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [("KV_BITS", "3"), ("KV_GROUP_SIZE", "48"), ("KV_QUANT_SCHEME", "turboquant"),
     ("QUANTIZED_KV_START", "-1")],
)  # fmt: skip
def test_a_setting_out_of_range_stops_the_start(name: str, value: str) -> None:
    """Named, with what it may be."""
    with pytest.raises(ConfigError, match=name):
        load_config({name: value}, NO_FILE, {})


def test_it_is_off_by_default() -> None:
    """Quantising costs quality: only who asks gets it."""
    assert Config().cache.kv_bits == "OFF"


def test_the_memory_model_counts_the_plain_part() -> None:
    """Until it is quantised a sequence holds plain KV; later that bounds nothing."""
    model = MemoryModel(10, 0, 0, fixed=7, plain_per_token=40, plain_until=100)
    assert [model.kv_bytes(n) for n in (50, 100, 300, 1000)] == [
        2007, 4007, 4007, 10007,
    ]  # fmt: skip
