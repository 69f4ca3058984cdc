"""Models from the terminal: list, ps, load, unload, pin, logs."""

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from sidecar.__main__ import main
from sidecar.app import App
from testkit.raw_http import eventually
from testkit.servers import held_gpu, running_sidecar


@pytest.fixture(scope="module")
def served(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[App]:
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(model_folder("dense"), root / "other model")
    with running_sidecar({"MODEL_DIR": str(root)}) as app:
        yield app


def run(
    app: App, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    verb, *rest = words
    code = main([verb, "--url", app.url, *rest])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_model_is_loaded_pinned_and_let_go(
    served: App, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name with a blank in it, too; what is refused is told."""
    other = "other model"
    _, listed, _ = run(served, capsys, "list")
    assert "MODEL" in listed
    assert other in listed
    assert "unloaded" in listed
    assert run(served, capsys, "load", other)[:2] == (0, f"{other}: loaded\n")
    assert run(served, capsys, "pin", other)[0] == 0
    assert "pinned" in run(served, capsys, "list")[1]
    code, _, refused = run(served, capsys, "unload", other)
    assert code == 1
    assert "pinned" in refused
    assert run(served, capsys, "unpin", other)[0] == 0
    code, said, _ = run(served, capsys, "unload", other)
    assert (code, "came back" in said) == (0, True)
    code, _, refused = run(served, capsys, "load", "no-such")
    assert code == 1
    assert "no-such" in refused


def test_what_runs_is_shown(served: App, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"model": "local", "messages": [{"role": "user", "content": "Wait."}]}
    url, head = f"{served.url}/v1/chat/completions", {"X-Request-ID": "mine"}
    ask = threading.Thread(
        target=lambda: httpx.post(url, json=body, headers=head, timeout=120)
    )
    with held_gpu(served):
        ask.start()
        assert eventually(lambda: len(served.core.services.chat.running()) == 1)
        _, shown, _ = run(served, capsys, "ps")
    ask.join(120)
    assert "mine" in shown
    assert "queued #1" in shown
    found = json.loads(run(served, capsys, "ps", "--json")[1])
    assert found["schema"] == 1
    assert "REQUEST" not in run(served, capsys, "ps")[1]


def test_the_log_is_shown(served: App, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("sidecar.test").error("one line\nand no other")
    _, shown, _ = run(served, capsys, "logs")
    assert "ERROR [-] one line\\nand no other" in shown
