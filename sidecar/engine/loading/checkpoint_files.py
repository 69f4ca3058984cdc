"""
Can a folder be served? Read from its names, sizes and headers, before anything loads.

Each question answers with the fault in words, what to do included, or with None. The
words fit behind "model NAME cannot be loaded: " and hold no path of this machine.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sidecar.core.format_bytes import format_bytes
from sidecar.engine.loading.absent_fields import absent_fields
from sidecar.infra.safetensors_header import (
    MAX_HEADER_BYTES,
    entries,
    read_entries,
)

WEIGHTS = "model*.safetensors"  # what mlx-lm loads
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pth", ".pt", ".ckpt")
_TOKENIZERS = (
    "tokenizer.json",
    "*.model",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_NUMBERED = re.compile(r"model-\d+-of-(\d+)\.safetensors")
_ENCODER = re.compile(
    r"For(MaskedLM|SequenceClassification|TokenClassification|QuestionAnswering)$"
    r"|(Bert|Roberta|BERTa|Electra|MPNet|Encoder)\w*Model$",
    re.IGNORECASE,
)
_ADAPTERS = ("adapters.safetensors", "adapter_model.safetensors")
_MAX_JSON_BYTES = 100_000_000
_MAX_NUMBERED = 10_000  # weight files that their own names announce
_NOT_THE_FORMAT = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
    OverflowError,
)
_CONFIG_FILES = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_MAX_SIZES = {
    "num_hidden_layers": 2048,
    "num_layers": 2048,
    "n_layer": 2048,
    "n_layers": 2048,
    "depth": 2048,
    "num_experts": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "image_seq_length": 1 << 16,
    "min_pixels": 1 << 24,
}
_CODE_KEYS = frozenset(("auto_map", "model_file"))
_MAX_OF_PROCESS = 0.95  # the rest is for what computes
_NAMED = 3  # of many files, so many are named

_GIVE_ACCESS = "let the user who runs this read it (chmod, chown)"

KnowsArchitecture = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """
    What the weights of all models together may take.

    Args:
        setting: what a person raises to have more.
    """

    num_bytes: int
    setting: str


def memory_limit(
    process_bytes: int | None, model_bytes: int | None
) -> MemoryLimit | None:
    """
    The lower of two limits; None: neither is known.

    Args:
        process_bytes: MAX_PROCESS_MEMORY, of which what computes keeps a part.
        model_bytes: MAX_MODEL_MEMORY.
    """
    limits = []
    if process_bytes is not None:
        maximum = int(_MAX_OF_PROCESS * process_bytes)
        limits.append(MemoryLimit(maximum, "MAX_PROCESS_MEMORY"))
    if model_bytes:
        limits.append(MemoryLimit(model_bytes, "MAX_MODEL_MEMORY"))
    return min(limits, key=lambda limit: limit.num_bytes, default=None)


def folder_fault(folder: Path, knows: KnowsArchitecture) -> str | None:
    """What keeps a folder from being loaded, as far as its files show it."""
    if fault := access_fault(folder):
        return fault
    names = [str(file.relative_to(folder)) for file in _files(folder)]
    fault = place_fault(folder) or special_fault(folder) or names_fault(names)
    return fault or config_fault(folder, knows) or weights_fault(folder)


def access_fault(folder: Path) -> str | None:
    """A folder, or a file in it, that whoever runs this may not read."""
    try:
        closed = [file for file in _files(folder) if not os.access(file, os.R_OK)]
    except OSError as error:
        return f"it cannot be read ({error.strerror}); {_GIVE_ACCESS}"
    if not closed:
        return None
    return f"{_some([f.name for f in closed])} cannot be read; {_GIVE_ACCESS}"


def place_fault(folder: Path) -> str | None:
    """A folder that is too high: of the hub's cache, or of several models."""
    if (folder / "snapshots").is_dir() and folder.name.startswith("models--"):
        hub_id = folder.name.removeprefix("models--").replace("--", "/", 1)
        return f"it is the hub's cache of a model; give the hub id, {hub_id}"
    if (folder / "config.json").exists():
        return None
    inner = [*folder.glob("*/config.json"), *folder.glob("*/*/config.json")]
    names = sorted(str(file.parent.relative_to(folder)) for file in inner)
    if names and not _files(folder):
        return (
            f"it holds folders of models; give one of them ({_some(names)}), or all of "
            "them by MODEL_DIR"
        )
    return None


def special_fault(folder: Path) -> str | None:
    """A pipe or a device among the files: reading it may never end."""
    for entry in folder.iterdir():
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            return f"{entry.name} is neither a file nor a folder"
    return None


