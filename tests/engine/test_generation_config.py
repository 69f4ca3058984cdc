"""A model's own sampling defaults, sound or not."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from sidecar.engine.loading.generation_config import read_generation_config
from testkit.servers import running_sidecar


def written(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return folder


def test_sound_values_are_read(tmp_path: Path) -> None:
    """Fields that are not about sampling stay as well."""
    assert read_generation_config(tmp_path) is None
    said = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1]}
    assert read_generation_config(written(tmp_path, json.dumps(said))) == said
    said = {"temperature": None, "top_p": 1, "min_p": 0}
    assert read_generation_config(written(tmp_path, json.dumps(said))) == said


@pytest.mark.parametrize(
    "value", ['"hot"', "true", "[]", "{}", "NaN", "Infinity", "-2", "1e9"]
)
@pytest.mark.parametrize(
    "key", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]
)
def test_values_out_of_range_are_left_out(
    key: str, value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is warned of by its name."""
    folder = written(tmp_path, f'{{"{key}": {value}, "do_sample": true}}')
    with caplog.at_level(logging.WARNING):
        assert read_generation_config(folder) == {"do_sample": True}
    assert f"{key} of generation_config.json" in caplog.text


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "7"])
def test_a_file_that_is_no_object_counts_as_empty(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is served; somebody reads why its defaults are not used."""
    with caplog.at_level(logging.WARNING):
        assert read_generation_config(written(tmp_path, text)) == {}
    assert "generation_config.json" in caplog.text


def test_a_model_with_unsound_defaults_answers(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """A chat is answered with the defaults that are left."""
    folder = tmp_path / "unsound"
    shutil.copytree(model_folder("dense"), folder)
    written(folder, '{"temperature": "hot", "top_k": 1e400, "top_p": 0.9}')
    with running_sidecar({"MODEL_PATH": str(folder)}) as app:
        body = {
            "model": "local",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
        }
        answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200
