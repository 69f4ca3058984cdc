"""/native/memory and /native/device: MLX's own figures and limits."""

from collections.abc import Iterator

import httpx
import mlx.core as mx
import pytest

from sidecar.app import App
from testkit.servers import running_sidecar


@pytest.fixture
def limits_as_they_were(app: App) -> Iterator[None]:
    """Of the process, which other tests share."""
    before = app.gpu.call(lambda: mx.set_memory_limit(1 << 34))
    app.gpu.call(lambda: mx.set_memory_limit(before))
    cache = app.gpu.call(lambda: mx.set_cache_limit(1 << 30))
    app.gpu.call(lambda: mx.set_cache_limit(cache))
    yield
    app.gpu.call(lambda: (mx.set_memory_limit(before), mx.set_cache_limit(cache)))


def test_it_tells_what_is_in_use(app: App) -> None:
    with app.pool.lease("local") as served:
        num_bytes = served.num_bytes
    found = httpx.get(f"{app.url}/native/memory").json()
    assert num_bytes <= found["active_bytes"] <= found["peak_bytes"]
    assert found["cache_bytes"] >= 0
    assert found["max_process_memory"] == app.shared.process.limit_bytes


@pytest.mark.usefixtures("limits_as_they_were")
def test_limits_are_set_and_what_was_before_is_answered(app: App) -> None:
    url = f"{app.url}/native/memory"
    first = {"cache_limit": 50_000_000, "memory_limit": 2_000_000_000}
    assert set(httpx.post(url, json=first).json()["previous"]) == set(first)
    assert httpx.post(url, json=first).json() == {"previous": first}


def test_no_limit_goes_beyond_that_of_the_process(app: App) -> None:
    url, maximum = f"{app.url}/native/memory", app.shared.process.limit_bytes
    answer = httpx.post(url, json={"memory_limit": maximum + 1})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "memory_limit"
    assert str(maximum) in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"cache_limit": -1}, "cache_limit"),
        ({"cache_limit": "much"}, "cache_limit"),
        ({"cache": 5}, "cache"),
    ],
)
def test_what_cannot_be_set_is_refused(
    app: App, body: dict[str, object], param: str | None
) -> None:
    answer = httpx.post(f"{app.url}/native/memory", json=body)
    assert answer.status_code // 100 == 4
    assert answer.json()["error"]["param"] == param


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal wires memory")
def test_what_no_device_has_is_refused(app: App) -> None:
    answer = httpx.post(f"{app.url}/native/memory", json={"wired_limit": 1000})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "wired_limit"


def test_it_gives_back_and_counts_anew(app: App) -> None:
    app.gpu.call(lambda: mx.eval(mx.zeros((1 << 22,)) + 1))
    assert httpx.post(f"{app.url}/native/memory/clear").json()["freed_bytes"] >= 0
    assert httpx.get(f"{app.url}/native/memory").json()["cache_bytes"] == 0
    peak = httpx.post(f"{app.url}/native/memory/reset_peak").json()
    assert peak["previous_peak_bytes"] > 0
    now = httpx.get(f"{app.url}/native/memory").json()
    assert now["peak_bytes"] < peak["previous_peak_bytes"]


def test_it_names_the_device(app: App) -> None:
    found = httpx.get(f"{app.url}/native/device").json()
    assert found["metal"] == mx.metal.is_available()
    assert found["device"] == str(mx.default_device())


def test_only_an_admin_sees_and_sets_them() -> None:
    with running_sidecar({"ADMIN_TOKEN": "secret"}, ready=False) as app:
        for method, path in [
            ("GET", "/native/memory"), ("POST", "/native/memory"),
            ("POST", "/native/memory/clear"), ("POST", "/native/memory/reset_peak"),
            ("GET", "/native/device"),
        ]:  # fmt: skip
            answer = httpx.request(method, f"{app.url}{path}", json={})
            assert answer.status_code == 401, path
