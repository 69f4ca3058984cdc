"""What the files of a folder show before anything is loaded."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine.loading.checkpoint_files import (
    MemoryLimit,
    config_fault,
    folder_fault,
    format_bytes,
    memory_fault,
    memory_limit,
    names_fault,
    read_config,
    safetensors_fault,
    weight_bytes,
    weights_fault,
)

ModelFolder = Callable[[str], Path]
GOOD = ("config.json", "model.safetensors", "tokenizer.json")


def knows_qwen(config: Mapping[str, Any]) -> bool:
    return config["model_type"] == "qwen3"


@pytest.fixture
def folder(model_folder: ModelFolder, tmp_path: Path) -> Path:
    """A copy of the dense model, free to be spoilt."""
    copy = tmp_path / "tiny"
    shutil.copytree(model_folder("dense"), copy)
    return copy


def test_a_pipe_among_the_files_is_refused(folder: Path) -> None:
    """The start would wait for its end without a word."""
    os.mkfifo(folder / "model-2.safetensors")
    found = folder_fault(folder, knows_qwen)
    assert found is not None
    assert "model-2.safetensors is neither a file nor a folder" in found


@pytest.mark.parametrize(
    "names",
    [
        GOOD,
        ("config.json", "model-00001-of-00002.safetensors", "tokenizer.model"),
        ("config.json", "model.safetensors", "qwen.tiktoken"),
        (*GOOD, "model.gguf", "pytorch_model.bin", "onnx/model.onnx"),
    ],
)
def test_names_of_a_model_are_good(names: tuple[str, ...]) -> None:
    """Other formats beside safetensors do no harm."""
    assert names_fault(names) is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), ("empty", "hub id")),
        (("sub/config.json",), ("empty",)),
        (("q4_k_m.gguf",), ("GGUF", "MLX")),
        (("config.json", "tokenizer.json", "X.Q8.GGUF"), ("GGUF", "MLX")),
        (("config.json", "pytorch_model.bin"), ("PyTorch", "pytorch_model.bin")),
        (("consolidated.00.pth", "params.json"), ("PyTorch", "safetensors")),
        (("adapters.safetensors", "adapter_config.json"), ("LoRA", "fuse")),
        (("config.json", "weights.00.safetensors"), ("weights.00", "model*")),
        (("config.json", "tokenizer.json"), ("no weights",)),
        (("README.md",), ("no weights",)),
        (("model.safetensors", "tokenizer.json"), ("config.json is missing",)),
        (("config.json", "model.safetensors"), ("no tokenizer", "tokenizer.json")),
    ],
)
def test_names_that_are_no_model(
    names: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """Each says what it is instead, and what to do."""
    said = names_fault(names) or ""
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3"}, None),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, None),
        ({"model_type": "own", "model_file": "own.py"}, None),
        ({"model_type": "martian"}, ("martian", "mlx-lm")),
        ({"hidden_size": 1}, ("model_type",)),
        ([1], ("damaged",)),
        ({"model_type": "bert", "architectures": ["BertModel"]}, ("encoder", "bert")),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ("encoder",)),
        (
            {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]},
            ("encoder", "xlm-roberta"),
        ),
        (
            {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForSequenceClassification"],
            },
            ("encoder",),
        ),
    ],
)
def test_configs(tmp_path: Path, config: object, words: tuple[str, ...] | None) -> None:
    """Encoders and unknown architectures are named; what mlx-lm builds passes."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = config_fault(tmp_path, knows_qwen)
    assert (said is None) == (words is None), said
    assert all(word in str(said) for word in words or ()), said


def test_an_embedding_model_made_of_a_chat_model_is_told(folder: Path) -> None:
    """Its config is a chat model's; sentence-transformers' files say what it is."""
    (folder / "modules.json").write_text("[]")
    assert folder_fault(folder, knows_qwen) is None
    (folder / "1_Pooling").mkdir()
    assert "embedding" in str(folder_fault(folder, knows_qwen))


def test_a_whole_model_has_no_fault(folder: Path) -> None:
    """And its weights are counted."""
    assert folder_fault(folder, knows_qwen) is None
    assert weight_bytes(folder) == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_a_safetensors_file_that_is_cut_off(folder: Path, kept: int) -> None:
    """At any length: in its size, in its header, in its data; one byte is enough."""
    file = folder / "model.safetensors"
    assert safetensors_fault(file) is None
    file.write_bytes(file.read_bytes()[:kept])
    said = safetensors_fault(file) or ""
    assert "model.safetensors is cut off" in said
    assert "download it again" in said


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "not a safetensors"),
        (b"\x08\0\0\0\0\0\0\0[1, 2, 3", "not a safetensors"),
        (b'\x09\0\0\0\0\0\0\0{"a": {} }', "not a safetensors"),
    ],
)
def test_a_file_that_only_has_the_name(folder: Path, data: bytes, words: str) -> None:
    """A pointer of Git LFS, an error page, another JSON."""
    (folder / "model.safetensors").write_bytes(data)
    assert words in str(weights_fault(folder))


def test_missing_shards_are_counted_and_named(folder: Path) -> None:
    """By the index, or without one by the numbers in the names there are."""
    (folder / "model.safetensors").rename(folder / "model-00002-of-00006.safetensors")
    said = weights_fault(folder) or ""
    assert "5 of its 6 weight files are missing" in said
    assert "model-00001-of-00006.safetensors" in said
    assert "and 2 more" in said
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    (folder / "model-00002-of-00006.safetensors").rename(folder / "model.safetensors")
    assert "1 of its 2 weight files" in str(weights_fault(folder))


def test_a_name_that_promises_too_many_shards_is_told_at_once(folder: Path) -> None:
    """And a file that is too large to be what it is called is not read."""
    name = f"model-1-of-{10**12 - 1}.safetensors"
    (folder / "model.safetensors").rename(folder / name)
    assert "weight files are missing" in str(weights_fault(folder))
    with (folder / "config.json").open("r+b") as file:
        file.truncate(40 << 30)
    assert read_config(folder) is None


def test_a_folder_one_level_too_high(folder: Path, tmp_path: Path) -> None:
    """Of several models, or of the hub's cache: the right thing to give is named."""
    assert "tiny" in str(folder_fault(tmp_path, knows_qwen))
    above = tmp_path / "above"
    (above / "org").mkdir(parents=True)
    folder.rename(above / "org" / "tiny")
    assert "org/tiny" in str(folder_fault(above, knows_qwen))
    assert "MODEL_DIR" in str(folder_fault(above, knows_qwen))
    cache = tmp_path / "models--org--some-name"
    (cache / "snapshots" / "0").mkdir(parents=True)
    assert "org/some-name" in str(folder_fault(cache, knows_qwen))


def test_weights_larger_than_the_memory() -> None:
    """Both sizes are told; what fits passes."""
    limit = memory_limit(10_000_000_000, 8_000_000_000)
    assert limit is not None
    assert memory_fault(8_000_000_000, limit) is None
    said = memory_fault(17_000_000_000, limit) or ""
    assert "17.0 GB" in said
    assert "8.0 GB" in said
    assert "raise MAX_MODEL_MEMORY" in said
    limit = memory_limit(8_000_000_000, 8_000_000_000)
    assert limit == MemoryLimit(7_600_000_000, "MAX_PROCESS_MEMORY")
    assert memory_limit(None, None) is None


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (4_200_000_000, "4.2 GB")],
)
def test_sizes_for_people(num_bytes: int, text: str) -> None:
    """In the unit that fits."""
    assert format_bytes(num_bytes) == text
