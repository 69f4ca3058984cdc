"""
How a model that sees is read: nothing of its folder runs unasked, and where its eyes
fail it is served as text, with the reason.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.engine.vision import vision_encoder
from testkit.pictures import image_part
from testkit.servers import running_sidecar
from testkit.tiny_encoders import make_encoder


def post(app: App, *parts: Any) -> httpx.Response:
    content = [{"type": "text", "text": "what is it?"}, *parts]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)


def refusal(app: App) -> str:
    answer = post(app, image_part(1))
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").write_text("it ran")
class Evil:
    pass
"""


def edit(file: Path, **values: Any) -> None:
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**old, **values}))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}),
        ("processor_config.json", {"auto_map": {"AutoProcessor": "evil.Evil"}}),
        ("preprocessor_config.json", {"auto_map": {"AutoProcessor": "evil.Evil"}}),
        ("config.json", {"auto_map": {"AutoConfig": "evil.Evil"}}),
        ("config.json", {"model_file": "evil.py"}),
        ("config.json", {}),
    ],
)
@pytest.mark.parametrize("kind", ["seeing", "seeing-sliding"])
def test_code_of_the_folder_does_not_run(
    folder: Path, tmp_path: Path, kind: str, name: str, values: dict[str, Any]
) -> None:
    """Whatever of mlx-vlm trusts it by itself; its text is served all the same."""
    hostile = shutil.copytree(folder / kind, tmp_path / kind)
    (hostile / "evil.py").write_text(EVIL)
    edit(hostile / name, **values)
    with running_sidecar({"MODEL_PATH": str(hostile)}, ready=False) as app:
        if post(app).status_code == 200:
            assert "code of its own" in refusal(app)
    assert not (hostile / "ran").exists()


def test_code_of_an_encoders_folder_does_not_run(tmp_path: Path) -> None:
    hostile = make_encoder(tmp_path / "bert-embed", "bert-embed")
    (hostile / "evil.py").write_text(EVIL)
    edit(hostile / "config.json", model_file="evil.py",
         auto_map={"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"})  # fmt: skip
    edit(hostile / "tokenizer_config.json", auto_map={"AutoTokenizer": "evil.Evil"})
    with running_sidecar({"MODEL_PATH": str(hostile)}, ready=False) as app:
        body = {"model": "local", "input": "a"}
        httpx.post(f"{app.url}/v1/embeddings", json=body, timeout=120)
    assert not (hostile / "ran").exists()


def test_where_its_computation_fails_mlx_lm_reads_its_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("no such rope")

    monkeypatch.setattr(vision_encoder, "_counted", broken)
    with running_sidecar({"MODEL_PATH": str(folder / "seeing")}) as app:
        assert post(app).status_code == 200
        assert "no such rope" in refusal(app)


def test_where_its_test_fails_pictures_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image's features are those of another place: nothing else shows it."""
    cut = vision_encoder.Features.cut

    def shifted(
        self: vision_encoder.Features, start: int, end: int
    ) -> vision_encoder.Features:
        found = cut(self, start, end)
        return vision_encoder.Features(
            found.embeds[::-1], found.deep, found.pads, found.layers
        )

    monkeypatch.setattr(vision_encoder.Features, "cut", shifted)
    named = {"MODEL_PATH": str(folder / "seeing"), "CACHE_SELFTEST": "on_load"}
    with running_sidecar(named) as app:
        assert post(app).status_code == 200
        assert "test of images failed" in refusal(app)
        (listed,) = httpx.get(f"{app.url}/v1/models").json()["data"]
        assert listed["supports_vision"] is False


def test_a_library_that_ends_the_program_ends_only_the_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: Any, **__: Any) -> Any:
        raise SystemExit(1)

    monkeypatch.setattr("sidecar.engine.loading.loader.load_model", leave)
    named = {"MODEL_PATH": str(folder / "blind")}
    with running_sidecar(named, ready=False) as app:
        answer = post(app)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "model_load_failed"
        assert httpx.get(f"{app.url}/health").json()["status"] == "degraded"
