"""The loader: folders, the hub, and what it refuses."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loader import BUILTIN_NAME, LoadedModel, load, model_name
from tests.support.hub import running_hub

REPO = Path(__file__).parents[2]
ModelFolder = Callable[[str], Path]


def load_here(path: Path | str | None, *, trust: bool = False) -> LoadedModel:
    where = None if path is None else str(path)
    return gpu_thread().call(lambda: load(where, None, trust=trust))


def failure(path: Path | str, *, trust: bool = False) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        load_here(path, trust=trust)
    return caught.value.message


@pytest.fixture
def folder(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A copy of the dense model, free to be spoilt."""
    copy = tmp_path / "tiny"
    shutil.copytree(model_folder("dense"), copy)
    return copy


def test_the_built_in_model() -> None:
    """Everything that is computed at the load, on the model that ships."""
    model = load_here(None)
    vocab = model.tokenizer.get_vocab()
    assert model.name == BUILTIN_NAME
    assert model.vocab_size == 3072
    assert {vocab["<|im_end|>"], vocab["<|endoftext|>"]} <= model.stop_ids
    assert model.context_len == 32768
    assert model.num_bytes == pytest.approx(7.7e6, rel=0.02)
    assert (model.syntax.family.name, model.syntax.tools.opener) == (
        "qwen3",
        "<tool_call>",
    )
    assert model.generation_config is not None
    assert len(model.new_cache()) == 8


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_each_kind_of_model_loads(kind: str, model_folder: ModelFolder) -> None:
    """Named for its folder, with the context its config gives."""
    model = load_here(model_folder(kind))
    assert (model.name, model.context_len) == (kind, 262144)


def test_a_model_is_called_by_its_folder_or_hub_id(tmp_path: Path) -> None:
    """What clients can ask for."""
    assert model_name(None) == BUILTIN_NAME
    assert model_name(str(tmp_path)) == tmp_path.name
    assert model_name("org/model") == "org/model"


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "~/nothing/at/all"])
def test_a_missing_folder_is_said_to_be_missing(path: str) -> None:
    """A path is not looked up on the hub."""
    assert "no such folder" in failure(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_with_a_file_missing_does_not_load(folder: Path, name: str) -> None:
    """Each needed file's absence is a failed load, not half a model."""
    (folder / name).unlink()
    assert "tiny" in failure(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_does_not_load(folder: Path, name: str) -> None:
    """Half a file is a failed load."""
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    assert "tiny" in failure(folder)


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    """The message says which one."""
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "martian"
    (folder / "config.json").write_text(json.dumps(config))
    assert "martian" in failure(folder)


def plant(folder: Path, mark: Path, where: str) -> None:
    """Make the folder bring code that leaves a mark when it runs."""
    code = f"open({str(mark)!r}, 'w').close()\nraise ImportError('ran')\n"
    (folder / "planted.py").write_text(code)
    name = "config.json" if where == "model" else "tokenizer_config.json"
    config = json.loads((folder / name).read_text())
    if where == "model":
        config["model_file"] = "planted.py"
    else:
        config["auto_map"] = {"AutoTokenizer": ["planted.Tok", "planted.Tok"]}
        config["tokenizer_class"] = "PlantedTokenizer"
    (folder / name).write_text(json.dumps(config))


@pytest.mark.parametrize("where", ["model", "tokenizer"])
def test_code_in_a_model_folder_does_not_run(
    folder: Path, tmp_path: Path, where: str
) -> None:
    """Model folders are data: code in them is refused or passed over, never run."""
    mark = tmp_path / "mark"
    plant(folder, mark, where)
    if where == "model":
        assert "trust_remote_code" in failure(folder)
    else:
        with contextlib.suppress(ModelLoadFailed):
            load_here(folder)
    assert not mark.exists()


def test_code_runs_only_if_trusted(folder: Path, tmp_path: Path) -> None:
    """TRUST_REMOTE_CODE=true: the same folder's code is run (and fails)."""
    mark = tmp_path / "mark"
    plant(folder, mark, "model")
    assert "ran" in failure(folder, trust=True)
    assert mark.exists()


def test_pickled_weights_are_not_read(folder: Path) -> None:
    """Only safetensors are weights."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "safetensors" in failure(folder)


DOWNLOAD = """
import sys
from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.loader import load
for name in sys.argv[1:]:
    try:
        model = load(name, None, trust=False)
        print("loaded", model.name, model.vocab_size)
    except ModelLoadFailed as error:
        print("failed", error.message.splitlines()[0])
"""


def test_a_model_comes_from_the_hub_by_its_id(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Only what a model needs is fetched, once; an absent one is said to be absent."""
    files = {file.name: file.read_bytes() for file in model_folder("dense").iterdir()}
    unwanted = {"evil.py": b"1/0", "pytorch_model.bin": b"x", "README.md": b"x"}
    with running_hub("org/tiny", {**files, **unwanted}) as hub:
        env = {
            "PATH": os.environ["PATH"],
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        ended = subprocess.run(
            [sys.executable, "-c", DOWNLOAD, "org/tiny", "org/tiny", "org/absent"],
            cwd=REPO, env=env, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    first, second, third = ended.stdout.splitlines()
    assert first == second == "loaded org/tiny 3072"
    assert third.startswith("failed model org/absent could not be loaded: 404")
    assert sorted(hub.fetched) == sorted(files)
