"""The replay by the clock: what is compared, not how fast."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from bench import device, models, replay
from bench.__main__ import main
from bench.servers import Setup, peer_server
from sidecar.engine.gpu_thread import gpu_thread
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]
_TRACE = "pi-0.87.1"


def test_a_session_is_replayed_and_timed(
    model_folder: ModelFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its requests, each with a time, most of the prompt from the cache."""
    file = tmp_path / "out.json"
    arguments = ["--model", str(model_folder("dense")), "--peer-seconds", "0"]
    assert main(["replay", *arguments, "--json", str(file), _TRACE]) == 0
    (row,) = json.loads(file.read_text())
    assert row["name"] == _TRACE
    assert row["requests"] == 10
    assert 0 < row["prefilled"] < row["prompt_tokens"] / 5
    assert row["ours_s"] > 0
    assert row["compared"] == 0
    assert _TRACE in capsys.readouterr().out


def test_both_are_compared_over_the_same_requests(model_folder: ModelFolder) -> None:
    """What the other began within its time, and no more; then why it ended."""
    model = model_folder("dense")
    (timed,) = replay._ours(model, [_TRACE])
    assert len(timed.seconds) == len(timed.served) == len(timed.num_said) == 10
    settings = {"MODEL_PATH": str(model)}
    with (
        running_sidecar(settings) as app,
        httpx.Client(base_url=app.url, timeout=120) as http,
    ):
        row = replay._replay_peer(http, timed, 1e-9)
        assert row.compared == 1
        assert row.ours_compared_s == timed.seconds[0]
        assert not row.note
    with httpx.Client(base_url="http://127.0.0.1:9") as nobody:
        row = replay._replay_peer(nobody, timed, 60.0)
    assert (row.compared, row.theirs_s) == (0, 0.0)
    assert row.note == "ended: ConnectError"


def test_the_large_model_is_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shape is that of 8.2 billion parameters; here it is made smaller."""
    assert models._LARGE["num_hidden_layers"] * models._LARGE["hidden_size"] == 147456
    small = {**models._LARGE, **models._SMALL, "num_hidden_layers": 1}
    monkeypatch.setitem(models._SHAPES, "--large", small)
    gpu_thread().call(lambda: models.make(tmp_path, "--large"))
    weights = gpu_thread().call(lambda: mx.load(str(tmp_path / "model.safetensors")))
    assert isinstance(weights, dict)
    assert {array.dtype for array in weights.values()} == {mx.bfloat16}
    assert models.is_made(tmp_path)


def test_all_benchmarks_run_on_the_devices_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails does not keep the others from running, and is told."""
    seen: list[tuple[str, ...]] = []

    def run(module: str, *arguments: str) -> int:
        seen.append((module, *arguments))
        return int("compare" in arguments)

    monkeypatch.setattr(device, "_python", run)
    asked = ["--device-model", str(tmp_path / "model"), "--out", str(tmp_path)]
    assert main([*asked, "--quick"]) == 1
    assert seen[0] == ("bench.models", str(tmp_path / "model"), "--large")
    assert [call[1] for call in seen[1:]] == ["overhead", "compare", "replay"]
    assert main([*asked, "--only", "replay"]) == 0


def test_what_does_not_start_says_why(tmp_path: Path) -> None:
    setup = Setup(tmp_path, None, tmp_path, tmp_path)
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no-such-library')")
    command = f"python {script}"
    with (
        pytest.raises(ChildProcessError, match="no-such-library"),
        peer_server(setup, "peer", command),
    ):
        pass