def names_fault(names: Sequence[str]) -> str | None:
    """
    What the names of a model's files show.

    Args:
        names: relative to the model's folder; only those at the top count.
    """
    names = [name for name in names if "/" not in name]
    if not names:
        return "the folder is empty; give the folder of an MLX model, or a hub id"
    if not any(fnmatch(name, WEIGHTS) for name in names):
        return _other_weights(names)
    if "config.json" not in names:
        return "config.json is missing; download the model again, whole"
    if not any(fnmatch(name, known) for name in names for known in _TOKENIZERS):
        return (
            "it has no tokenizer (tokenizer.json or tokenizer.model); copy it from "
            "the model that this one was made of"
        )
    return None


def _other_weights(names: Sequence[str]) -> str:
    if any(name.lower().endswith(".gguf") for name in names):
        return gguf_fault()
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        return (
            f"its weights are in PyTorch's format ({pickles[0]}) and only safetensors "
            "are read; take the same model in MLX or safetensors format"
        )
    if any(name in _ADAPTERS for name in names):
        return "it is a LoRA adapter without its model; fuse both with mlx_lm.fuse"
    if other := [name for name in names if name.endswith(".safetensors")]:
        return f"its weights must be called {WEIGHTS}, and there is only {_some(other)}"
    return f"it has no weights ({WEIGHTS}); give the folder of an MLX model"


def gguf_fault() -> str:
    """The one for llama.cpp's format."""
    return (
        "it is in GGUF format, llama.cpp's; take the same model in MLX format "
        "(hub ids of mlx-community, or with MLX in their name)"
    )


def read_config(folder: Path) -> dict[str, Any] | None:
    """
    A folder's config.json, with what it leaves out and the weights show.

    Returns:
        None: there is none that can be read.
    """
    config = read_object(folder, "config.json")
    return config and {**config, **absent_fields(folder, config)}


def read_object(folder: Path, name: str) -> dict[str, Any] | None:
    """An object that a folder holds as JSON; None: there is none that can be read."""
    try:
        config = _json_of(folder / name)
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def text_config(folder: Path) -> dict[str, Any]:
    """A folder's configuration, that of its text model above the rest."""
    config = read_config(folder) or {}
    return {**config, **(config.get("text_config") or {})}


def config_fault(folder: Path, knows: KnowsArchitecture) -> str | None:
    """
    What config.json shows.

    Args:
        knows: whether the architecture of such a config can be built.
    """
    config = read_config(folder)
    if config is None:
        return "its config.json is damaged (not JSON); download it again"
    kind = config.get("model_type")
    if _is_encoder(folder, config):
        return (
            f"it is an encoder or embedding model ({kind}), which writes no text; "
            "take a chat model"
        )
    if "model_file" in config:
        return None  # its own code builds it, if that is allowed
    if not isinstance(kind, str):
        return "its config.json names no model_type, so mlx-lm cannot build it"
    if not knows(config):
        return (
            f"mlx-lm does not know its architecture, {kind}; a newer mlx-lm may "
            "(.venv/bin/pip install -U mlx-lm), or take another model"
        )
    return sizes_fault(folder)


def _is_encoder(folder: Path, config: Mapping[str, Any]) -> bool:
    listed = config.get("architectures")
    architectures = listed if isinstance(listed, list) else []
    if any(_ENCODER.search(str(name)) for name in architectures):
        return True
    # Embedding models made of a chat model say it here only (sentence-transformers).
    return (folder / "modules.json").exists() and any(folder.glob("*_Pooling"))


def weights_fault(folder: Path) -> str | None:
    """Weight files that are missing, cut off, or something else."""
    files = sorted(folder.glob(WEIGHTS))
    absent = sorted(_expected(folder, files) - {file.name for file in files})
    if absent:
        num_all = len(absent) + len(files)
        return (
            f"{len(absent)} of its {num_all} weight files are missing "
            f"({_some(absent)}); download them"
        )
    faults = (safetensors_fault(file) for file in files)
    return next((fault for fault in faults if fault), None)


