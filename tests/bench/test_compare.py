"""The comparison on a real sidecar: what it measures, not how fast."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import compare, plot
from bench.__main__ import main
from bench.compare import Work
from bench.contestants import Server, known_peers
from bench.report import InvalidRun
from bench.servers import Setup, peer_server
from testkit.servers import running_sidecar

OPTIONS = argparse.Namespace(prompt_tokens=64, max_tokens=8, long_tokens=400)


def test_every_metric_is_measured(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """A round and an arrival, the table and the picture of them."""
    folder = model_folder("dense")
    with running_sidecar({"MODEL_PATH": str(folder), "CACHE_SELFTEST": "off"}) as app:
        server = Server("ours", app.listener.port)
        work = Work(folder, 0)
        compare._round([server], work, OPTIONS)
        compare._arrival(server, work, OPTIONS)
    results = {"ours": compare._summary(server)}
    assert set(results["ours"]) == {name for name, _ in compare._METRICS}
    # The next turn's own tokens, and what its template puts around them.
    assert 0 < results["ours"]["warm prefilled"] < 64
    assert all(name in compare._table(results) for name, _ in compare._METRICS)
    plot.draw(results, {"machine": "this one"}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_who_ends_early_did_other_work() -> None:
    """The built-in model ends its answer by itself."""
    with running_sidecar({"CACHE_SELFTEST": "off"}) as app:
        server = Server("ours", app.listener.port)
        with pytest.raises(InvalidRun, match="ours ended after"):
            server.ask([[{"role": "user", "content": "Hello"}]], 2000)


def test_servers_that_read_other_tokens_did_other_work(
    model_folder: Callable[[str], Path],
) -> None:
    folder = model_folder("dense")

    with running_sidecar({"MODEL_PATH": str(folder), "CACHE_SELFTEST": "off"}) as app:
        honest = Server("ours", app.listener.port)

        class Cutting(Server):
            def ask(self, talks, max_tokens):  # type: ignore[no-untyped-def]
                cut = [[{**m, "content": m["content"][:20]} for m in t] for t in talks]
                return super().ask(cut, max_tokens)

        other = Cutting("theirs", app.listener.port)
        with pytest.raises(InvalidRun, match="tokens"):
            compare._round([honest, other], Work(folder, 1), OPTIONS)


def test_a_name_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed"]) == 2
    assert "compare" in capsys.readouterr().err


def test_a_peer_is_any_command() -> None:
    """Named, with places for its port and the model."""
    command = "python -m mlx_lm server --port {port} --model {model}"
    assert known_peers([f"other={command}"])["other"] == command


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Before anything is measured."""
    setup = Setup(tmp_path, None, tmp_path, tmp_path)
    with (
        pytest.raises(FileNotFoundError, match="other: no program nowhere-to-be"),
        peer_server(setup, "other", "nowhere-to-be --port {port}"),
    ):
        pass


@pytest.mark.slow
def test_a_peer_is_measured_like_the_others(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Here mlx_lm.server, as a stranger would add it."""
    setup = Setup(model_folder("dense"), None, Path.cwd(), tmp_path)
    command = "python -m mlx_lm server --port {port} --model {model}"
    with peer_server(setup, "other", command) as port:
        server = Server("other", port, str(setup.model))
        assert server.ask([[{"role": "user", "content": "x"}]], 4)[0].text
