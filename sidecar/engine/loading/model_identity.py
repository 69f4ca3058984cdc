"""
Names a model by all that its KV depends on, so that no other one's is read for it.

Weights are named by the SHA-256 of their files: other weights in an old folder never
meet the KV of the old ones, and a folder that moved keeps its own. That takes a second
a gigabyte, once: digests are remembered by a file's identity, size, time, and samples
of its bytes.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from sidecar.engine.adapters.adapter_files import CONFIG, WEIGHTS
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import is_as_loaded
from sidecar.infra.package_version import package_version
from sidecar.kv.disk.durable_files import read_private, replace_private

_VERSION = 2
_SMALL = 256 << 20  # bytes that are read at once
_LIBRARIES = ("mlx", "mlx-lm", "mlx-vlm")
_MAX = 4096  # digests
_CHUNK = 8 << 20
_SAMPLE, _NUM_SAMPLES = 4 << 10, 64  # bytes; places of a file, its ends among them
_NAMED = ("*.json", "*.jinja", "*.py", "*.model", "*.txt")
_NOT_NAMED = ("generation_config.json", "model.safetensors.index.json")


class WeightDigests:
    """
    The digests of weight files. Any thread.

    Args:
        file: where they are remembered.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def are_known(self, folder: Path) -> bool:
        """Whether a model's files are remembered, or so small that it is no matter."""
        known = self._read()
        unknown = [f for f in _weight_files(folder) if _identity(f) not in known]
        return sum(file.stat().st_size for file in unknown) <= _SMALL

    def of(self, folder: Path) -> list[str]:
        """
        The digests of a model's weights, by their files' names.

        Raises:
            OSError: they cannot be read.
        """
        known, found = self._read(), []
        is_new = False
        for file in _weight_files(folder):
            identity = _identity(file)
            if identity not in known:
                known[identity], is_new = _digest(file), True
            found.append(f"{file.name} {known[identity]}")
        if is_new:
            self._write(known)
        return found

    def _read(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            known = json.loads(read_private(self._file))
            if isinstance(known, dict):
                return {str(name): str(digest) for name, digest in known.items()}
        return {}

    def _write(self, known: dict[str, str]) -> None:
        kept = dict(list(known.items())[-_MAX:])
        with contextlib.suppress(OSError):
            replace_private(self._file, json.dumps(kept).encode())


def identity_of(
    model: LoadedModel, digests: WeightDigests
) -> tuple[str, dict[str, Any]]:
    """
    A key for all that a model's KV depends on, and the same for people.

    Raises:
        OSError: its files cannot be read, or are not those that were loaded.
    """
    parts = {
        "version": _VERSION,
        "weights": digests.of(model.folder),
        "files": list(small_files(model.folder)),
        **platform_parts(model),
    }
    if not is_as_loaded(model):
        raise OSError(f"the files of {model.name} changed since they were loaded")
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return key, {"model": model.name, **parts}


def platform_parts(model: LoadedModel) -> dict[str, Any]:
    """On what a model's arithmetic hangs beside the files of its own folder."""
    kv, adapter = model.quantization, model.applied_digest
    return {
        **({"adapter": adapter} if adapter else {}),
        "kv": [kv.bits, kv.group_size, kv.start] if kv else None,
        "sees": model.vision_encoder is not None,
        "libraries": [f"{name} {package_version(name)}" for name in _LIBRARIES],
        "device": [str(mx.default_device()), _device_name()],
    }


def weight_identities(folder: Path) -> list[str]:
    """
    What a model's weight files are known again by, without reading them whole.

    Raises:
        OSError: they cannot be read.
    """
    return [f"{file.name} {_identity(file)}" for file in _weight_files(folder)]


def files_digest(folder: Path, adapter: Path | None = None) -> str:
    """
    What a model's files are known again by, in one; "": they cannot be read.

    Args:
        adapter: the folder of the adapter that it is read with.
    """
    try:
        parts = [*weight_identities(folder), *small_files(folder)]
        if adapter is not None:
            parts += [
                f"adapter {_identity(adapter / name)}" for name in (CONFIG, WEIGHTS)
            ]
    except OSError:
        return ""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def small_files(folder: Path) -> Iterator[str]:
    """The other files of a model that change what it computes, with their digests."""
    for pattern in _NAMED:
        for file in sorted(folder.glob(pattern)):
            if file.name not in _NOT_NAMED and file.is_file():
                yield f"{file.name} {_digest(file)}"


def _identity(file: Path) -> str:
    """
    What a file is known again by: its place on the disk, size, times, some bytes.

    Tools that keep a file's time may have written other weights into it.
    """
    with file.open("rb") as data:
        stat = os.fstat(data.fileno())
        sample = hashlib.sha256(data.read(_SAMPLE))
        for part in range(1, _NUM_SAMPLES):
            data.seek(part * max(stat.st_size - _SAMPLE, 0) // (_NUM_SAMPLES - 1))
            sample.update(data.read(_SAMPLE))
    # Nobody can set the time of the last change; some file systems do not keep it.
    times = f"{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    known = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{times}"
    return f"{known}:{sample.hexdigest()[:16]}"


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while part := data.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()


def _device_name() -> str:
    info = mx.device_info()
    return str(info.get("architecture") or info.get("device_name") or "")
