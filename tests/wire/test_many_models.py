"""
Several real models in one server: each loaded when asked for, answers as alone.

E16 with 50 rounds, and the 500 requests of the bar: `pytest -m slow`.
"""

import gc
import itertools
import json
import random
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sidecar.app import App
from sidecar.engine.loading import loader
from sidecar.infra.malloc import give_back_freed_pages
from sidecar.residents.model_state import ModelView
from testkit.raw_http import eventually
from testkit.servers import held_gpu, running_sidecar
from testkit.tiny_models import make_model

KINDS = ("dense", "hybrid", "sliding", "capped")
BUILTIN = Path(__file__).parents[2] / "sidecar" / "builtin_model"
TALK = [{"role": "user", "content": "tell me of " + "many small things " * 12}]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("many")
    for kind in KINDS:
        make_model(root / kind, kind)
    return root


@contextmanager
def serving(folder: Path, **settings: str) -> Iterator[App]:
    # Of these models one cannot be batched: its test at the load says so.
    named = {"MODEL_DIR": str(folder), "MODEL_PATH": str(folder / "dense"),
             "CACHE_SELFTEST": "on_load"}  # fmt: skip
    with running_sidecar({**named, **settings}) as app:
        yield app


def limit_of(app: App, *kinds: str) -> int:
    """So many bytes hold these models and their headroom, and no other."""
    sizes = {entry.id: entry.size_bytes for entry in app.pool.entries()}
    return int(sum(sizes[name(kind)] for kind in kinds) * 1.02)


def name(kind: str) -> str:
    return "openai/dense" if kind == "dense" else kind


def ask(app: App, model: str, talk: list[Json] = TALK, **more: Any) -> Json:
    body = {"model": model, "messages": talk, "max_tokens": 6, **more}
    url = f"{app.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def said(answer: Json) -> str:
    message = answer["choices"][0]["message"]
    return f"{message.get('reasoning_content')}|{message['content']}"


def entry(app: App, kind: str) -> ModelView:
    return app.pool.entry(kind)


def longer(answer: Json) -> list[Json]:
    message = dict(answer["choices"][0]["message"])
    said = {name: value for name, value in message.items() if value}
    return [*TALK, said, {"role": "user", "content": "go on"}]


def test_all_are_listed_before_any_is_loaded(folder: Path) -> None:
    with serving(folder) as app:
        listed = httpx.get(f"{app.url}/v1/models", timeout=60)
        found = {one["id"]: one["state"] for one in listed.json()["data"]}
        assert found == {
            "openai/dense": "loaded",
            **dict.fromkeys(("capped", "hybrid", "sliding"), "unloaded"),
        }
        tag = {"If-None-Match": listed.headers["etag"]}
        again = httpx.get(f"{app.url}/v1/models", headers=tag, timeout=60)
        assert (again.status_code, again.content) == (304, b"")


def test_each_answers_as_it_does_alone(folder: Path) -> None:
    """E27, the text models: interleaved, all at once, from four threads."""
    alone = {}
    for kind in KINDS:
        settings = {"MODEL_PATH": str(folder / kind), "CACHE_SELFTEST": "on_load"}
        with running_sidecar(settings) as app:
            alone[kind] = said(ask(app, "local"))
    with serving(folder) as app, ThreadPoolExecutor(4) as threads:
        asked = list(itertools.islice(itertools.cycle(KINDS), 16))
        answers = list(threads.map(lambda kind: said(ask(app, kind)), asked))
    assert answers == [alone[kind] for kind in asked]


def test_the_one_used_longest_ago_makes_room(folder: Path) -> None:
    with serving(folder) as app:
        limit = limit_of(app, "dense", "sliding")
    with serving(folder, MAX_MODEL_MEMORY=str(limit)) as app:
        ask(app, "dense")
        ask(app, "sliding")
        ask(app, "dense")
        ask(app, "capped")
        states = {e.id: e.state for e in app.pool.entries()}
        assert states["sliding"] == "unloaded"
        assert states["capped"] == "loaded"


