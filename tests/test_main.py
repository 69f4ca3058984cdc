"""The command line: usage, refusals, start, drain."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.__main__ import main
from tests.support.raw_http import Answer, eventually, exchange, request

REPO = Path(__file__).parents[1]
CHAT = "/v1/chat/completions"


@contextmanager
def started(
    folder: Path, *flags: str, **settings: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`python -m sidecar` on a free port, in an empty folder; ended at the end."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "HOME": str(folder)}
    command = [sys.executable, "-m", "sidecar", "--port", "0", *flags]
    process = subprocess.Popen(
        command, cwd=folder, env={**env, **settings}, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        found = re.match(r"mlx-sidecar: http://127\.0\.0\.1:(\d+) model=", first)
        assert found, first + process.stderr.read()
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()


def is_ready(port: int) -> bool:
    try:
        return exchange(port, request("/health")).status == 200
    except OSError:
        return False


def body(max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": "x"}]
    return json.dumps({"messages": messages, "max_tokens": max_tokens}).encode()


def test_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """Grouped, each flag with its variable and its default; exit 0."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert len(text.splitlines()) <= 50
    assert all(f"\n{group}:\n" in text for group in ("model", "server", "cache", "log"))
    assert "--port MLX_PORT" in text
    assert "(8080)" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], ["MLX_PORT", "0..65535", "70000"]),
        (["--cache-bytes", "lots"], ["PROMPT_CACHE_MAX_BYTES", "64GB", "lots"]),
        (["--log-level", "loud"], ["LOG_LEVEL", "DEBUG", "loud"]),
    ],
)
def test_a_bad_value_is_refused(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2; the variable, its range and the value are named."""
    assert main([*flags, "--env-file", "/nonexistent/.env"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)


def test_an_unknown_flag_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2."""
    with pytest.raises(SystemExit) as ended:
        main(["--prot", "1"])
    assert ended.value.code == 2
    assert "--prot" in capsys.readouterr().err


def test_a_port_in_use_is_said_to_be_in_use(tmp_path: Path) -> None:
    """Exit 1 with the address, and no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, "-m", "sidecar", "--port", port],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_signal_lets_running_answers_end(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """SIGTERM: the answer in work is finished, new ones get 503, exit 0."""
    (tmp_path / ".env").write_text("LOG_LEVEL=ERROR\n")
    folder = str(model_folder("dense"))
    with started(tmp_path, "--model", folder) as (process, port):
        assert eventually(lambda: is_ready(port), 30)
        answers: list[Answer] = []
        began = time.monotonic()
        exchange(port, request(CHAT, body(100)))
        count = int(100 * 1.5 / (time.monotonic() - began))  # about 1.5 s
        data = request(CHAT, body(count))
        asking = threading.Thread(target=lambda: answers.append(exchange(port, data)))
        asking.start()
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        refused = exchange(port, request(CHAT, body(1)))
        asking.join(30)
        assert process.wait(10) == 0
    assert answers[0].json["usage"]["completion_tokens"] == count
    assert refused.status == 503


def test_a_second_signal_ends_it_at_once(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whoever presses Ctrl-C twice does not wait: exit 1."""
    flags = ["--model", str(model_folder("dense")), "--log-level", "ERROR"]
    with started(tmp_path, *flags) as (process, port):
        assert eventually(lambda: is_ready(port), 30)
        data = request(CHAT, body(30_000))
        asking = threading.Thread(target=lambda: exchange(port, data))
        asking.start()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None, "it did not wait for the answer"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 1
        assert time.monotonic() - began < 2
        asking.join(5)
