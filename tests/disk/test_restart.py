"""What was computed before a restart is not computed again, and changes nothing."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.config.disk_settings import DiskConfig
from sidecar.core.prompt import ModelIds
from testkit import planted
from testkit.jobs import random_ids
from testkit.kept_kv import ask, disk_counts, flush, kept_sidecar, leased, said, slots
from testkit.tiny_models import make_model

ModelFolder = Callable[[str], Path]
Cold = Callable[[str, ModelIds], tuple[int, ...]]
KINDS = ["dense", "hybrid", "sliding"]


def longer(ids: ModelIds, seed: int, length: int) -> ModelIds:
    return ModelIds(ids + random_ids(seed, length))


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on(
    kind: str, model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """Turn by turn, each over a restart; the last one goes on from all before it."""
    ids, before, model = random_ids(1, 200), ModelIds(()), model_folder(kind)
    for turn in range(4):
        with kept_sidecar(tmp_path, model) as app:
            outcome = ask(app, ids)
            answer = said(outcome)
            assert answer == cold(kind, ids)
            assert outcome.cached >= len(before) - 1
            if turn:
                assert disk_counts(app)["disk_damaged"] == 0
            before = ModelIds(ids + answer)
            ids = longer(before, 10 + turn, 50)
    assert slots(tmp_path)


def test_a_model_that_fails_its_test_of_the_disk_does_without(
    model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """It reads nothing of it and writes nothing, until it has passed again."""
    ids, asked = random_ids(1, 200), longer(random_ids(1, 200), 2, 40)
    root, model, tested = tmp_path, model_folder("dense"), {"CACHE_SELFTEST": "on_load"}
    with kept_sidecar(root, model, **tested) as app, leased(app) as resident:
        assert resident.engine.selftest["disk"] == "ok"
        ask(app, ids)
        flush(app)
    there = slots(root)
    assert there
    with (
        planted.shifted_slot(),
        kept_sidecar(root, model, **tested) as app,
        leased(app) as resident,
    ):
        assert resident.failed_tests == ("disk",)
        outcome = ask(app, asked)
        assert (outcome.cached, said(outcome)) == (0, cold("dense", asked))
        flush(app)
        assert slots(root) == there
    with kept_sidecar(root, model, **tested) as app:
        outcome = ask(app, asked)
        assert outcome.cached >= len(ids) - 1
        assert said(outcome) == cold("dense", asked)


@pytest.mark.parametrize("kind", KINDS)
def test_what_shares_a_beginning_is_stored_once(
    kind: str, model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """Siblings keep their own ends, and after a restart all are found."""
    common = random_ids(1, 300)
    talks = [longer(common, seed, 100) for seed in (2, 3, 4)]
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        for number, talk in enumerate(talks):
            talks[number] = ModelIds(talk + said(ask(app, talk)))
            flush(app)
        written = disk_counts(app)["disk_bytes_written"]
        with leased(app) as resident:
            survey = resident.engine.store.survey(talks[0], "")
    if kind == "dense":
        unique = len(common) + sum(len(talk) - len(common) for talk in talks)
        assert written <= 1.15 * unique * survey.token_bytes
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        for talk in talks:
            asked = longer(talk, 9, 40)
            outcome = ask(app, asked)
            assert outcome.cached >= len(talk) - 1
            assert said(outcome) == cold(kind, asked)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_end(
    kind: str, model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """A slot longer than what is shared serves as far as its layers allow."""
    ids = random_ids(1, 400)
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        ask(app, ids)
    edited = longer(ModelIds(ids[:250]), 5, 60)
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        outcome = ask(app, edited)
        assert said(outcome) == cold(kind, edited)
        assert outcome.cached == (250 if kind == "dense" else 0)


def test_a_prompt_shorter_than_its_slot(
    model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """All but its last token is brought back."""
    ids = random_ids(1, 400)
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        ask(app, ids)
    with kept_sidecar(tmp_path, model_folder("dense")) as app:
        outcome = ask(app, ModelIds(ids[:300]))
        assert outcome.cached == 299
        assert said(outcome) == cold("dense", ModelIds(ids[:300]))


@pytest.mark.parametrize(("length", "is_kept"), [(98, False), (99, True)])
def test_the_shortest_prompt(
    length: int, is_kept: bool, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Prompt and answer together, 99 or 100 tokens."""
    more = {"KV_DISK_MIN_PREFIX_TOKENS": "100"}
    ids = random_ids(1, length)
    with kept_sidecar(tmp_path, model_folder("dense"), **more) as app:
        ask(app, ids, 1)
    assert bool(slots(tmp_path)) is is_kept


