"""A config.json without `model_type` or `head_dim`: the weights tell."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from sidecar.engine.loading.absent_fields import absent_fields
from testkit.servers import running_sidecar
from testkit.tiny_models import BUILTIN


def _without(out: Path, *names: str) -> Path:
    """The built-in model, which is a Qwen3, without some fields."""
    shutil.copytree(BUILTIN, out)
    config = json.loads((out / "config.json").read_text())
    for name in names:
        config.pop(name)
    (out / "config.json").write_text(json.dumps(config))
    return out


def _said(model: Path) -> str:
    body = {"model": "local", "temperature": 0, "max_tokens": 8,
            "messages": [{"role": "user", "content": "Name a colour."}]}  # fmt: skip
    with running_sidecar({"MODEL_PATH": str(model)}) as app:
        url = f"{app.url}/v1/chat/completions"
        answer: dict[str, Any] = httpx.post(url, json=body, timeout=120).json()
    return str(answer["choices"][0]["message"])


@pytest.mark.filterwarnings("ignore:.*rope_scaling")  # transformers', of no type
def test_a_qwen3_says_the_same_without_them(tmp_path: Path) -> None:
    whole = _said(_without(tmp_path / "whole"))
    assert _said(_without(tmp_path / "less", "model_type", "head_dim")) == whole


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("q_proj.weight", "q_proj.bias"), "qwen2"),
        (("q_proj.weight", "q_norm.weight"), "qwen3"),
        (("q_proj.weight",), None),
        (("k_proj.weight",), None),
    ],
)
def test_the_kind_is_told_by_the_names(
    tmp_path: Path, names: tuple[str, ...], kind: str | None
) -> None:
    arrays = {f"model.layers.0.self_attn.{name}": mx.zeros((16,)) for name in names}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    found = absent_fields(tmp_path, {"hidden_size": 64})
    assert found.get("model_type") == kind
    assert found.get("head_dim") == (16 if kind == "qwen3" else None)


def test_what_is_there_is_believed(tmp_path: Path) -> None:
    assert absent_fields(tmp_path, {"model_type": "llama"}) == {}
    assert absent_fields(tmp_path, {"model_type": "qwen3", "head_dim": 4}) == {}
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert absent_fields(tmp_path, {}) == {}
