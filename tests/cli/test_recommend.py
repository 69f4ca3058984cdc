"""`mlx-sidecar recommend`: what is here, and what a stand-in of a hub has."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from sidecar.engine.kv_estimate import KVEstimate, estimate_kv
from sidecar.engine.loading import hub_listing
from sidecar.engine.loading.hub_faults import HubFault
from sidecar.engine.loading.loader import load
from sidecar.engine.loading.model_place import ModelSource
from sidecar.engine.memory_fit import kv_sizes
from testkit.hub import running_hub
from tools.tiny_checkpoints import make_text

REPO = Path(__file__).parents[2]
ModelFolder = Callable[[str], Path]


def recommend(
    home: Path, env: dict[str, str], *flags: str
) -> "subprocess.CompletedProcess[str]":
    paths = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "sidecar", "recommend", *flags], cwd=home, text=True,
        env={**paths, **env}, capture_output=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_kv_is_foreseen_without_weights(
    kind: str, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """As it is counted where it is held; a config.json alone is enough."""
    folder = model_folder(kind)
    model = load(ModelSource("it", folder), trust=False)
    cache = model.new_cache()
    model.forward(mx.zeros((1, 1), mx.int32), cache=cache)
    held = KVEstimate(*kv_sizes(cache))
    assert estimate_kv(folder) == held
    shutil.copy(folder / "config.json", tmp_path)
    alone = estimate_kv(tmp_path)
    assert alone is not None
    # The tiny models have weights of four bytes; two are taken for granted.
    assert 2 * alone.per_token == held.per_token
    assert alone.fixed <= held.fixed <= 2 * alone.fixed


@pytest.mark.parametrize("name", ["deepseek_v41", "llama4", "qwen3_next", "falcon_h1"])
def test_kv_is_foreseen_of_other_layers(name: str, tmp_path: Path) -> None:
    """Groups that are compressed grow, chunks and windows fill, states do neither."""
    folder = make_text(tmp_path / "model", name)
    model, _ = load_model(folder)
    cache = make_prompt_cache(model)
    for _ in range(32):
        mx.eval(model(mx.zeros((1, 64), mx.int32), cache=cache))
    held = sum(layer.nbytes for layer in cache)
    estimate = estimate_kv(folder)
    assert estimate is not None
    # A window holds a chunk beside it: of 64 tokens here.
    assert 0.75 * held <= estimate.num_bytes(2048) <= 1.25 * held


def test_what_cannot_be_built_is_not_foreseen(tmp_path: Path) -> None:
    assert estimate_kv(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert estimate_kv(tmp_path) is None


def test_what_fits_is_named(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The hub's, by its own list; not what is too large, and not what is no model."""
    folder = model_folder("dense")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    config = json.loads(files["config.json"])
    config["max_position_embeddings"] = 70_000
    files["config.json"] = json.dumps(config).encode()
    with running_hub("mlx-community/tiny", files) as hub:
        hub.listed = ("mlx-community/not-there", "other/model")
        env = hub.environment(str(tmp_path))
        ran = recommend(tmp_path, env)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert "70,000 tokens  mlx-community/tiny\n" in ran.stdout
        assert "not-there" not in ran.stdout
        assert "other" not in ran.stdout
        assert not any(name.endswith(".safetensors") for name in hub.fetched)
        hub.line.claimed["model.safetensors"] = 1 << 40
        ran = recommend(tmp_path, env, "--json")
        assert (ran.returncode, json.loads(ran.stdout)) == (1, [])


def test_without_a_hub_it_says_what_is_here(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    shutil.copytree(model_folder("dense"), tmp_path / "models" / "mine")
    offline = {"HF_HUB_OFFLINE": "1", "MODEL_DIR": str(tmp_path / "models")}
    config = tmp_path / "models" / "mine" / "config.json"
    written = json.loads(config.read_text())
    config.write_text(json.dumps(written | {"max_position_embeddings": 63_999}))
    ran = recommend(tmp_path, offline)
    assert "HF_HUB_OFFLINE is set" in ran.stderr
    assert "mine  here, too little for an agent" in ran.stdout
    assert "No model of this machine fits with 64,000 tokens." in ran.stdout
    assert ran.returncode == 1
    quiet = recommend(tmp_path, offline, "--offline")
    assert (quiet.stdout, quiet.stderr) == (ran.stdout, "")
    config.write_text(json.dumps(written | {"max_position_embeddings": 65_536}))
    ran = recommend(tmp_path, offline, "--offline")
    assert ran.returncode == 0
    assert "65,536 tokens  mine  here\n" in ran.stdout


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1}',
        b"[1, 2]",
        b'[{"x": 1}]',
        b'[{"id": null}]',
        b"[" * 99_999,
        b"<html>",
    ],
    ids=["object", "numbers", "no id", "null", "deep", "html"],
)
def test_an_answer_that_is_no_list_is_said(
    body: bytes, model_folder: ModelFolder, tmp_path: Path
) -> None:
    with running_hub("mlx-community/tiny", {}) as hub:
        hub.line.list_body = body
        ran = recommend(tmp_path, hub.environment(str(tmp_path)))
    assert ran.returncode == 1
    assert "the hub" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_hub_that_never_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hang(*_: object) -> list[str]:
        threading.Event().wait(60)
        return []

    monkeypatch.setattr(hub_listing, "_DEADLINE_S", 0.2)
    monkeypatch.setattr(hub_listing, "_listed", lambda *_args, **_asked: hang())
    with pytest.raises(HubFault, match="did not answer within 0.2 s"):
        hub_listing.most_downloaded("mlx-community", 5)
    assert hub_listing.close_names("org/name") == ""


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "olmo", "d_model": 8},  # mlx-lm ends the process for it
        {"model_type": "qwen3", "num_hidden_layers": 10**9},
        {"model_type": "dbrx", "n_layers": 10**9},
        {"model_type": "qwen3", "hidden_size": -1},
        {"model_type": ["qwen3"]},
    ],
)
def test_a_claim_takes_neither_time_nor_the_process(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert estimate_kv(tmp_path) is None
