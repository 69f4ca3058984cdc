"""Answers that a small model drafts are those of plain steps, whatever it drafts."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from sidecar.app import App
from sidecar.config.settings import ModelConfig, load_config
from sidecar.config.sources import ConfigError
from sidecar.core.prompt import ModelIds
from sidecar.engine import source_maker
from sidecar.engine.speculation import draft_model, padded_kv
from sidecar.engine.text_engine import TextEngine
from sidecar.residents.catalog import find_catalog
from sidecar.residents.draft_models import check_draft_settings
from sidecar.residents.model_settings import ModelSettings
from testkit.jobs import by_hand, finish, leased_engine, random_ids, run, submit
from testkit.raw_http import eventually
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model
from tests.engine.test_speculation import plain, some_case

NO_FILE = Path("no-such-file")
ModelFolder = Callable[[str], Path]


@contextmanager
def served(large: Path, draft: Path, **more: str) -> Iterator[tuple[App, TextEngine]]:
    """A sidecar whose calls of several tokens cost what one costs."""
    settings = {
        "MODEL_PATH": str(large),
        "DRAFT_MODEL": str(draft),
        "SPECULATION": "draft",
        "CACHE_SELFTEST": "off",
        **more,
    }
    with running_sidecar(settings) as app, leased_engine(app) as engine:
        small = engine._loop._decode_batches.draft_model
        assert small is not None
        small.prices.of = lambda length: 1.0  # type: ignore[method-assign]
        engine._source_maker.add = source_maker._fill  # type: ignore[method-assign]
        yield app, engine


@pytest.fixture(scope="module", params=["dense", "hybrid", "sliding"])
def alike(
    request: pytest.FixtureRequest, model_folder: ModelFolder
) -> Iterator[tuple[App, TextEngine]]:
    """Drafted for by the dense model; a dense one by itself."""
    with served(model_folder(request.param), model_folder("dense")) as found:
        yield found


def accepted(job: Any) -> int:
    """Tokens of the small model's drafts that were said."""
    return int(job.draft_counts["model"].accepted)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_tokens_are_those_of_plain_steps(
    alike: tuple[App, TextEngine],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_padded: bool,
) -> None:
    """Greedy, sampled, with penalties, filters, grammars and stop strings."""
    monkeypatch.setattr(draft_model, "is_attention_planned", lambda: is_padded)
    _, engine = alike
    case = some_case(engine, seed)
    (said,) = plain(engine, case.ids, case.count, **case.options).choices
    engine.clear()
    (one,) = run(engine, case.ids, case.count, **case.options).choices
    assert (one.ids, one.text, one.reason) == (said.ids, said.text, said.reason)
    longer = ModelIds((*case.ids, *said.ids, *random_ids(seed + 1, 5)))
    again = run(engine, longer, 8).choices[0].ids
    assert again == plain(engine, longer, 8).choices[0].ids
    assert engine.store.check_integrity() == []


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_model_that_drafts_for_itself_is_always_right(
    model_folder: ModelFolder, temperature: float
) -> None:
    """It draws with the row's own keys; each call says all that it drafted."""
    folder = model_folder("dense")
    with served(folder, folder) as (_, engine):
        for seed in range(3):
            ids = random_ids(seed, 50)
            job = submit(engine, ids, 60, temperature=temperature, seed=seed)
            (said,) = finish(engine, job).choices
            count = job.draft_counts["model"]
            assert len(said.ids) > 20
            assert count.accepted > len(said.ids) // 2
            assert count.drafted - count.accepted < 16  # of the last call, cut off


def test_it_drafts_with_the_right_keys_behind_plain_steps(
    model_folder: ModelFolder,
) -> None:
    """A plain step has the next one described, which draws with a key as well."""
    folder = model_folder("dense")
    with served(folder, folder) as (app, engine), by_hand(app, engine) as step:
        job = submit(engine, random_ids(1, 50), 200, temperature=1.0, seed=4)
        step(2)
        batches = engine._loop._decode_batches
        for _ in range(8):
            batches.may_speculate = False
            step(2)
            batches.may_speculate = True
            step(1)
        count = job.draft_counts["model"]
        assert count.drafted == count.accepted > 8
        engine.release(job)


