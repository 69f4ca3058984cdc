"""The command line: usage, refusals, start, drain."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.__main__ import main
from testkit.hub import running_hub
from testkit.launcher import Launcher
from testkit.raw_http import (
    Answer,
    connect,
    eventually,
    exchange,
    read_answer,
    request,
)
from testkit.sidecar_process import fault_of, is_ready, run_to_the_end, started
from testkit.tiny_models import make_model

REPO = Path(__file__).parents[1]
CHAT = "/v1/chat/completions"


def is_answering(port: int) -> bool:
    answer = exchange(port, request("/metrics"))
    return "\nmlx_active_requests 1.0\n" in answer.body.decode()


def is_refusing(port: int) -> bool:
    """Whether new requests are not taken any more; one that still was is left."""
    with connect(port) as connection:
        connection.settimeout(2)
        connection.sendall(request(CHAT, body(1)))
        try:
            return read_answer(connection.makefile("rb")).status == 503
        except TimeoutError:
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
    assert len(text.splitlines()) <= 58
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
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


@contextmanager
def held(
    model: Path, folder: Path, *flags: str, **settings: str
) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """A sidecar that is ready, and whose answers wait while a file is there."""
    file = folder / "held"
    settings = {"HELD_BY": str(file), **settings}
    flags = ("--model", str(model), "--log-level", "ERROR", *flags)
    module = "testkit.held_sidecar"
    with started(folder, *flags, module=module, **settings) as (process, port):
        assert eventually(lambda: is_ready(port))
        file.touch()
        yield process, port, file


def test_a_signal_lets_running_answers_end(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """SIGTERM: the answer in work is finished, new ones get 503, exit 0."""
    settings = {"DRAIN_TIMEOUT_SECONDS": "240"}
    with held(model_folder("dense"), tmp_path, **settings) as (process, port, file):
        answers: list[Answer] = []
        data = request(CHAT, body(20))
        asking = threading.Thread(target=lambda: answers.append(exchange(port, data)))
        asking.start()
        assert eventually(lambda: is_answering(port))
        process.send_signal(signal.SIGTERM)
        assert eventually(lambda: is_refusing(port))
        file.unlink()
        asking.join(240)
        assert process.wait(240) == 0
    assert answers[0].json["usage"]["completion_tokens"] == 20


def test_what_outlasts_the_drain_is_told(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Streams end with an error event, whole answers with 503; then exit 0."""
    settings = {"DRAIN_TIMEOUT_SECONDS": "1"}
    with held(model_folder("dense"), tmp_path, **settings) as (process, port, file):
        answers: dict[bool, Answer] = {}

        def ask(stream: bool) -> None:
            asked = {**json.loads(body(20)), "stream": stream}
            data = request(CHAT, json.dumps(asked).encode())
            answers[stream] = exchange(port, data)

        asking = [threading.Thread(target=ask, args=(one,)) for one in (True, False)]
        for one in asking:
            one.start()
        line = "\nmlx_active_requests 2.0\n"
        assert eventually(
            lambda: line in exchange(port, request("/metrics")).body.decode()
        )
        process.send_signal(signal.SIGTERM)
        for one in asking:
            one.join(240)
        file.unlink()
        assert process.wait(240) == 0
    last = json.loads(answers[True].body.decode().strip().split("\n\n")[-1][6:])
    assert last["error"]["message"] == "the server is shutting down"
    assert last["error"]["code"] == "service_unavailable"
    assert (answers[False].status, answers[False].header("retry-after")) == (503, "5")


