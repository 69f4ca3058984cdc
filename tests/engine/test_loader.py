"""The loader: folders, and what it refuses."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loading.checkpoint_files import MemoryLimit
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import load
from sidecar.engine.loading.model_place import BUILTIN_NAME, early_fault, model_name
from sidecar.engine.loading.model_source import find_model, knows_architecture

ModelFolder = Callable[[str], Path]


def load_here(path: Path | str | None, *, trust: bool = False) -> LoadedModel:
    source = find_model(None if path is None else str(path))
    return gpu_thread().call(lambda: load(source, trust=trust))


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
    assert (model.syntax.family.name, model.syntax.calls[0].opener) == (
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
    assert model_name("/no/such/place") == "place"


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./nothing", "~/nothing/at/all", "a/b/c", "x.gguf"]
)
def test_a_missing_folder_is_said_to_be_missing(path: str) -> None:
    """A path is not looked up on the hub."""
    assert "no such folder" in failure(path)


@pytest.mark.parametrize("name", ["llama3.2:3b", "hf:org/name", "a b"])
def test_a_name_that_no_hub_has_is_told_at_once(name: str) -> None:
    """As Ollama's are."""
    assert "it is no hub id" in str(early_fault(name, None))


def test_an_address_is_no_hub_id_and_the_id_is_named() -> None:
    """As it is copied from a browser."""
    assert "the hub id alone, org/some-model" in failure("https://hub/org/some-model")


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


def test_a_file_is_not_a_folder(folder: Path) -> None:
    """A GGUF file is told from another file."""
    other = folder / "model.gguf"
    other.write_bytes(b"GGUF")
    assert "GGUF" in failure(other)
    assert "give the folder" in failure(folder / "config.json")


def test_weights_larger_than_the_limit_are_not_loaded(folder: Path) -> None:
    """Told from the files' sizes, before anything is read."""
    with pytest.raises(ModelLoadFailed, match="MAX_PROCESS_MEMORY"):
        find_model(str(folder), limit=MemoryLimit(1000, "MAX_PROCESS_MEMORY"))


@pytest.mark.parametrize(
    "kind",
    ["qwen3", "mistral", "lfm2-vl", "bailing_hybrid", "martian", "a.b", "", ".."],
)
def test_architectures_mlx_lm_builds(kind: str) -> None:
    """Those it has a file for, by their own name or another's."""
    known = kind in ("qwen3", "mistral", "lfm2-vl", "bailing_hybrid")
    assert knows_architecture({"model_type": kind}) == known


def test_a_fault_of_a_library_is_one_line(folder: Path) -> None:
    """Weights that do not fit the config: the library's first line, no path."""
    config = json.loads((folder / "config.json").read_text())
    config["hidden_size"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    said = failure(folder)
    assert said.startswith("model tiny cannot be loaded: ")
    assert "\n" not in said
    assert str(folder) not in said