def test_a_switch_and_back_costs_a_load_and_no_prefill(folder: Path) -> None:
    """E18: what comes then is what would have come without it."""
    with serving(folder, MAX_MODELS="1") as app:
        first = ask(app, "hybrid")
        talk = longer(first)
        ask(app, "dense")
        assert entry(app, "hybrid").state == "unloaded"
        after = ask(app, "hybrid", talk)
        assert entry(app, "hybrid").num_loads == 2
    with serving(folder) as app:
        assert ask(app, "hybrid")["choices"] == first["choices"]
        stayed = ask(app, "hybrid", talk)
        assert entry(app, "hybrid").num_loads == 1
    assert after["usage"] == stayed["usage"]
    assert said(after) == said(stayed)
    reused = after["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused >= 0.8 * first["usage"]["prompt_tokens"]


def test_what_another_model_said_instead_is_known(folder: Path) -> None:
    """A client may have another one answer again: what was said first is no more."""
    with serving(folder) as app:
        for kind in ("dense", "hybrid"):
            before = len(app.shared.tombstones)
            ask(app, kind, session_id="s")
            assert len(app.shared.tombstones) > before
            with app.pool.lease(kind) as leased:
                assert leased.memory.tombstones is app.shared.tombstones


def test_a_tokenizer_that_panics_is_a_failed_load(folder: Path, tmp_path: Path) -> None:
    """Rust code raises what is no Exception; the others are loaded as before."""
    for kind in ("dense", "sliding"):
        shutil.copytree(folder / kind, tmp_path / kind)
    shutil.copytree(folder / "dense", tmp_path / "panics")
    file = tmp_path / "panics" / "tokenizer.json"
    broken = {"type": "Precompiled", "precompiled_charsmap": ""}
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": broken}))
    with serving(tmp_path) as app:
        body = {"model": "panics", "messages": TALK, "max_tokens": 6}
        url = f"{app.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=120)
        assert answer.status_code == 500
        assert "model panics cannot be loaded" in answer.json()["error"]["message"]
        assert ask(app, "sliding")["choices"]


def test_a_tokenizer_that_panics_in_an_answer_fails_that_alone(tmp_path: Path) -> None:
    """On the GPU thread, which all models have in common."""
    for name in ("good", "panics"):
        shutil.copytree(BUILTIN, tmp_path / name)
    file = tmp_path / "panics" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    strip = {"type": "Strip", "content": "0", "start": 1, "stop": 1}
    decoders = {"type": "Sequence", "decoders": [tokenizer["decoder"], strip]}
    file.write_text(json.dumps({**tokenizer, "decoder": decoders}))
    zero = str(tokenizer["model"]["vocab"]["0"])
    named = {"MODEL_DIR": str(tmp_path), "MODEL_PATH": str(tmp_path / "good")}
    with running_sidecar(named) as app:
        body = {"model": "panics", "messages": TALK, "max_tokens": 6}
        url = f"{app.url}/v1/chat/completions"
        more = {"logit_bias": {zero: 100}, "enable_thinking": False}
        answer = httpx.post(url, json={**body, **more}, timeout=120)
        assert answer.status_code == 500
        for model in ("good", "panics"):
            assert ask(app, model)["choices"]


def test_cleared_while_it_was_away_it_is_forgotten(folder: Path) -> None:
    """What is not loaded is in reach of `forget` as well."""
    with serving(folder, MAX_MODELS="1") as app:
        first = ask(app, "hybrid")
        ask(app, "dense")
        held = app.shared.stored.num_bytes
        assert httpx.post(f"{app.url}/admin/cache/clear", timeout=60).is_success
        assert app.shared.stored.num_bytes == 0 < held
        again = ask(app, "hybrid", longer(first))
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_cleared_while_it_is_loaded_it_is_forgotten(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its place among the kept ones and that among the loaded ones."""
    with serving(folder) as app, ThreadPoolExecutor(1) as threads:
        first = ask(app, "hybrid")
        app.pool.unload("hybrid")
        reached, go = threading.Event(), threading.Event()

        def held(*_arguments: Any) -> Iterator[None]:
            reached.set()
            go.wait(120)
            yield

        monkeypatch.setattr("sidecar.residents.text_resident.warm_up", held)
        asked = threads.submit(ask, app, "hybrid", longer(first))
        assert reached.wait(120)
        clearing = threading.Thread(
            target=httpx.post, args=(f"{app.url}/admin/cache/clear",),
            kwargs={"timeout": 120},
        )  # fmt: skip
        clearing.start()
        assert eventually(
            lambda: app.shared.kept._borrowed[0].store.generation == 1, 120
        )
        go.set()
        clearing.join(120)
        usage = asked.result(240)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_weights_that_change_while_they_are_read_are_not_served(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their KV would be kept under the name of those that came after."""
    copy = tmp_path / "m"
    shutil.copytree(folder / "sliding", copy)
    (tmp_path / "dense").symlink_to(folder / "dense")
    with serving(tmp_path) as app:
        read = loader.load_tokenizer

        def replaced(*arguments: Any, **named: Any) -> Any:
            (copy / "model.safetensors").touch()
            return read(*arguments, **named)

        monkeypatch.setattr(loader, "load_tokenizer", replaced)
        body = {"model": "m", "messages": TALK}
        answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 500
        assert "changed while they were read" in answer.text


def test_who_talks_is_not_refused_for_a_load_that_is_already_there(
    folder: Path,
) -> None:
    """What has arrived is in use; it is not promised any more."""
    with serving(folder) as app:
        reserved: list[int] = []
        tell = app.pool._worker.load

        def noting(spec: Any, said: Any) -> Any:
            def step(name: str) -> None:
                said(name)
                reserved.append(app.shared.admission.reserved.held)

            return tell(spec, step)

        app.pool._worker.load = noting
        ask(app, "sliding")
        size = entry(app, "sliding").size_bytes
    assert reserved[:2] == [size, size]
    assert reserved[2:] == [0] * len(reserved[2:])


def test_conversations_need_not_outlive_a_model(folder: Path) -> None:
    with serving(folder, UNLOAD_KEEPS_KV="false") as app:
        ask(app, "sliding")
        stored = app.shared.stored.num_bytes
        assert httpx.post(f"{app.url}/admin/models/sliding/unload", timeout=60).json()
        assert app.shared.stored.num_bytes < stored


def test_kv_goes_by_its_worth_not_by_its_model(folder: Path) -> None:
    """E21: the oldest conversation leaves, whoever asks for the room."""
    with serving(folder, PROMPT_CACHE_MAX_ENTRIES_GLOBAL="2") as app:
        for model, number in (("dense", 1), ("dense", 2), ("capped", 3)):
            ask(app, model, [{"role": "user", "content": f"number {number} " * 20}])

        def cached(model: str, number: int) -> int:
            talk = [{"role": "user", "content": f"number {number} " * 20}]
            probe = {"model": model, "messages": talk}
            url = f"{app.url}/v1/cache/probe"
            return int(httpx.post(url, json=probe, timeout=60).json()["cached_tokens"])

        assert cached("dense", 1) < 10
        assert cached("dense", 2) > 30
        assert cached("capped", 3) > 30


def test_two_prompts_are_not_let_into_the_same_bytes(folder: Path) -> None:
    """E20: each fits alone, of whatever model."""
    with serving(folder, PRELOAD_MODELS="capped") as app:
        assert eventually(lambda: entry(app, "capped").state == "loaded", 120)
        ask(app, "dense"), ask(app, "capped")
        first, second = sorted(app.pool.loaded(), key=lambda one: one.name)
        text = {"messages": [{"role": "user", "content": "word " * 1500}]}
        url, probe = f"{app.url}/v1/cache/probe", {"model": "dense", **text}
        length = httpx.post(url, json=probe, timeout=60).json()["prompt_tokens"]
        one, other = (r.engine.guard.model.demand(length) for r in (first, second))
        process = app.shared.process

        def post(model: str) -> httpx.Response:
            body = {"model": model, "max_tokens": 2, **text}
            url = f"{app.url}/v1/chat/completions"
            return httpx.post(url, json=body, timeout=240)

        with ThreadPoolExecutor(2) as threads, held_gpu(app):
            free = (one + other).total - min(one.held, other.held) // 2
            process.limit_bytes += free - process.free_bytes
            asked = [threads.submit(post, model) for model in ("dense", "capped")]
            eventually(lambda: any(one.done() for one in asked), 60)
            num_open = app.shared.admission.num_open
    answers = sorted((one.result() for one in asked), key=lambda one: one.status_code)
    assert [answer.status_code for answer in answers] == [200, 503]
    assert answers[1].json()["error"]["code"] == "insufficient_memory"
    assert num_open == 1


def test_a_broken_second_model_is_no_fault_of_the_server(
    folder: Path, tmp_path: Path
) -> None:
    """E23: /health stays 200, and the first one answers."""
    for kind in ("dense", "capped"):
        (tmp_path / kind).symlink_to(folder / kind)
    bad = make_model(tmp_path / "bad", "dense")
    (bad / "tokenizer.json").write_text("{}")
    with serving(tmp_path) as app:
        body = {"model": "bad", "messages": TALK}
        answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "model_load_failed"
        health = httpx.get(f"{app.url}/health", timeout=60)
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        states = {one["id"]: one["state"] for one in health.json()["models"]}
        assert states["bad"] == "failed"
        ask(app, "dense")


def test_a_failed_load_leaves_the_memory_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E15, with real weights: it fails when all of them are there."""
    import mlx.core as mx

    with serving(folder) as app, no_collector():
        before = app.gpu.call(mx.get_active_memory)

        def failing(*_arguments: object) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr("sidecar.residents.text_resident.build_pipeline", failing)
        body = {"model": "sliding", "messages": TALK}
        answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 500
        # But for the random generator's state.
        assert app.gpu.call(mx.get_active_memory) <= before + 64


@contextmanager
def no_collector() -> Iterator[None]:
    """What goes goes at once, not when Python looks for circles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_models_come_and_go_while_it_runs(folder: Path, tmp_path: Path) -> None:
    """POST /admin/models/rescan; a name that is not known is looked for as well."""
    (tmp_path / "dense").symlink_to(folder / "dense")
    with serving(tmp_path) as app:
        (tmp_path / "capped").symlink_to(folder / "capped")
        assert httpx.post(f"{app.url}/admin/models/rescan", timeout=60).is_success
        ask(app, "capped")
        (tmp_path / "capped").unlink()
        assert httpx.post(f"{app.url}/admin/models/rescan", timeout=60).is_success
        body = {"model": "capped", "messages": TALK}
        answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 404


def test_people_load_pin_and_unload_by_hand(folder: Path) -> None:
    with serving(folder) as app, httpx.Client(base_url=app.url, timeout=120) as http:
        loaded = http.post("/admin/models/sliding/load?pin=true").json()
        assert (loaded["state"], loaded["pinned"]) == ("loaded", True)
        progress = http.get("/admin/models/sliding/loading-progress").text
        assert progress.startswith("event: ready\n")
        refused = http.post("/admin/models/sliding/unload")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            409, "model_pinned",
        )  # fmt: skip
        changed = http.post("/admin/models/sliding/settings", json={"pinned": False})
        assert changed.json() == {"changed": ["pinned"]}
        freed = http.post("/admin/models/sliding/unload").json()["freed_bytes"]
        assert freed >= loaded["actual_bytes"]
        wrong = http.post("/admin/models/sliding/settings", json={"ttl_seconds": -1})
        assert wrong.status_code == 400
        assert http.post("/admin/models/nobody/load").status_code == 404
        status = http.get("/admin/models/status").json()
        assert [one["id"] for one in status["loaded"]] == ["openai/dense"]


def test_what_is_set_by_hand_outlives_the_server(folder: Path, tmp_path: Path) -> None:
    """And stands beside what a person wrote; where it cannot be kept, that is said."""
    file = tmp_path / "home" / "model-settings.json"
    settings = {"MODEL_SETTINGS_PATH": str(file)}
    file.parent.mkdir()
    file.write_text(json.dumps({"models": {"sliding": {"alias": "slider"}}}))
    changes = {"pinned": True, "ttl_seconds": 600}
    with serving(folder, **settings) as app:
        for own_id in ("sliding", "local", "slider"):
            url = f"{app.url}/admin/models/{own_id}/settings"
            told = httpx.post(url, json=changes, timeout=60).json()
            assert told == {"changed": ["pinned", "ttl_seconds"]}
    kept = json.loads(file.read_text())["models"]
    assert kept == {"sliding": {"alias": "slider", **changes}, "dense": changes}
    with serving(folder, **settings) as app:
        for own_id in ("sliding", "dense"):
            found = entry(app, own_id)
            assert (found.pinned, found.ttl_s) == (True, 600)
    nowhere = {"MODEL_SETTINGS_PATH": "/dev/null/settings.json"}
    with serving(folder, **nowhere) as app:
        url = f"{app.url}/admin/models/sliding/settings"
        told = httpx.post(url, json={"pinned": True}, timeout=60).json()
        assert "cannot be written" in told["until_the_next_start"]


@pytest.mark.parametrize("own_id", ["local", "capped"])
def test_a_model_whose_folder_is_deleted_stops_answering(
    folder: Path, tmp_path: Path, own_id: str
) -> None:
    """The default one as well; the next request hears of it, and its weights go."""
    places = tmp_path / "models"
    shutil.copytree(folder, places)
    with serving(places) as app:
        ask(app, own_id)
        gone = "dense" if own_id == "local" else own_id
        shutil.rmtree(places / gone)
        url = f"{app.url}/v1/chat/completions"
        body = {"model": own_id, "messages": TALK, "max_tokens": 2}
        assert httpx.post(url, json=body, timeout=60).status_code == 404

        def is_left() -> bool:
            entries = app.pool.entries()
            return any(e.id.endswith(gone) and e.state == "loaded" for e in entries)

        assert eventually(lambda: not is_left(), 60)
        assert httpx.post(url, json=body, timeout=60).status_code in (404, 500)
        ask(app, "sliding")


def cycle(app: App, rounds: int) -> list[tuple[int, int]]:
    """Load three in turn under a limit of two; RSS and active memory at each end."""
    import mlx.core as mx

    process, seen = psutil.Process(), []
    for _ in range(rounds):
        for kind in ("dense", "sliding", "hybrid"):
            ask(app, kind)
        for one in app.pool.entries():
            app.pool.unload(one.id, force=True)
        app.shared.kept.forget()
        give_back_freed_pages()
        seen.append((process.memory_info().rss, app.gpu.call(mx.get_active_memory)))
    return seen


def check_cycles(folder: Path, rounds: int) -> None:
    with serving(folder, MAX_MODELS="2", CACHE_SELFTEST="off") as app:
        seen = cycle(app, rounds)
    third, last = seen[2], seen[-1]
    assert last[1] <= third[1] * 1.02 + 1024, [active for _, active in seen]
    assert last[0] <= third[0] * 1.02 + (8 << 20), [rss >> 20 for rss, _ in seen]


def test_loading_and_unloading_leaves_nothing(folder: Path) -> None:
    """E16: active memory is back, and the process does not grow."""
    check_cycles(folder, 8)


@pytest.mark.slow
def test_loading_and_unloading_fifty_times_leaves_nothing(folder: Path) -> None:
    check_cycles(folder, 50)


class Crowd:
    """Clients that ask for models in random order; each answer is held to `alone`."""

    def __init__(self, app: App, alone: dict[str, str]) -> None:
        self.app, self.alone = app, alone
        self.wrong: list[str] = []
        self.max_bytes = 0
        self._over = threading.Event()

    def run(self, num_requests: int, num_clients: int) -> None:
        chance = random.Random(11)
        asked = [chance.choice(KINDS) for _ in range(num_requests)]
        watch = threading.Thread(target=self._watch)
        watch.start()
        with ThreadPoolExecutor(num_clients) as threads:
            list(threads.map(self._ask, asked))
        self._over.set()
        watch.join()

    def _ask(self, kind: str) -> None:
        found = said(ask(self.app, kind))
        if found != self.alone[kind]:
            self.wrong.append(f"{kind}: {found}")

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            held = sum(one.actual_bytes or 0 for one in self.app.pool.entries())
            self.max_bytes = max(self.max_bytes, held)


def check_crowd(folder: Path, num_requests: int) -> None:
    with serving(folder) as app:
        alone = {kind: said(ask(app, kind)) for kind in KINDS}
        limit = limit_of(app, "dense", "hybrid")
    settings = {"MAX_MODEL_MEMORY": str(limit), "LOAD_WAIT_SECONDS": "240"}
    with serving(folder, **settings) as app:
        crowd = Crowd(app, alone)
        crowd.run(num_requests, 8)
        loads = sum(one.num_loads for one in app.pool.entries())
        assert app.shared.admission.num_open == app.pool.num_leases == 0
    assert crowd.wrong == []
    assert crowd.max_bytes <= limit
    assert loads > len(KINDS)


def test_four_models_where_two_have_room(folder: Path) -> None:
    """Every answer right, the budget never passed."""
    check_crowd(folder, 60)


@pytest.mark.slow
def test_five_hundred_requests_for_four_models_where_two_have_room(
    folder: Path,
) -> None:
    check_crowd(folder, 500)


def test_an_idle_one_leaves_by_itself(folder: Path) -> None:
    """E8, on a machine that nobody asks anything."""
    with serving(folder) as app:
        ask(app, "capped")
        body = {"ttl_seconds": 0.1}
        url = f"{app.url}/admin/models/capped/settings"
        assert httpx.post(url, json=body, timeout=60).is_success
        assert eventually(lambda: entry(app, "capped").state == "unloaded", 120)
        assert entry(app, "dense").state == "loaded"


def stream_gaps(
    app: App, model: str, tokens: int, begun: threading.Event
) -> list[float]:
    """Seconds between the pieces of a streamed answer."""
    body = {"model": model, "messages": TALK, "max_tokens": tokens, "stream": True}
    gaps: list[float] = []
    with httpx.stream(
        "POST", f"{app.url}/v1/chat/completions", json=body, timeout=240
    ) as answer:
        last = None
        for line in answer.iter_lines():
            if not line.startswith("data: {") or not json.loads(line[6:])["choices"]:
                continue
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
            begun.set()
    return gaps


def test_a_stream_goes_on_while_another_model_is_loaded(folder: Path) -> None:
    """E17's order of events; its times are measured by bench/loading."""
    with serving(folder) as app, ThreadPoolExecutor(2) as threads:
        begun = threading.Event()
        talking = threads.submit(stream_gaps, app, "dense", 400, begun)
        assert begun.wait(120)
        ask(app, "sliding", max_tokens=1)
        assert entry(app, "sliding").num_loads == 1
        assert len(talking.result(240)) > 390