def test_a_second_signal_ends_it_at_once(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whoever presses Ctrl-C twice does not wait: exit 1."""
    settings = {"DRAIN_TIMEOUT_SECONDS": "600"}
    with held(model_folder("dense"), tmp_path, **settings) as (process, port, _):
        data = request(CHAT, body(20))
        asking = threading.Thread(target=lambda: exchange(port, data))
        asking.start()
        assert eventually(lambda: is_answering(port))
        process.send_signal(signal.SIGINT)
        assert eventually(lambda: is_refusing(port))
        assert process.poll() is None, "it did not wait for the answer"
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == 1, "it waited for the answer"
        asking.join(240)


def fill(pipe: Path) -> None:
    """Write into a pipe of another process until it takes no more."""
    number = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(number, b"x" * 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(number, b"x")
    os.close(number)


@pytest.mark.parametrize(
    "is_read",
    [
        True,
        pytest.param(
            False,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
        ),
    ],
)
def test_a_server_that_hangs_ends_all_the_same(
    model_folder: Callable[[str], Path], tmp_path: Path, *, is_read: bool
) -> None:
    """Exit 1 in time, its log says where threads stood; also where nobody reads it."""
    settings = {"DRAIN_TIMEOUT_SECONDS": "0", "END_SECONDS": "1"}
    with held(model_folder("dense"), tmp_path, **settings) as (process, port, _):
        data = request(CHAT, body(20))
        asking = threading.Thread(target=lambda: exchange(port, data))
        asking.start()
        assert eventually(lambda: is_answering(port))
        if not is_read:
            fill(Path(f"/proc/{process.pid}/fd/2"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == (1 if is_read else -signal.SIGALRM)
        asking.join(240)
        assert process.stderr is not None
        if is_read:
            assert "held_sidecar.py" in process.stderr.read()


def spoil(folder: Path, how: str) -> None:
    """Make a good model folder one that cannot be loaded."""
    config = folder / "config.json"
    weights = folder / "model.safetensors"
    if how == "gguf":
        weights.rename(folder / "model-Q4_K_M.gguf")
    elif how == "pytorch":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "cut off":
        os.truncate(weights, weights.stat().st_size // 2)
    elif how == "shards":
        weights.rename(folder / "model-00001-of-00003.safetensors")
    elif how == "encoder":
        config.write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    elif how == "unknown":
        config.write_text('{"model_type": "martian"}')
    elif how == "tokenizer":
        (folder / "tokenizer.json").unlink()
    elif how == "wrong path":
        shutil.rmtree(folder)


FAULTS = {
    "wrong path": "no such folder",
    "gguf": "GGUF",
    "pytorch": "PyTorch",
    "empty": "empty",
    "cut off": "cut off",
    "shards": "2 of its 3 weight files are missing",
    "encoder": "embedding",
    "unknown": "martian",
    "tokenizer": "tokenizer",
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_model_that_cannot_be_loaded_is_one_sentence(
    how: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Reason, remedy and path in one line, no traceback, exit 1."""
    folder = tmp_path / "tiny"
    shutil.copytree(model_folder("dense"), folder)
    spoil(folder, how)
    code, said = run_to_the_end(tmp_path, "--model", str(folder))
    fault = fault_of(said)
    assert code == 1
    assert fault.startswith("model tiny cannot be loaded: ")
    assert FAULTS[how] in fault
    assert f"MODEL_PATH={folder}" in fault


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("MAX_PROCESS_MEMORY", "1MB"),
        ("MAX_PROCESS_MEMORY", "97% of it"),  # 95 % of what the process may take
        ("MAX_MODEL_MEMORY", "1MB"),
        ("MAX_MODEL_MEMORY", "all but a byte"),
    ],
)
def test_what_does_not_fit_into_memory_is_refused_before_it_is_loaded(
    model_folder: Callable[[str], Path], tmp_path: Path, setting: str, value: str
) -> None:
    """Exit 1, both sizes, and what to do."""
    folder = model_folder("dense")
    size = (folder / "model.safetensors").stat().st_size
    values = {"97% of it": str(int(size / 0.97)), "all but a byte": str(size - 1)}
    flags = ["--model", str(folder)]
    limit = {setting: values.get(value, value)}
    code, said = run_to_the_end(tmp_path, *flags, **limit)
    assert code == 1
    fault = fault_of(said)
    assert fault.startswith("model dense cannot be loaded: its weights take ")
    assert f"raise {setting}" in fault


def test_what_the_pool_finds_too_large_ends_the_start(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """A hub id whose weights the cache holds, beside a model that would fit: exit 1."""
    files = {file.name: file.read_bytes() for file in model_folder("dense").iterdir()}
    with running_hub("org/tiny", files) as hub:
        env = hub.environment(str(tmp_path))
        flags = ["--model", "org/tiny"]
        with started(tmp_path, *flags, **env) as (_, port):
            assert eventually(lambda: is_ready(port), 60)
        other = make_model(tmp_path / "models" / "small", "dense", layers=1)
        maximum = str(len(files["model.safetensors"]) - 1)
        limits = {"MAX_MODEL_MEMORY": maximum, "MODEL_DIR": f"{other.parent}:hub"}
        code, said = run_to_the_end(tmp_path, *flags, **{**env, **limits})
    assert code == 1
    assert "model org/tiny cannot be loaded: its weights take" in fault_of(said)


def test_rules_that_cannot_be_used_are_said_at_once(tmp_path: Path) -> None:
    """Exit 1 with the setting, before a model is loaded."""
    file = tmp_path / "rules.toml"
    code, said = run_to_the_end(tmp_path, CACHE_RULES_FILE=str(file))
    fault = fault_of(said)
    assert code == 1
    assert f"CACHE_RULES_FILE={file}" in fault
    assert "there is no such file" in fault


def test_tracebacks_are_for_developers(tmp_path: Path) -> None:
    """LOG_LEVEL=DEBUG shows where the fault was found."""
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "LOG_LEVEL": "DEBUG"}
    code, said = run_to_the_end(tmp_path, "--model", "org/absent", **env)
    assert code == 1
    assert "Traceback" in said
    assert "HF_HUB_OFFLINE is set" in said.splitlines()[-1]


