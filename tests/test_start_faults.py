"""What keeps a start from going well is one sentence, or a warning that is seen."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from testkit.launcher import Launcher
from testkit.raw_http import eventually, exchange, request
from testkit.sidecar_process import fault_of, is_ready, run_to_the_end, started

CHAT = "/v1/chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}'
ModelFolder = Callable[[str], Path]


@pytest.fixture
def model(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A whole model, to be spoiled."""
    folder = tmp_path / "tiny"
    shutil.copytree(model_folder("dense"), folder)
    return folder


@pytest.mark.parametrize(
    ("closed", "named"),
    [
        (".", "it cannot be read (Permission denied)"),
        ("model.safetensors", "model.safetensors cannot be read"),
        ("config.json", "config.json cannot be read"),
        ("tokenizer.json", "tokenizer.json cannot be read"),
    ],
)
def test_what_may_not_be_read_is_named(
    model: Path, tmp_path: Path, closed: str, named: str
) -> None:
    """A folder, its weights, or any other file: exit 1, and what to do."""
    mode = (model / closed).stat().st_mode
    (model / closed).chmod(0)
    code, said = run_to_the_end(tmp_path, "--model", str(model))
    (model / closed).chmod(mode)
    assert code == 1
    assert fault_of(said).startswith(f"model tiny cannot be loaded: {named}")
    assert "chmod" in said


def test_a_folder_that_may_not_be_entered_is_not_there(tmp_path: Path) -> None:
    """One above the model's own: no traceback."""
    (tmp_path / "above" / "tiny").mkdir(parents=True)
    (tmp_path / "above").chmod(0)
    code, said = run_to_the_end(tmp_path, "--model", str(tmp_path / "above" / "tiny"))
    (tmp_path / "above").chmod(0o700)
    assert code == 1
    assert "there is no such folder" in fault_of(said)


def test_an_env_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    """By the sidecar and by the launcher: exit 2."""
    (tmp_path / ".env").write_bytes(b"MODEL_PATH=/x/caf\xe9\n")
    code, said = run_to_the_end(tmp_path)
    assert code == 2
    assert ".env cannot be read: it is not in UTF-8 (byte 17)" in fault_of(said)
    launcher = Launcher(tmp_path)
    assert launcher.wait() == 2
    assert launcher.output.count("not in UTF-8") == 1
    assert "Traceback" not in launcher.output


def test_a_cache_that_cannot_be_made_is_named_with_the_setting(tmp_path: Path) -> None:
    """As in a home folder that is read-only."""
    (tmp_path / "cache").write_text("a file is in its place")
    launcher = Launcher(tmp_path, "--no-proxy")
    assert launcher.wait() == 1
    assert "cannot be made" in launcher.output
    assert "set MLX_CACHE_HOME" in launcher.output


def test_few_files_are_enough_to_start(model: Path, tmp_path: Path) -> None:
    """mlx-lm wants a hard limit of 4,096 of every process that imports it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    flags = ["--model", str(model)]
    with started(tmp_path, *flags, files=1000) as (process, port):
        assert eventually(lambda: is_ready(port), 60)
        limit = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert limit == (1000, 1000)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def said_while_serving(folder: Path, *flags: str, status: int, **more: str) -> str:
    """What a sidecar says that answers a chat so."""
    with started(folder, *flags, **more) as (process, port):
        assert eventually(lambda: is_ready(port), 60)
        assert exchange(port, request(CHAT, BODY)).status == status
        process.terminate()
        assert process.stderr is not None
        return process.stderr.read()


def test_settings_of_nothing_are_told(model: Path, tmp_path: Path) -> None:
    """A file that is not there, names that no model has; it serves all the same."""
    settings = {
        "MODEL_SETTINGS_PATH": str(tmp_path / "none.json"),
        "PINNED_MODELS": "nobody, tiny",
    }
    flags = ["--model", str(model)]
    said = said_while_serving(tmp_path, *flags, status=200, **settings)
    assert "there is no file" in said
    assert "none.json" in said
    assert "PINNED_MODELS: no model is named nobody" in said
    assert said.count("PINNED_MODELS") == 1


def test_a_template_with_a_syntax_error_is_told(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ 1 | }} {% for")
    said = said_while_serving(tmp_path, "--model", str(model), status=400)
    assert "every chat is refused: the chat template fails: TemplateSyntax" in said


def test_a_tokenizer_with_more_ids_than_rows_is_told(
    model: Path, tmp_path: Path
) -> None:
    """Such an id would be read out of bounds; other prompts are answered."""
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    last = tokenizer["added_tokens"][-1]
    tokenizer["added_tokens"].append({**last, "id": 9000, "content": "<|more|>"})
    file.write_text(json.dumps(tokenizer))
    said = said_while_serving(tmp_path, "--model", str(model), status=200)
    assert "tokenizer has ids up to" in said


def test_a_default_model_that_takes_no_chats_is_told(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """A decoder that was tuned to embed is served, with a warning."""
    folder = tmp_path / "tiny-embed"
    shutil.copytree(model_folder("dense"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    said = said_while_serving(tmp_path, "--model", str(folder), status=400)
    assert "warning: MODEL_PATH names a model of kind embedding" in said


def test_any_free_port_and_the_built_in_model(tmp_path: Path) -> None:
    """MLX_PORT=0, and `built-in` where .env names another model."""
    (tmp_path / ".env").write_text("MODEL_PATH=/nowhere\nMLX_PORT=0\n")
    flags = ["--no-proxy", "--model", "built-in"]
    launcher = Launcher(tmp_path, *flags, port=0)
    launcher.wait_for("Ready.")
    launcher.process.terminate()
    assert launcher.wait() == 0
    assert "the small built-in model" in launcher.output
    assert "http://127.0.0.1:0" not in launcher.output


def test_benchmarks_say_what_they_lack(tmp_path: Path) -> None:
    """psutil is of the extra `dev`, which the first command does not install."""
    (tmp_path / "psutil.py").write_text("raise ModuleNotFoundError(name='psutil')")
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "compare", "--help"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "bench: psutil is missing. Fix: " in ended.stderr
    assert "Traceback" not in ended.stderr
