"""
Brings a model of the hub into its cache; what was begun before is gone on with.

    mlx-sidecar pull org/name

Sizes come first: what cannot be served (GGUF, PyTorch weights, an architecture that
nobody here knows, more than the memory or the disk) is refused before the first byte of
weights. Ctrl-C keeps what is there; a wrong checksum deletes it.
"""

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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
    name = parser.parse_args(argv).model
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        parser.error(f"model must be a hub id, org/name, got {name!r}")
    # Not before: what mlx-lm knows takes a second to import.
    from sidecar.engine.device_memory import process_limit
    from sidecar.engine.loading.checkpoint_files import memory_limit
    from sidecar.engine.loading.download_progress import DownloadProgress
    from sidecar.engine.loading.model_source import find_model

    try:
        engine = load_config({}, Path(".env")).engine
        limit = memory_limit(process_limit(engine), engine.max_model_bytes)
        progress = DownloadProgress(_say)
        with _live_line(progress):
            found = find_model(name, progress, limit)
    except (ConfigError, ModelLoadFailed) as error:
        sys.stderr.write(f"mlx-sidecar pull: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; what was downloaded is kept: the same command\n")
        return _STOPPED
    _say(f"{name} is in {found.folder}")
    _say(f"serve it: python3 install_and_run.py --model {name}")
    return 0


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
