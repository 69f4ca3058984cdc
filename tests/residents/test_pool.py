"""The pool: loading once, leases, names, and what clients hear of it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sidecar.app import App, build
from sidecar.config.settings import load_config
from sidecar.core.errors import ModelLoadFailed, ModelNotFound, Unavailable
from sidecar.residents.pool import ResidentPool
from testkit.raw_http import Answer, eventually, exchange, request
from testkit.servers import NO_FILE, running_sidecar

CHAT = b'{"model": "%s", "messages": [{"role": "user", "content": "hi"}]}'


@dataclass
class Engine:
    """The least that the pool asks of an engine; counts what it is told."""

    max_context: int = 128
    told: list[str] = field(default_factory=list)

    def drain(self) -> None:
        self.told.append("drain")

    def close(self) -> None:
        self.told.append("close")


def make_pool(
    load: Callable[[], Engine] = Engine, load_wait_s: float = 5.0
) -> ResidentPool[Engine]:
    return ResidentPool("openai/org/m", ("local", "org/m"), load, load_wait_s)


def loaded_pool(load: Callable[[], Engine] = Engine) -> ResidentPool[Engine]:
    pool = make_pool(load)
    pool.start_loading()
    return pool


@pytest.mark.parametrize("name", ["", "default", "local", "org/m", "openai/org/m"])
def test_a_model_answers_to_all_its_names(name: str) -> None:
    """Id, aliases, and no name at all."""
    with loaded_pool().lease(name) as engine:
        assert isinstance(engine, Engine)


def test_an_unknown_name_says_what_there_is() -> None:
    """404 with the close names; nothing is leased."""
    pool = loaded_pool()
    with pytest.raises(ModelNotFound, match="org/mm.*openai/org/m") as caught:
        pool.lease("org/mm").__enter__()
    assert caught.value.param == "model"
    assert pool.num_leases == 0


def test_leases_are_counted_and_given_back_even_on_failure() -> None:
    """A lease ends with its block, however the block ends."""
    pool = loaded_pool()
    with pool.lease("local"), pool.lease("local"):
        assert pool.num_leases == 2
    with pytest.raises(KeyError), pool.lease("local"):
        raise KeyError
    assert pool.num_leases == 0


def test_many_requests_for_a_cold_model_are_one_load() -> None:
    """All wait for the same load and get the same engine."""
    go, loads = threading.Event(), []

    def load() -> Engine:
        loads.append(1)
        assert go.wait(120)
        return Engine()

    pool = make_pool(load)

    def ask(_number: int) -> Engine:
        pool.start_loading()
        with pool.lease("local") as engine:
            return engine

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(ask, number) for number in range(8)]
        assert pool.entries()[0].state == "loading"
        go.set()
        engines = {id(found.result()) for found in waiting}
    assert (len(loads), len(engines)) == (1, 1)


def test_a_load_that_takes_too_long_is_unavailable() -> None:
    """503 with a time to come back, after load_wait_s; the load goes on."""
    go = threading.Event()

    def load() -> Engine:
        assert go.wait(120)
        return Engine()

    pool = make_pool(load, load_wait_s=0.05)
    pool.start_loading()
    with pytest.raises(Unavailable, match="still loading") as caught:
        pool.lease("local").__enter__()
    assert caught.value.retry_after_s is not None
    go.set()
    assert eventually(lambda: pool.entries()[0].state == "loaded")
    with pool.lease("local"):
        assert pool.entries()[0].max_input_tokens == 128


def test_a_failed_load_is_told_to_each_request() -> None:
    """500 with the reason, at once; the entry keeps it."""

    def load() -> Engine:
        raise ModelLoadFailed("weights are missing")

    pool = loaded_pool(load)
    for _ in range(2):
        with pytest.raises(ModelLoadFailed, match="weights are missing"):
            pool.lease("local").__enter__()
    assert pool.entries()[0].state == "failed"
    assert pool.entries()[0].load_error == "weights are missing"
    assert pool.num_leases == 0


def test_a_failed_load_can_be_tried_again() -> None:
    """start_loading after a failure loads anew."""
    outcomes = iter([ModelLoadFailed("no"), None])

    def load() -> Engine:
        if failure := next(outcomes):
            raise failure
        return Engine()

    pool = loaded_pool(load)
    assert eventually(lambda: pool.entries()[0].state == "failed")
    pool.start_loading()
    with pool.lease("local"):
        assert pool.entries()[0].load_error is None


def test_drain_and_close_reach_the_engine() -> None:
    """Shutting down: first no new work, then the memory."""
    pool = loaded_pool()
    with pool.lease("local") as engine:
        pass
    pool.drain()
    pool.close()
    pool.close()
    assert engine.told == ["drain", "close"]
    assert pool.entries()[0].state == "unloaded"


def ask(app: App, path: str, model: str | None = None) -> Answer:
    body = None if model is None else CHAT % model.encode()
    return exchange(app.listener.port, request(path, body))


def test_over_http_an_unknown_model_is_404(app: App) -> None:
    """The client's user reads which models there are."""
    answer = ask(app, "/v1/chat/completions", "gpt-4")
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"
    assert "local" in answer.json["error"]["message"]


def test_over_http_a_failed_load_is_500_and_health_says_so(tmp_path: Path) -> None:
    """A folder without weights: /health is 503 failed, requests get the reason."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with running_sidecar({"MODEL_PATH": str(tmp_path)}, ready=False) as app:
        assert eventually(lambda: ask(app, "/health").json["status"] == "failed")
        health = ask(app, "/health")
        assert (health.status, health.json["models"][0]["state"]) == (503, "failed")
        answer = ask(app, "/v1/chat/completions", "local")
        assert answer.status == 500
        assert answer.json["error"]["code"] == "model_load_failed"
        assert tmp_path.name in answer.json["error"]["message"]
        assert ask(app, "/metrics").status == 200
        assert ask(app, "/v1/models").status == 200


def test_a_failed_load_does_not_say_where_the_model_lies(tmp_path: Path) -> None:
    """Errors hold no path of this machine, only the model's name."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    with running_sidecar({"MODEL_PATH": str(folder)}, ready=False) as app:
        assert eventually(lambda: ask(app, "/health").json["status"] == "failed")
        answer = ask(app, "/v1/chat/completions", "local")
        assert str(tmp_path) not in answer.body.decode()


@contextmanager
def never_loaded() -> Iterator[App]:
    """A sidecar that answers while its model is forever about to load."""
    flags = {"MLX_PORT": "0", "LOAD_WAIT_SECONDS": "0.1"}
    app = build(load_config(flags, NO_FILE, {}))
    thread = threading.Thread(target=app.listener.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield app
    finally:
        app.stop_listening()
        app.close()
        thread.join(120)


def test_over_http_a_loading_model_is_503_with_retry_after() -> None:
    """Another server may serve this now; /health says loading."""
    with never_loaded() as app:
        health = ask(app, "/health")
        assert (health.status, health.json["status"]) == (503, "loading")
        answer = ask(app, "/v1/chat/completions", "local")
        assert answer.status == 503
        assert answer.json["error"]["code"] == "service_unavailable"
        assert int(answer.header("retry-after") or 0) > 0
