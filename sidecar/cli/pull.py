"""
Brings a model of the hub into its cache; what was begun before is gone on with.

    mlx-sidecar pull org/name [--bits 4] [--to FOLDER]

Sizes come first: what cannot be served (GGUF, PyTorch weights, an architecture that
nobody here knows, more than the memory or the disk) is refused before the first byte of
weights. Ctrl-C keeps what is there; a wrong checksum deletes it. `--bits` takes the
same model in so many bits, if the hub has it; `--to` gives it a folder of your own.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.cli.server import settings_file
from sidecar.config.settings import load_config
from sidecar.config.sources import ConfigError
from sidecar.core.errors import ModelLoadFailed
from sidecar.core.format_bytes import format_bytes

if TYPE_CHECKING:  # mlx-lm, which it imports, takes a second
    from sidecar.engine.loading.download_progress import DownloadProgress

_CLEAR = "\r\x1b[K"
_LIVE_S = 0.5
_STOPPED = 130


def main(argv: list[str]) -> int:
    """Exit codes: 0 all is there, 1 it cannot be had, 2 bad usage, 130 Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar pull",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a hub id, e.g. mlx-community/Qwen3-4B-4bit")
    parser.add_argument(
        "--bits", type=int, choices=(3, 4, 5, 6, 8), help="the same model in so many"
    )
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="a new folder")
    options = parser.parse_args(argv)
    name: str = options.model
    if fault := _place_fault(options.to):
        parser.error(f"--to: {fault}")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        parser.error(f"model must be a hub id, org/name, got {name!r}")
    # Not before: what mlx-lm knows takes a second to import.
    from sidecar.engine.device_memory import process_limit
    from sidecar.engine.loading.checkpoint_files import memory_limit
    from sidecar.engine.loading.download_progress import DownloadProgress
    from sidecar.engine.loading.hub_faults import HubFault
    from sidecar.engine.loading.hub_listing import sibling
    from sidecar.engine.loading.model_source import find_model

    try:
        if options.bits is not None:
            name = sibling(name, options.bits)
            _say(f"in {options.bits} bits it is {name}")
        engine = load_config({}, settings_file()).engine
        limit = memory_limit(process_limit(engine), engine.max_model_bytes)
        progress = DownloadProgress(_say)
        with _live_line(progress):
            folder = find_model(name, progress, limit).folder
            if options.to is not None:
                folder = _put(folder, options.to)
    except (ConfigError, ModelLoadFailed, HubFault, OSError) as error:
        sys.stderr.write(f"mlx-sidecar pull: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; what was downloaded is kept: the same command\n")
        return _STOPPED
    _say(f"{name} is in {folder}")
    served = name if options.to is None else folder
    _say(f"serve it: python3 install_and_run.py --model {shlex.quote(str(served))}")
    return 0


def _place_fault(to: Path | None) -> str | None:
    if to is None:
        return None
    target = to.expanduser().absolute()
    if os.path.lexists(target):
        return f"{target} is there already"
    if not target.parent.is_dir():
        return f"there is no folder {target.parent}"
    try:  # now, and not behind gigabytes
        with _place_beside(target):
            return None
    except OSError as error:
        return f"{target.parent} cannot be written to: {error.strerror}"


def _place_beside(target: Path) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent)


def _put(folder: Path, to: Path) -> Path:
    """
    A model's files in a folder of a person's, which is there whole or not at all.

    Weights are linked where the disk is the same: they take no more room.

    Raises:
        OSError: they cannot be put there.
    """
    from sidecar.engine.loading.checkpoint_files import WEIGHTS

    target = to.expanduser().absolute()
    with _place_beside(target) as place:
        made = Path(place) / target.name
        made.mkdir()
        for file in filter(Path.is_file, folder.iterdir()):
            blob, copy = file.resolve(), made / file.name
            if file.match(WEIGHTS):
                with contextlib.suppress(OSError):
                    os.link(blob, copy)
            if not copy.exists():
                shutil.copyfile(blob, copy)
        made.rename(target)
    return target


def _say(line: str) -> None:
    sys.stdout.write(f"{_CLEAR}{line}\n" if sys.stdout.isatty() else f"{line}\n")
    sys.stdout.flush()


@contextmanager
def _live_line(progress: "DownloadProgress") -> Iterator[None]:
    """On a terminal one line that changes; elsewhere a line every 15 seconds."""
    is_over = threading.Event()

    def show() -> None:
        while not is_over.wait(_LIVE_S):
            if (state := progress.state) is not None:
                share = 100 * state.done_bytes // max(state.total_bytes, 1)
                done, total = map(format_bytes, (state.done_bytes, state.total_bytes))
                sys.stdout.write(f"{_CLEAR}{done} of {total} ({share} %)")
                sys.stdout.flush()

    if sys.stdout.isatty():
        threading.Thread(target=show, name="live", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
