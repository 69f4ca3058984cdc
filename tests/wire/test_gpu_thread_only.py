"""All that a serving process computes it computes on its one GPU thread."""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit.mixed_traffic import Traffic
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]

if sys.version_info < (3, 12):
    pytest.skip("sys.monitoring sees every call from 3.12 on", allow_module_level=True)

MONITOR = sys.monitoring.PROFILER_ID


@contextmanager
def mlx_calls() -> Iterator[dict[str, set[str]]]:
    """Thread name -> the MLX functions it called, of whatever Python code."""
    seen: dict[str, set[str]] = defaultdict(set)

    def called(_code: Any, _offset: int, function: Any, _first: Any) -> None:
        module = getattr(function, "__module__", None)
        if isinstance(module, str) and module.startswith("mlx.core"):
            name = getattr(function, "__qualname__", repr(function))
            seen[threading.current_thread().name].add(name)

    sys.monitoring.use_tool_id(MONITOR, "mlx calls")
    sys.monitoring.register_callback(MONITOR, sys.monitoring.events.CALL, called)
    sys.monitoring.set_events(MONITOR, sys.monitoring.events.CALL)
    try:
        yield seen
    finally:
        sys.monitoring.set_events(MONITOR, 0)
        sys.monitoring.register_callback(MONITOR, sys.monitoring.events.CALL, None)
        sys.monitoring.free_tool_id(MONITOR)


def test_the_monitor_sees_a_call_on_a_wrong_thread() -> None:
    """Else the test below could not fail."""
    import mlx.core as mx

    with mlx_calls() as seen:
        mx.get_active_memory()
    assert seen == {threading.current_thread().name: {"get_active_memory"}}


COMPUTING = {
    "eval", "async_eval", "synchronize", "clear_cache", "array.item", "array.tolist",
}  # fmt: skip
# Numbers and facts that MLX keeps anyway.
COUNTERS = {"get_active_memory", "is_available"}


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_only_the_gpu_thread_computes(kind: str, model_folder: ModelFolder) -> None:
    """
    Load, self-test, all of the traffic, all routes, unload.

    Another thread may describe steps, and computes nothing.
    """
    settings = {"MODEL_PATH": str(model_folder(kind)), "CACHE_SELFTEST": "on_load"}
    with mlx_calls() as seen, running_sidecar(settings) as app:
        traffic = Traffic(app.listener.port, seed=3)
        traffic.run(4)
        question = {"messages": [{"role": "user", "content": "x"}]}
        with httpx.Client(base_url=app.url, timeout=30) as http:
            for path in ("/v1/models", "/health", "/metrics", "/admin/cache",
                         "/admin/cache?check=1", "/admin/cache/drift"):  # fmt: skip
                assert http.get(path).status_code == 200, path
            assert http.post("/v1/cache/probe", json=question).status_code == 200
            sampled = {**question, "max_tokens": 3, "n": 2, "logprobs": True,
                       "temperature": 1.0, "seed": 1, "top_p": 0.5}  # fmt: skip
            assert http.post("/v1/chat/completions", json=sampled).is_success
            assert http.post("/admin/cache/clear").status_code == 200
    assert traffic.wrong == []
    assert "array" in seen["gpu"]
    assert "load" in seen.pop("weights")  # which computes nothing: see below
    described = seen.pop("describing")  # steps ahead, on the GPU thread's stream
    assert "logsumexp" in described
    assert not described & COMPUTING
    others = {n: sorted(c - COUNTERS) for n, c in seen.items() if n != "gpu"}
    assert not any(others.values()), others
