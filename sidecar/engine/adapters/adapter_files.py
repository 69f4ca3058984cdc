"""
LoRA adapters on the disk: a folder each, as mlx-lm's trainer writes them.

    ADAPTER_DIR/NAME/adapter_config.json, adapters.safetensors
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar.core.errors import AdapterNotFound, BadRequest, Unavailable

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_NAMED = 10
_MAX_CONFIG_BYTES = 1 << 20
_MAX_SCALE = 1e6
_PIECE = 1 << 20  # bytes of a file that are read at once for its digest


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """
    One adapter, not loaded.

    Args:
        base: the model that it was trained on, as its configuration says; "": nothing.
        digest: tells it from any other one, and from itself once it is trained anew.
        num_bytes: of its weights.
    """

    name: str
    folder: Path
    base: str
    rank: int
    scale: float
    digest: str
    num_bytes: int

    def read(self) -> bytes:
        """
        Its weights as they were when its digest was taken.

        Raises:
            Unavailable: they are others by now, or cannot be read.
        """
        try:
            data = (self.folder / WEIGHTS).read_bytes()
        except OSError:
            data = b""
        if _digest_of([data], self.rank, self.scale) != self.digest:
            raise Unavailable(
                f"adapter {self.name} was changed while it was loaded: ask again",
                retry_after_s=1,
            )
        return data


class AdapterFolder:
    """
    The adapters of a folder, looked for anew at each question. Any thread.

    Args:
        root: None: there is none.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = root

    def names(self) -> list[str]:
        """Of all that are there, whether they can be used or not."""
        if self.root is None or not self.root.is_dir():
            return []
        folders = (
            folder for folder in self.root.iterdir() if NAME.fullmatch(folder.name)
        )
        return sorted(f.name for f in folders if (f / CONFIG).is_file())

    def bases(self) -> dict[str, str]:
        """By the names of those that can be read, the models they were trained on."""
        found: dict[str, str] = {}
        for name in self.names():
            folder = (self.root or Path()) / name
            with contextlib.suppress(OSError, ValueError, RecursionError):
                stat_of(folder / WEIGHTS)
                found[name] = described(folder).base
        return found

    def find(self, name: str, param: str = "adapter") -> AdapterFiles:
        """
        The adapter of a name.

        Raises:
            AdapterNotFound: there is none. BadRequest: it cannot be served.
        """
        if self.root is None:
            raise AdapterNotFound(
                "no adapters are served: set ADAPTER_DIR", param=param
            )
        if not NAME.fullmatch(name) or not (self.root / name / CONFIG).is_file():
            there_is = ", ".join(self.names()[:_MAX_NAMED]) or "none"
            raise AdapterNotFound(
                f"no adapter named {name[:100]!r} is served; there is: {there_is}",
                param=param,
            )
        return adapter_in(self.root / name, param)


def adapter_in(folder: Path, param: str = "adapter") -> AdapterFiles:
    """
    The adapter of a folder.

    Raises:
        BadRequest: it cannot be served; what is said has no path of this machine.
    """
    try:
        return read_adapter(folder)
    except OSError as error:
        why = f"{error.strerror}: {WEIGHTS}"
    except (ValueError, RecursionError) as error:
        why = str(error)
    raise BadRequest(f"adapter {folder.name} cannot be served: {why}", param=param)


def read_adapter(folder: Path) -> AdapterFiles:
    """
    What a folder says of its adapter.

    Raises:
        OSError, ValueError: it is none that can be served in a bank; says why.
    """
    config, found_stat = described(folder), stat_of(folder / WEIGHTS)
    # A copied file may have the times of the one that it replaced, but for the last.
    key = (found_stat.st_ino, found_stat.st_mtime_ns, found_stat.st_ctime_ns)
    digest = _digest(
        folder / WEIGHTS,
        config.rank,
        config.scale,
        (*key, found_stat.st_size),
    )
    return AdapterFiles(
        folder.name,
        folder,
        config.base,
        config.rank,
        config.scale,
        digest,
        found_stat.st_size,
    )


@dataclass(frozen=True, slots=True)
class _Described:
    """What an adapter's configuration says; a full fine-tuning has no rank."""

    kind: str
    base: str
    rank: int
    scale: float


def described(folder: Path, kinds: Sequence[str] = ("lora",)) -> _Described:
    """
    Read an adapter's configuration.

    Raises:
        OSError, ValueError: it is none of these kinds, or says what cannot be.
    """
    stat_of(folder / CONFIG)  # a pipe would be waited for
    with (folder / CONFIG).open("rb") as file:
        config = json.loads(file.read(_MAX_CONFIG_BYTES))
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is no object")
    kind = config.get("fine_tune_type", "lora")
    if kind not in kinds:
        raise ValueError(
            f"it is of the type {str(kind)[:20]}, and by a name lora is served: as the "
            "adapter_path of a model it may be dora or full"
        )
    base = config.get("model")
    base = base if isinstance(base, str) else ""
    if kind == "full":
        return _Described(kind, base, 0, 1.0)
    found = config.get("lora_parameters")
    parameters: dict[str, Any] = found if isinstance(found, dict) else {}
    rank = parameters.get("rank")
    if type(rank) is not int or not 1 <= rank <= 4096:
        raise ValueError("lora_parameters.rank must be 1..4096")
    return _Described(kind, base, rank, _checked_scale(parameters.get("scale")))


def stat_of(file: Path) -> os.stat_result:
    """
    What a file is known by.

    Raises:
        ValueError: it is a pipe or a folder. OSError: it is not there.
    """
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{file.name} is no file")
    return found


def _checked_scale(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_MAX_SCALE <= value <= _MAX_SCALE:  # type: ignore[operator]
        raise ValueError(f"lora_parameters.scale must be a number up to {_MAX_SCALE:g}")
    return float(value)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _digest(weights: Path, rank: int, scale: float, _stat: tuple[int, ...]) -> str:
    """Of what the weights are, not of when they were written."""
    with weights.open("rb") as file:
        return _digest_of(iter(lambda: file.read(_PIECE), b""), rank, scale)


def _digest_of(pieces: Iterable[bytes], rank: int, scale: float) -> str:
    found = hashlib.sha256(f"{rank} {scale} ".encode())
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()[:24]
