"""What cannot be loaded says why; nothing is fetched, and no stranger's code is run."""

import json
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest

from sidecar.engine.loading.closed_network import NotFetched, closed_network
from testkit.servers import running_sidecar
from testkit.tiny_audio import make_audio, sound_file, tones
from testkit.tiny_models import make_model
from tests.audio.asking import refused, speak, transcribe


@pytest.fixture
def models(tmp_path: Path) -> Path:
    make_model(tmp_path / "talker", "dense")
    make_audio(tmp_path / "moonshine", "moonshine")
    return tmp_path


def settings(models: Path, **more: str) -> dict[str, str]:
    named = {"MODEL_DIR": str(models), "MODEL_PATH": str(models / "talker")}
    return {**named, **more}


def listed(url: str) -> dict[str, Any]:
    found = httpx.get(f"{url}/admin/models", timeout=60).json()["models"]
    return {model["id"]: model for model in found}


def test_without_the_library_it_is_unavailable(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_audio", None)
    with running_sidecar(settings(models)) as app:
        entry = listed(app.url)["moonshine"]
        assert (entry["kind"], entry["state"]) == ("stt", "unavailable")
        assert "install litellm-mlx[audio]" in entry["load_error"]
        answer = transcribe(app, sound_file(tones(1)))
        assert answer.status_code == 500
        assert "install litellm-mlx[audio]" in answer.json()["error"]["message"]


def test_a_default_model_without_its_library_says_so(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_audio", None)
    named = {"MODEL_PATH": str(models / "moonshine")}
    with running_sidecar(named, ready=False) as app:
        answer = transcribe(app, sound_file(tones(1)), model="local")
        assert answer.status_code == 500
        assert "install litellm-mlx[audio]" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("modeling.py", "raise SystemExit", "TRUST_REMOTE_CODE"),
        ("codec/modeling.py", "raise SystemExit", "TRUST_REMOTE_CODE"),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["a.B", null]}}',
         "TRUST_REMOTE_CODE"),
        ("tokenizer.json", "{", "tokenizer"),
        ("config.json", '{"model_type": "moonshine", "hidden_size": 1e12}',
         "hidden_size"),
    ],
)  # fmt: skip
def test_a_broken_model_says_why(models: Path, file: str, text: str, why: str) -> None:
    (models / "moonshine" / "codec").mkdir()
    (models / "moonshine" / file).write_text(text)
    with running_sidecar(settings(models)) as app:
        for _ in range(2):  # the second time as well
            answer = transcribe(app, sound_file(tones(1)))
            status, _, message = refused(answer)
            assert status == 500
            assert why in message
            assert str(models) not in message
        assert app.pool.num_leases == 0


def test_weights_that_are_missing_or_cut_are_told_of(models: Path) -> None:
    file = models / "moonshine" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    shutil.copytree(models / "moonshine", models / "bare")
    (models / "bare" / "model.safetensors").unlink()
    with running_sidecar(settings(models)) as app:
        entries = listed(app.url)
        assert entries["moonshine"]["state"] == "incomplete"
        assert "no weights" in entries["bare"]["load_error"]


def test_weights_may_have_any_name(models: Path) -> None:
    place = models / "moonshine"
    (place / "model.safetensors").rename(place / "weights.safetensors")
    with running_sidecar(settings(models)) as app:
        assert transcribe(app, sound_file(tones(1))).status_code == 200


def test_what_is_elsewhere_is_named_and_not_fetched(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real loader of the library's: its tokenizer is on the hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(models / "hub"))
    out = models / "talking"
    shutil.copytree(models / "moonshine", out)
    config = {
        "model_type": "outetts", "hidden_size": 64, "num_hidden_layers": 1,
        "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 64,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    with running_sidecar(settings(models)) as app:
        assert listed(app.url)["talking"]["kind"] == "tts"
        status, _, message = refused(speak(app, model="talking", input="Hi."))
        assert status == 500
        assert "it needs OuteAI/" in message
        assert "nothing is fetched" in message


def test_nothing_leaves_a_thread_that_is_shut_in(tmp_path: Path) -> None:
    attempts = [
        lambda: socket.create_connection(("127.0.0.1", 9), timeout=5),
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: subprocess.run([sys.executable, "-V"], check=True),
        lambda: httpx.get("http://127.0.0.1:9"),
    ]
    for attempt in attempts:
        with pytest.raises(NotFetched, match="nothing is fetched"), closed_network():
            attempt()
    with pytest.raises(NotFetched, match="someone/some-codec"), closed_network():
        huggingface_hub.snapshot_download("someone/some-codec", cache_dir=tmp_path)
    with pytest.raises(NotFetched, match="someone/some-codec"), closed_network():
        huggingface_hub.hf_hub_download("someone/some-codec", "a", cache_dir=tmp_path)


def test_other_threads_are_not_shut_in() -> None:
    """Nor is this one, once it is let out."""
    failed: list[BaseException] = []

    def look() -> None:
        try:
            socket.getaddrinfo("localhost", 80)
            subprocess.run([sys.executable, "-V"], check=True, capture_output=True)
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    with closed_network():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(60)
    look()
    assert failed == []


def test_what_is_there_is_used_and_other_errors_are_their_own(tmp_path: Path) -> None:
    with pytest.raises(KeyError), closed_network():
        raise KeyError("mine")
    with closed_network():
        (tmp_path / "file").write_text("x")
        assert (tmp_path / "file").read_text() == "x"
