"""`mlx-sidecar kv`: what is there, whether it is whole, and mlx-lm's own files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from sidecar.cli.kv import main
from sidecar.core import lasting_secret
from sidecar.core.prompt import ModelIds
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv.disk.root import DiskRoot
from testkit.jobs import random_ids
from testkit.kept_kv import ask, disk_settings, flush, kept_sidecar, said, slots

ModelFolder = Callable[[str], Path]
Cold = Callable[[str, ModelIds], tuple[int, ...]]
KINDS = ["dense", "hybrid", "sliding"]


@pytest.fixture
def tool(
    tmp_path: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """The tool, with the settings of a kind's sidecar."""
    monkeypatch.setattr(lasting_secret, "_secret", lasting_secret._secret)
    monkeypatch.chdir(tmp_path)

    def run(kind: str, *argv: str) -> int:
        asked = disk_settings(tmp_path / "kv", model_folder(kind), MODEL_DIR="none")
        asked["CACHE_SELFTEST"] = "off"
        for name, value in asked.items():
            monkeypatch.setenv(name, value)
        return main(list(argv))

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_goes_out_and_comes_in(
    kind: str,
    tool: Callable[..., int],
    model_folder: ModelFolder,
    cold: Cold,
    tiny_model: Callable[[str], LoadedModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As one file that mlx-lm goes on from; taken in again, it serves."""
    root, ids = tmp_path / "kv", random_ids(1, 100)
    with kept_sidecar(root, model_folder(kind)) as app:
        whole = ModelIds(ids + said(ask(app, ids)))
        flush(app)
        whole = ModelIds(whole + random_ids(2, 80))
        whole = ModelIds(whole + said(ask(app, whole)))
    assert len(slots(root)) == 2
    folder = slots(root)[0].parent.name
    assert tool(kind, "list") == 0
    shown = capsys.readouterr().out
    assert "tokens 0..112  root" in shown
    assert "from 1" in shown
    assert tool(kind, "verify") == 0
    assert "2 slots, 0 damaged" in capsys.readouterr().out
    file = tmp_path / "out.safetensors"
    assert tool(kind, "export", f"{folder}/2", str(file)) == 0
    for written in (file, Path(f"{file}.ids.json")):
        assert written.stat().st_mode & 0o777 == 0o600
    told = json.loads(Path(f"{file}.ids.json").read_text())
    assert tuple(told) == whole

    def go_on() -> list[int]:
        cache: Any = load_prompt_cache(str(file))
        fed, found = mx.array([[7]]), []
        for _ in range(12):
            logits = tiny_model(kind).model(fed, cache=cache)
            fed = mx.argmax(logits[:, -1], axis=-1)[None]
            found.append(int(fed[0, 0]))
        return found

    asked = ModelIds((*whole, 7))
    assert tuple(gpu_thread().call(go_on)) == cold(kind, asked)
    assert tool(kind, "forget", "--session", "nobody's") == 0
    assert slots(root)
    assert tool(kind, "forget") == 0
    assert slots(root) == []
    assert tool(kind, "import", str(file), f"{file}.ids.json") == 0
    with kept_sidecar(root, model_folder(kind)) as app:
        outcome = ask(app, asked)
        assert outcome.cached == len(whole)
        assert said(outcome) == cold(kind, asked)


def stock_cache(
    tiny_model: Callable[[str], LoadedModel], folder: Path
) -> tuple[ModelIds, Path]:
    """A prompt's ids, in `ids.json` too, and mlx-lm's own file of its KV."""
    ids, file = random_ids(1, 130), folder / "stock.safetensors"

    def write() -> None:
        model = tiny_model("dense").model
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([ids]), cache=cache))
        save_prompt_cache(str(file), cache)

    gpu_thread().call(write)
    (folder / "ids.json").write_text(json.dumps(ids))
    return ids, file


def test_a_file_that_mlx_lm_wrote_comes_in(
    tool: Callable[..., int],
    model_folder: ModelFolder,
    cold: Cold,
    tiny_model: Callable[[str], LoadedModel],
    tmp_path: Path,
) -> None:
    """Its arrays have room behind what is in them."""
    ids, file = stock_cache(tiny_model, tmp_path)
    assert tool("dense", "import", str(file), str(tmp_path / "ids.json")) == 0
    asked = ModelIds(ids + random_ids(2, 20))
    with kept_sidecar(tmp_path / "kv", model_folder("dense")) as app:
        outcome = ask(app, asked)
        assert outcome.cached == len(ids)
        assert said(outcome) == cold("dense", asked)


def test_what_is_not_written_is_not_said_to_be(
    tool: Callable[..., int],
    tiny_model: Callable[[str], LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A disk that must keep more free than it has."""
    _, file = stock_cache(tiny_model, tmp_path)
    monkeypatch.setattr(DiskRoot, "refusal", lambda *_, **__: "space")
    assert tool("dense", "import", str(file), str(tmp_path / "ids.json")) == 1
    told = capsys.readouterr()
    assert "not written" in told.err
    assert told.out == ""


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("export", "nowhere/1", "out"), "there is no slot nowhere/1"),
        (("export", "x", "out"), "there is no slot x"),
        (("export", "nowhere/\u00b2", "out"), "there is no slot nowhere/"),
        (("import", "missing", "far.json"), "the model has no token 1000000000"),
        (("import", "missing", "short.json"), "KV_DISK_MIN_PREFIX_TOKENS is 32"),
        (("import", "missing", "ids.json"), "no prompt cache"),
        (("import", "missing", "bad.json"), "must hold a list"),
        (("import", "missing", "none.json"), "none.json"),
    ],
)
def test_what_cannot_be_done_is_said(
    argv: tuple[str, ...],
    reason: str,
    tool: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "ids.json").write_text(json.dumps([1, 2] * 16))
    (tmp_path / "far.json").write_text(json.dumps([1, 10**9] * 16))
    (tmp_path / "short.json").write_text("[1, 2]")
    (tmp_path / "bad.json").write_text('{"a": 1}')
    assert tool("dense", *argv) == 1
    assert reason in capsys.readouterr().err


def test_damage_is_found(
    tool: Callable[..., int],
    model_folder: ModelFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with kept_sidecar(tmp_path / "kv", model_folder("dense")) as app:
        ask(app, random_ids(1, 100))
    (file,) = (tmp_path / "kv").glob("*/slot_1_cache.*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert tool("dense", "verify") == 1
    assert "1 slots, 1 damaged" in capsys.readouterr().out


def test_no_folder_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped path; and what is behind a link is somebody else's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KV_DISK_PATH", str(tmp_path / "nowhere"))
    for argv in (["forget"], ["list"], ["verify"], ["export", "a/1", "out"]):
        assert main(argv) == 1
        assert "there is no folder" in capsys.readouterr().err
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.json").write_text("{}")
    (foreign / "slot_1_meta.json").write_text("mine")
    root = tmp_path / "kv"
    root.mkdir()
    (root / "0123456789abcdef").symlink_to(foreign)
    monkeypatch.setenv("KV_DISK_PATH", str(root))
    assert main(["forget"]) == 0
    left = sorted(path.name for path in foreign.iterdir())
    assert left == ["model.json", "slot_1_meta.json"]
