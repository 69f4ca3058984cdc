"""
What the recorded agents' requests cost in prefill, against two independent counts.

The model has one layer, so that a prefill costs next to nothing; what is asserted are
counts of tokens. That reused KV is right is another matter, and no business of these
tests (one layer's KV does not even depend on what stood before): the tests of the
store and the cache oracle compare logits on deeper models.

The model writes its calls as no template renders them, so that without splicing each
of them would be computed again.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testkit.counted import COUNTED
from testkit.proxy import running_proxy
from testkit.reuse import (
    Recorder,
    Served,
    compact,
    recording_sidecar,
    serve_trace,
)
from testkit.tiny_models import make_model
from testkit.traces import Exchange, load_trace

TRACES = {name: load_trace(name) for name in COUNTED}
CHAT = [name for name, trace in TRACES.items() if not trace[0].is_anthropic]
MESSAGES = [name for name, trace in TRACES.items() if trace[0].is_anthropic]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One random layer."""
    folder = tmp_path_factory.mktemp("reuse") / "one-layer"
    return make_model(folder, "dense", layers=1, hidden=32)


@pytest.fixture(scope="module")
def through_proxy(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, dict[str, Recorder]]]:
    """A proxy in front of one fresh sidecar for each trace of the Messages dialect."""
    with contextlib.ExitStack() as running:
        recorders = {
            name: running.enter_context(recording_sidecar(model, TRACES[name], compact))
            for name in MESSAGES
        }
        urls = {name: recorder.url for name, recorder in recorders.items()}
        folder = tmp_path_factory.mktemp("reuse-proxy")
        first = urls[MESSAGES[0]]
        proxy = running.enter_context(running_proxy(first, folder, more=urls))
        yield proxy.http, recorders


@pytest.mark.parametrize("name", CHAT)
def test_chat_traffic_is_prefilled_as_little_as_can_be(model: Path, name: str) -> None:
    """Straight to the sidecar."""
    trace: tuple[Exchange, ...] = TRACES[name]
    with (
        recording_sidecar(model, trace, compact) as recorder,
        httpx.Client(base_url=recorder.url, timeout=300, trust_env=False) as http,
    ):
        check_reuse(name, serve_trace(trace, recorder, http, "local"))


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_traffic_is_prefilled_as_little_as_can_be(
    through_proxy: tuple[httpx.Client, dict[str, Recorder]], name: str
) -> None:
    """Through LiteLLM, which sends them on."""
    http, recorders = through_proxy
    check_reuse(name, serve_trace(TRACES[name], recorders[name], http, name))


def check_reuse(name: str, served: list[Served]) -> None:
    """From the second request on: near the count of others, and near the oracle."""
    later = served[1:]
    prefilled = sum(turn.prefilled_len for turn in later)
    assert prefilled <= 1.05 * COUNTED[name].pinned
    cached = sum(turn.cached_len for turn in later)
    assert cached >= 0.99 * sum(turn.oracle_len for turn in later)
    for turn in served:
        assert turn.cached_len <= turn.oracle_len, f"request {turn.seq}: not exact"
