"""
Recorded agents whose server is restarted in mid-conversation.

    pytest -m slow -n 0 -s tests/disk/test_trace_restart.py

plays all recordings there are. The model has one layer: counts of tokens are asserted,
not what it says (tests/disk/test_restart, test_disk_oracle).
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from sidecar.app import App
from sidecar.core import lasting_secret
from testkit.kept_kv import disk_counts, disk_settings, leased
from testkit.replay import Replayer, Reply
from testkit.reuse import Recorder, compact
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model
from testkit.traces import TRACES, Exchange, load_trace

QUICK = ["pi-0.87.1", "claude-2.1.157-print"]
ALL = sorted(path.name.removesuffix(".jsonl.gz") for path in TRACES.glob("*.gz"))
MORE = 64  # tokens that a restart may cost each later request


@contextlib.contextmanager
def serving(root: Path, model: Path, recorder: Recorder) -> Iterator[App]:
    """With the default settings of the disk, but for room."""
    kept = disk_settings(root, model)
    for name in ("MIN_PREFIX_TOKENS", "RUN_TOKENS", "QUIET_SECONDS"):
        kept.pop(f"KV_DISK_{name}")
    before = lasting_secret._secret
    try:
        with running_sidecar(kept, recorder.processors) as app:
            yield app
    finally:
        lasting_secret.use_secret(before)


def computed(reply: Reply) -> int:
    """Tokens of a prompt that were prefilled."""
    usage = reply.usage
    if "input_tokens" in usage:
        return int(usage["input_tokens"])  # what was cached is told apart
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def play(
    exchanges: Sequence[Exchange], root: Path, model: Path, restarts: Sequence[int]
) -> tuple[list[int], dict[str, int], int]:
    """
    Send them, with a restart before each of some.

    Returns:
        Tokens computed for each; what the disk counted; bytes of a token's KV.
    """
    root.mkdir()
    (root / "secret").write_bytes(bytes(range(32)))
    recorder = Recorder(exchanges, compact)
    found: list[int] = []
    counts: dict[str, int] = {}
    token_bytes = 0
    replayer: Replayer | None = None
    edges = [0, *restarts, len(exchanges)]
    for first, last in zip(edges, edges[1:], strict=False):
        with (
            serving(root, model, recorder) as app,
            httpx.Client(base_url=app.url, timeout=300, trust_env=False) as http,
        ):
            if replayer is None:
                replayer = Replayer(http, "local")
            replayer._http = http
            found += [computed(replayer.send(e)) for e in exchanges[first:last]]
            with leased(app) as resident:
                resident.disk.flush()  # type: ignore[union-attr]
                token_bytes = resident.engine.guard.model.kv_bytes(1)
            for name, count in disk_counts(app).items():
                counts[name] = counts.get(name, 0) + count
    return found, counts, token_bytes


def check(name: str, tmp_path: Path, layers: int = 1) -> None:
    exchanges = load_trace(name)
    model = make_model(tmp_path / "m", "dense", layers=layers, hidden=32)
    whole, counts, token_bytes = play(exchanges, tmp_path / "whole", model, [])
    middle = [len(exchanges) // 2]
    broken, restarted, _ = play(exchanges, tmp_path / "broken", model, middle)
    later = slice(middle[0], None)
    dearer = [b - w for b, w in zip(broken[later], whole[later], strict=True)]
    written = counts["disk_bytes_written"] / max(1, sum(whole) * token_bytes)
    print(
        f"\n{name}: {len(exchanges)} requests, computed {sum(whole[later])} tokens "
        f"without a restart, {sum(broken[later])} behind one, "
        f"{restarted['disk_tokens_restored']} brought back; "
        f"bytes written / KV of what was computed {written:.3f}"
    )
    assert restarted["disk_tokens_restored"] > 0
    assert max(dearer) <= MORE, dearer
    assert sum(dearer) <= MORE * len(dearer)


@pytest.mark.parametrize("name", QUICK)
def test_a_restart_costs_an_agent_nothing(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", ALL)
def test_a_restart_costs_no_agent_anything(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)