def test_offline_a_hub_id_is_one_sentence(tmp_path: Path) -> None:
    """Not in the cache, HF_HUB_OFFLINE set: exit 1."""
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code, said = run_to_the_end(tmp_path, "--model", "org/absent", **env)
    assert code == 1
    assert "HF_HUB_OFFLINE is set" in fault_of(said)


def test_under_the_launcher_it_is_one_sentence_too(tmp_path: Path) -> None:
    """A GGUF file, MODEL_PATH with a ~ in .env: the launcher's exit code is 1."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / ".env").write_text("MODEL_PATH=~/model.gguf\n")
    launcher = Launcher(tmp_path, HOME=str(tmp_path))
    assert launcher.wait() == 1
    assert "Traceback" not in launcher.output
    told = [line for line in launcher.output.splitlines() if "GGUF" in line]
    assert told == [told[0]]
    assert told[0].startswith("litellm-mlx: model model.gguf cannot be loaded: ")


def test_a_model_without_a_chat_template_says_so_and_serves(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """A warning at the start; messages become role: content lines."""
    folder = tmp_path / "base"
    shutil.copytree(model_folder("dense"), folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with started(tmp_path, "--model", str(folder)) as (process, port):
        assert eventually(lambda: is_ready(port), 60)
        assert exchange(port, request(CHAT, body(2))).status == 200
        process.terminate()
        assert process.stderr is not None
        assert "no chat template" in process.stderr.read()


def health(port: int) -> dict[str, Any]:
    found: dict[str, Any] = exchange(port, request("/health")).json
    return found


def test_a_download_is_told_by_health_and_ends_at_ctrl_c(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Bytes done and in all; SIGINT ends it at once with 130, what is here is kept."""
    files = {file.name: file.read_bytes() for file in model_folder("dense").iterdir()}
    with running_hub("org/tiny", files) as hub:
        hub.line.holds_after = 1 << 18
        env = hub.environment(str(tmp_path))
        with started(tmp_path, "--model", "org/tiny", **env) as (process, port):
            total = len(files["model.safetensors"])
            wanted = {"done_bytes": 1 << 18, "total_bytes": total}
            assert eventually(lambda: health(port).get("download") == wanted, 60)
            assert health(port)["status"] == "downloading"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        kept = [f.stat().st_size for f in tmp_path.glob("hub/*/blobs/*.incomplete")]
        assert kept == [1 << 18]
        hub.line.go.set()
        with started(tmp_path, "--model", "org/tiny", **env) as (_, port):
            assert eventually(lambda: is_ready(port), 60)
        assert hub.starts["model.safetensors"] == [0, 1 << 18]


def test_the_launcher_shows_a_download_and_goes_on_after_it(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Killed in the middle, sidecar and all; the next start fetches the rest."""
    files = {file.name: file.read_bytes() for file in model_folder("dense").iterdir()}
    with running_hub("org/tiny", files) as hub:
        hub.line.holds_after = 1 << 18
        env = {**hub.environment(str(tmp_path)), "HF_HUB_OFFLINE": ""}
        flags = ["--no-proxy", "--model", "org/tiny"]
        first = Launcher(tmp_path, *flags, **env)
        first.wait_for("download   org/tiny: ")

        def is_held() -> bool:
            partial = tmp_path.glob("hub/*/blobs/*.incomplete")
            return any(file.stat().st_size == 1 << 18 for file in partial)

        assert eventually(is_held, 60)
        first.process.kill()
        first.wait()
        hub.line.holds_after = None
        second = Launcher(tmp_path, *flags, port=first.port, **env)
        second.wait_for("downloaded org/tiny")
        second.wait_for("Ready.")
        second.process.terminate()
        assert second.wait() == 0
        assert hub.starts["model.safetensors"] == [0, 1 << 18]