def test_two_rows_in_turns_and_a_long_one(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is one row's end: it begins anew with the other's."""
    monkeypatch.setattr(draft_model, "_READ", 16)
    monkeypatch.setattr(draft_model, "_MOST_HELD", 40)
    folder = model_folder("dense")
    with served(folder, folder) as (app, engine):
        first, second = random_ids(1, 90), random_ids(2, 30)
        alone = [plain(engine, ids, 80).choices[0].ids for ids in (first, second)]
        engine.clear()
        with by_hand(app, engine) as step:
            jobs = [submit(engine, first, 80)]
            step(4)
            jobs.append(submit(engine, second, 80))
            step(6)
        found = [finish(engine, job).choices[0].ids for job in jobs]
        assert found == alone
        small = engine._loop._decode_batches.draft_model
        assert small is not None
        assert len(small._held) <= 40 + padded_kv.LONGEST_RUN


def test_an_id_beyond_its_rows_is_not_read(model_folder: ModelFolder) -> None:
    folder = model_folder("dense")
    with served(folder, folder) as (_, engine):
        small = engine._loop._decode_batches.draft_model
        assert small is not None
        drafter = small.drafter([5, small._model.vocab_size, 7], mx.argmax)
        assert drafter.propose(3, 5) == []


def test_another_vocabulary_is_refused(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """At load, with the number of tokens that differ."""
    other = make_model(tmp_path / "other", "dense")
    file = other / "tokenizer.json"
    text = file.read_text("utf-8").replace("<|im_end|>", "<|im_stop|>")
    file.write_text(text, "utf-8")
    words = r"\(DRAFT_MODEL\): other cannot .* differ in 2 tokens"
    with (
        pytest.raises(Exception, match=words),
        served(model_folder("dense"), other),
    ):
        pass


def test_a_model_that_cannot_be_cut_is_refused(model_folder: ModelFolder) -> None:
    with (
        pytest.raises(Exception, match="its KV cannot be cut back"),
        served(model_folder("dense"), model_folder("hybrid")),
    ):
        pass


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"SPECULATION": "auto", "DRAFT_MODEL": "a/b"}, "SPECULATION=draft only"),
        ({"DRAFT_MODEL": "a/b"}, "SPECULATION=draft only"),
        ({"SPECULATION": "draft"}, "needs DRAFT_MODEL"),
        ({"SPECULATION": "draft", "DRAFT_MODEL": "a/b"}, None),
        ({"SPECULATION": "off", "DRAFT_MODEL": "a/b"}, None),
        ({}, None),
    ],
)
def test_one_setting_without_the_other_is_refused(
    settings: dict[str, str], words: str | None, tmp_path: Path
) -> None:
    own = tmp_path / "model-settings.json"
    config = load_config({**settings, "MODEL_SETTINGS_PATH": str(own)}, NO_FILE, {})
    if words is None:
        check_draft_settings(config)
        return
    with pytest.raises(ConfigError, match=words):
        check_draft_settings(config)
    if "DRAFT_MODEL" not in settings:
        own.write_text('{"models": {"one": {"draft_model": "a/b"}}}')
        check_draft_settings(config)


def test_tokens_behind_a_stop_string_are_not_counted_as_said(
    model_folder: ModelFolder,
) -> None:
    folder = model_folder("dense")
    with served(folder, folder) as (_, engine):
        for seed in range(6):
            ids = random_ids(seed, 50)
            job = submit(engine, ids, 60, temperature=0.9, seed=seed, stop=("e",))
            (said,) = finish(engine, job).choices
            assert job.draft_counts["model"].accepted < max(1, len(said.ids))


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_small_model_that_fails_is_done_without(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """The answer is the one that it would have been; the next one has drafts."""
    folder, ids = model_folder("dense"), random_ids(3, 40)
    options = {"temperature": temperature, "seed": 5}
    with served(folder, folder) as (_, engine):
        (said,) = plain(engine, ids, 40, **options).choices
        engine.clear()
        real, calls = draft_model.DraftModel._logprobs, []

        def fail(self: draft_model.DraftModel, logits: mx.array) -> mx.array:
            calls.append(0)
            if len(calls) == 5:
                raise RuntimeError("out of memory")
            return real(self, logits)

        with monkeypatch.context() as patch:
            patch.setattr(draft_model.DraftModel, "_logprobs", fail)
            assert run(engine, ids, 40, **options).choices[0].ids == said.ids
            assert len(calls) == 5
        engine.clear()
        job = submit(engine, ids, 40, **options)
        assert finish(engine, job).choices[0].ids == said.ids
        assert job.draft_counts["model"].accepted > 0


def test_an_unload_gives_both_back(model_folder: ModelFolder) -> None:
    """At once, with the KV that the small one held."""
    folder = str(model_folder("dense"))
    settings = {"MODEL_PATH": folder, "DRAFT_MODEL": folder, "SPECULATION": "draft"}
    with running_sidecar(settings) as app:
        with leased_engine(app) as engine:
            run(engine, random_ids(3, 40), 40)
            small = engine._loop._decode_batches.draft_model
            assert small is not None
            assert small._cache == []
            weights = engine.model.all_bytes
            assert weights == 2 * engine.model.num_bytes
        began = time.monotonic()
        freed = app.pool.unload("local", force=True)
        assert freed >= weights
        assert time.monotonic() - began < 9  # what does not come back is waited for


@pytest.mark.parametrize("is_there", [False, True])
def test_a_fault_of_the_small_model_names_it(
    model_folder: ModelFolder, tmp_path: Path, *, is_there: bool
) -> None:
    if is_there:
        (tmp_path / "none").mkdir()
    with (
        pytest.raises(Exception, match=r"drafts for openai/dense \(DRAFT_MODEL\): "),
        served(model_folder("dense"), tmp_path / "none"),
    ):
        pass


def test_buffers_of_the_small_model_are_counted(model_folder: ModelFolder) -> None:
    """Its weights, and what it holds for the row that decodes."""

    def counted(app: App) -> int:
        app.gpu.call(app.shared.process.count_buffers)
        return app.shared.process.live_buffers

    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        alone = counted(app)
    with served(model_folder("dense"), model_folder("dense")) as (app, engine):
        with_draft = counted(app)
        assert with_draft == 2 * alone
        job = submit(engine, random_ids(3, 40), 4000, temperature=0)
        assert eventually(lambda: "model" in job.draft_counts and accepted(job) > 0)
        running = counted(app)
        num_layers = len(engine.model.new_cache())
        assert running >= with_draft + 4 * num_layers  # keys and values of both
        engine.release(job)


@pytest.mark.parametrize(
    ("speculation", "place", "words"),
    [
        ("auto", "MODEL", "SPECULATION=draft only, and SPECULATION=auto"),
        ("off", "MODEL", "SPECULATION=draft only, and SPECULATION=off"),
        ("draft", "/nonexistent", "there is no such folder"),
        ("draft", "FILE", "give the folder that holds the model"),
    ],
)
def test_a_draft_model_of_no_use_is_refused_when_it_is_set(
    speculation: str,
    place: str,
    words: str,
    model_folder: ModelFolder,
    tmp_path: Path,
) -> None:
    """Nothing is set then; the model goes on as it was."""
    folder = str(model_folder("dense"))
    (tmp_path / "file").touch()
    given = {"MODEL": folder, "FILE": str(tmp_path / "file")}.get(place, place)
    settings = {"MODEL_PATH": folder, "SPECULATION": speculation}
    if speculation == "draft":
        settings["DRAFT_MODEL"] = folder
    with running_sidecar(settings) as app:
        url = f"{app.url}/admin/models/local/settings"
        answer = httpx.post(
            url, json={"draft_model": given, "pinned": True}, timeout=60
        )
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "draft_model"
        assert words in error["message"]
        assert not app.pool.entry("local").pinned
        assert httpx.post(url, json={"draft_model": ""}, timeout=60).status_code == 200


def test_what_a_load_takes_has_the_small_model_in_it(
    model_folder: ModelFolder,
) -> None:
    folder = str(model_folder("dense"))
    config = ModelConfig(path=folder, draft_model=folder, places=())
    for wish, factor in ((None, 2), ("", 1)):
        wishes = {"local": ModelSettings(draft_model=wish)}
        (alone,) = find_catalog(config, wishes, 2048).specs
        (both,) = find_catalog(config, wishes, 2048, has_drafts=True).specs
        assert both.size_bytes == factor * alone.size_bytes > 0
