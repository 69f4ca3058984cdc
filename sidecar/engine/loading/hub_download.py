"""
A model of the hub, brought into the hub's own cache.

huggingface_hub does the listing, the small files and the layout of its cache. The
weights are fetched by `ranged_download`: the library (1.33) writes to a file of a new
name each time and removes it on failure, so after a broken line it begins at 0.

    list -> refuse what cannot be served -> small files -> check config.json
         -> room on the disk -> weights, several at once -> the library links them
"""

import contextlib
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import httpx
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url, snapshot_download
from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from sidecar.core.format_bytes import format_bytes
from sidecar.engine.loading.checkpoint_files import WEIGHTS
from sidecar.engine.loading.closed_network import guard_libraries
from sidecar.engine.loading.download_progress import DownloadProgress
from sidecar.engine.loading.hub_faults import HubFault, contact_fault
from sidecar.engine.loading.hub_listing import close_names
from sidecar.engine.loading.ranged_download import (
    HubFile,
    Retries,
    RetryPolicy,
    fetch_file,
)

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
_CONTACT_TIMEOUT_S = 10.0
_ETAG = re.compile(r"[A-Za-z0-9_-]{1,128}")
_NUM_AT_ONCE = 4  # one connection rarely fills a fast line
_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Checks:
    """
    What is asked before the weights are fetched; each answers with the fault, or None.

    Args:
        listing: gets the files' names and the bytes of all weights.
        folder: gets the folder, with all files but the weights.
    """

    listing: Callable[[Sequence[str], int], str | None]
    folder: Callable[[Path], str | None]


def fetch_snapshot(
    repo_id: str,
    checks: Checks,
    progress: DownloadProgress,
    policy: RetryPolicy | None = None,
) -> Path:
    """
    Download a model unless the cache has it; what was begun is gone on with.

    Without the hub (offline, no line, model withdrawn) the cache's copy is taken.

    Returns:
        The model's folder in the hub's cache.
    Raises:
        HubFault: it cannot be had, or a check found a fault.
    """
    disable_progress_bars()
    guard_libraries()
    try:
        sizes = _list(repo_id)
    except (OfflineModeIsEnabled, httpx.HTTPError, ValueError) as error:
        if folder := _cached(repo_id):
            return folder
        fault = contact_fault(error)
        if isinstance(error, RepositoryNotFoundError):
            fault += close_names(repo_id)
        raise HubFault(fault) from error
    weights = {name: size for name, size in sizes.items() if fnmatch(name, WEIGHTS)}
    _refuse(checks.listing(list(sizes), sum(weights.values())))
    retries = Retries(policy or RetryPolicy(), progress, threading.Event())
    folder = retries.until_done(lambda: _by_library(repo_id, None, _SMALL_FILES))
    _refuse(checks.folder(folder))
    try:
        _fetch_weights(repo_id, folder, weights, retries)
    finally:
        progress.stop()
    return folder


def _list(repo_id: str) -> dict[str, int]:
    """All files with their sizes. Raises what a hub that cannot be reached raises."""
    info = HfApi().model_info(repo_id, files_metadata=True, timeout=_CONTACT_TIMEOUT_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    for name in sizes:
        if not is_inside(name):
            raise HubFault("its list of files names a place outside of its folder")
    return sizes


def is_inside(name: str) -> bool:
    """Whether a file's name, as a hub gives it, stays in the model's folder."""
    parts = name.split("/")
    return "\\" not in name and not {"", ".", ".."} & set(parts) and name.isprintable()


def _cached(repo_id: str) -> Path | None:
    try:
        return Path(
            snapshot_download(
                repo_id, allow_patterns=[*_SMALL_FILES, WEIGHTS], local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, ValueError):  # not there, not whole, no hub id
        return None


def _by_library(repo_id: str, revision: str | None, patterns: list[str]) -> Path:
    return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))


def _refuse(fault: str | None) -> None:
    if fault:
        raise HubFault(fault)


def _fetch_weights(
    repo_id: str, folder: Path, sizes: Mapping[str, int], retries: Retries
) -> None:
    absent = [name for name, size in sizes.items() if not _is_here(folder / name, size)]
    if not absent:
        return
    described = [
        retries.until_done(partial(_describe, repo_id, folder, name)) for name in absent
    ]
    files = [file for file in described if file is not None]
    kept = sum(file.kept_bytes for file in files)
    missing = sum(sizes[name] for name in absent) - kept
    total = sum(sizes.values())
    _refuse(_disk_fault(missing, folder))
    retries.progress.begin(repo_id, total - missing, total)
    _fetch_all([file for file in files if not file.blob.exists()], retries)
    patterns = [*_SMALL_FILES, WEIGHTS]
    retries.until_done(lambda: _by_library(repo_id, folder.name, patterns))
    retries.progress.end()


def _is_here(file: Path, size: int) -> bool:
    return file.exists() and file.stat().st_size == size


def _describe(repo_id: str, folder: Path, name: str) -> HubFile | None:
    """What is to be fetched; None leaves a file to the library."""
    url = hf_hub_url(repo_id, name, revision=folder.name)
    found = get_hf_file_metadata(url, timeout=_CONTACT_TIMEOUT_S)
    if not found.etag or not found.size or found.size > MAX_HTTP_DOWNLOAD_SIZE:
        return None
    if not _ETAG.fullmatch(found.etag):  # it becomes the name of a file
        raise HubFault("the hub names one of its files by what is no digest")
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    file = HubFile(url, found.size, found.etag, blobs / found.etag)
    if not _is_here(file.blob, file.size):  # damaged ones are fetched anew
        file.blob.unlink(missing_ok=True)
        (folder / name).unlink(missing_ok=True)
    return file


def _disk_fault(num_bytes: int, folder: Path) -> str | None:
    free = shutil.disk_usage(folder).free
    if num_bytes <= free:
        return None
    return (
        f"it takes {format_bytes(num_bytes)} on the disk of the hub's cache, which has "
        f"{format_bytes(free)} free; make room, or set HF_HOME to a larger disk"
    )


def _fetch_all(files: Sequence[HubFile], retries: Retries) -> None:
    waiting = deque(files)
    faults: list[Exception] = []

    def work() -> None:
        with contextlib.suppress(IndexError):
            while not retries.stopped.is_set():
                file = waiting.popleft()
                try:
                    fetch_file(file, retries)
                except Exception as error:  # noqa: BLE001 - raised below
                    faults.append(error)
                    retries.stopped.set()

    # Daemons: whoever presses Ctrl-C does not wait for a line that hangs.
    threads = [
        threading.Thread(target=work, name="download", daemon=True)
        for _ in range(min(_NUM_AT_ONCE, len(files)))
    ]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads) and not retries.stopped.wait(_TICK_S):
        retries.progress.tell_when_due()
    if faults:
        raise faults[0]