def named_weights_fault(folder: Path) -> str | None:
    """The same where weights may have any name; whatever index there is counts."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return "it has no weights (*.safetensors); download it again"
    faults = (weights_fault(folder), *map(safetensors_fault, files))
    return next((fault for fault in faults if fault), None)


def _expected(folder: Path, files: Sequence[Path]) -> set[str]:
    """Names of the weight files that the index, or the files' own numbers, announce."""
    try:
        index = _json_of(folder / _INDEX)
        return {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    found = [match for file in files if (match := _NUMBERED.fullmatch(file.name))]
    if not found:
        return set()
    count = found[0][1]
    number = f"0{len(count)}d"
    return {
        f"model-{i:{number}}-of-{count}.safetensors"
        for i in range(1, min(int(count), _MAX_NUMBERED) + 1)
    }


def _json_of(file: Path) -> Any:
    """
    What a file holds.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read, is larger than any such
            file is, or is no JSON.
    """
    if file.stat().st_size > _MAX_JSON_BYTES:
        raise ValueError(f"{file.name} is too large")
    return json.loads(file.read_bytes())


def safetensors_fault(file: Path) -> str | None:
    """A file that is shorter than its header says, or no safetensors at all."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if head.startswith(b"version "):
            return f"{file.name} is only a pointer of Git LFS; run git lfs pull"
        length = int.from_bytes(head, "little")
        if len(head) == 8 and length > MAX_HEADER_BYTES:
            return f"{file.name} is not a safetensors file; download it again"
        text = stream.read(length)
    if len(head) < 8 or len(text) < length:
        return f"{file.name} is cut off ({format_bytes(size)}); download it again"
    try:
        ends = [int(entry["data_offsets"][1]) for entry in entries(text).values()]
    except _NOT_THE_FORMAT:
        return f"{file.name} is not a safetensors file; download it again"
    whole = 8 + length + max(ends, default=0)
    if size < whole:
        return (
            f"{file.name} is cut off ({format_bytes(size)} of {format_bytes(whole)}); "
            "download it again"
        )
    return None


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of the weights, from the index or the files' headers; what can be read."""
    try:
        index = _json_of(folder / _INDEX)
        return frozenset(map(str, index["weight_map"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        names.update(read_entries(file))
    return frozenset(names)


Stamp = tuple[tuple[str, int, int, int, int], ...]


def stamp(folder: Path) -> Stamp:
    """
    Changes with any file in the folder, folders in it apart; () if it is gone.

    With what is written into a file in place, too, whatever its time is set to.
    """
    try:
        files = sorted(entry for entry in folder.iterdir() if not entry.is_dir())
        found = [(f.name, f.stat() if f.exists() else f.lstat()) for f in files]
    except OSError:
        return ()
    return tuple(
        (name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in found
    )


def sizes_fault(folder: Path) -> str | None:
    """What of its configuration would take all memory before its weights are read."""
    for name in _CONFIG_FILES:
        config = read_object(folder, name) or {}
        for part in (config, *config.values()):
            for key, maximum in _MAX_SIZES.items():
                value = part.get(key) if isinstance(part, dict) else None
                if isinstance(value, (int, float)) and not value <= maximum:
                    return (
                        f"its {name} asks for {key} = {value:.4g}, more than {maximum}"
                    )
    return None


def brought_code(folder: Path) -> str | None:
    """
    What of a folder a library would run as code, if it brings any.

    mlx-vlm runs it unasked: its `model_file`, and what `auto_map` names.
    """
    for name in _CONFIG_FILES:
        if not _CODE_KEYS.isdisjoint(read_object(folder, name) or {}):
            return name
    return next((file.name for file in folder.glob("*.py")), None)


def context_len(config: Mapping[str, Any]) -> int | None:
    """Most tokens that a config.json says the model was made for."""
    for part in (config, config.get("text_config")):
        length = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(length, (int, float)) and length > 0:
            return int(length)
    return None


def vector_len(folder: Path, config: Mapping[str, Any]) -> int | None:
    """How many numbers an embedding of this encoder has; None: its files do not say."""
    for last in sorted(folder.glob("[0-9]_Dense/config.json"), reverse=True):
        width = (read_object(last.parent, last.name) or {}).get("out_features")
        return width if isinstance(width, int) else None
    width = (config.get("text_config") or config).get("hidden_size")
    return width if isinstance(width, int) else None


def weight_bytes(folder: Path) -> int:
    """Bytes of the weight files that would be loaded."""
    return sum(file.stat().st_size for file in folder.glob(WEIGHTS))


def memory_fault(num_bytes: int, limit: MemoryLimit) -> str | None:
    """Weights that alone take more than all together may."""
    if num_bytes <= limit.num_bytes:
        return None
    return (
        f"its weights take {format_bytes(num_bytes)} and all weights together may take "
        f"{format_bytes(limit.num_bytes)}; take a smaller or more quantised model, or "
        f"raise {limit.setting}"
    )


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_file()]


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