def test_quantised_kv(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Packed, and packed from a depth on."""
    more = {"KV_BITS": "8", "KV_GROUP_SIZE": "32", "QUANTIZED_KV_START": "250"}
    first, model = random_ids(1, 200), model_folder("dense")
    second = longer(first, 2, 200)
    third = longer(second, 3, 50)
    with kept_sidecar(tmp_path, model, **more) as app:
        ask(app, first)
        flush(app)
        ask(app, second)
        flush(app)
        whole = said(ask(app, third))
    with kept_sidecar(tmp_path, model, **more) as app:
        outcome = ask(app, third)
        assert outcome.cached >= len(second)
        assert said(outcome) == whole
    with kept_sidecar(tmp_path, model) as app:  # other bits, another model
        assert ask(app, third).cached == 0


def test_nothing_is_written_unasked(model_folder: ModelFolder, tmp_path: Path) -> None:
    more = {"KV_DISK_PERSISTENCE": "false", "MLX_CACHE_HOME": str(tmp_path / "home")}
    with kept_sidecar(tmp_path, model_folder("dense"), **more) as app:
        ask(app, random_ids(1, 200))
    assert not list(tmp_path.rglob("*"))


def test_other_weights_in_the_same_folder(tmp_path: Path) -> None:
    """Replaced in place, with the old times: their KV is another's."""
    folder = make_model(tmp_path / "model", "dense")
    ids = random_ids(1, 200)
    with kept_sidecar(tmp_path / "kv", folder) as app:
        first = said(ask(app, ids))
    weights = folder / "model.safetensors"
    data, times = bytearray(weights.read_bytes()), weights.stat()
    data[-5000:] = bytes(5000)
    new = weights.with_suffix(".new")
    new.write_bytes(data)
    new.replace(weights)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    with kept_sidecar(tmp_path / "kv", folder) as app:
        outcome = ask(app, ids)
        assert outcome.cached == 0
        assert said(outcome) != first


def test_a_model_that_moved_keeps_its_own(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    ids = random_ids(1, 200)
    with kept_sidecar(tmp_path / "kv", model_folder("dense")) as app:
        ask(app, ids)
    moved = tmp_path / "elsewhere"
    shutil.copytree(model_folder("dense"), moved)
    with kept_sidecar(tmp_path / "kv", moved) as app:
        assert ask(app, longer(ids, 2, 40)).cached >= 199


@pytest.mark.parametrize(("shared", "cached"), [(999, 0), (1000, 1000)])
def test_a_match_is_read_back_from_a_thousand_tokens_on(
    shared: int, cached: int, model_folder: ModelFolder, cold: Cold, tmp_path: Path
) -> None:
    """By default; what is shorter is computed sooner than it is read."""
    ids, model = random_ids(3, 1200), model_folder("dense")
    more = {"KV_DISK_MIN_PREFIX_TOKENS": "1000", "MAX_KV_SIZE": "4096"}
    assert DiskConfig().min_tokens == 1000
    with kept_sidecar(tmp_path, model, **more) as app:
        ask(app, ids)
    asked = ModelIds((*ids[:shared], (ids[shared] + 1) % 900, *random_ids(4, 80)))
    with kept_sidecar(tmp_path, model, **more) as app:
        outcome = ask(app, asked)
        assert said(outcome) == cold("dense", asked)
        assert outcome.cached == cached
