"""What all models of a process share of the disk: its root, its thread, who uses it."""

import contextlib
import math
import secrets
import threading
from pathlib import Path

from sidecar.core.conversation import ForgetFilter
from sidecar.kv.disk.disk_cache import DiskCache
from sidecar.kv.disk.disk_thread import DiskThread, Urgency, disk_thread
from sidecar.kv.disk.durable_files import read_private, replace_private
from sidecar.kv.disk.ports import DiskSettings
from sidecar.kv.disk.root import DiskRoot
from sidecar.kv.disk.slot_folder import SlotFolder

_SECRET_BYTES = 32
_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 3600.0  # between two looks of the janitor's


class KVDisk:
    """KV on the disk, of all models. Any thread."""

    def __init__(self, root: DiskRoot, settings: DiskSettings) -> None:
        self.root = root
        self.settings = settings
        self.is_usable = True  # else it is only asked to forget
        self.thread: DiskThread = disk_thread()
        self._lock = threading.Lock()
        self._open: list[DiskCache] = []
        self._closed = threading.Event()

    def start(self) -> None:
        """Clear away what is of no use: now, and again and again until it is closed."""
        threading.Thread(target=self._tidy, name="kv-janitor", daemon=True).start()

    def close(self) -> None:
        """Clear nothing away any more; repeatable."""
        self._closed.set()

    def _tidy(self) -> None:
        ttl_s = self.root.limits.ttl_s or math.inf
        pause_s = min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, ttl_s / 10))
        while True:
            self.thread.submit(Urgency.TIDY, self.root.clear_away)
            if self._closed.wait(pause_s):
                return

    @property
    def digests_file(self) -> Path:
        """Where the digests of weights are remembered."""
        return self.root.path / "digests.json"

    def secret(self) -> bytes:
        """
        The secret of all marks in what is stored, made when it is first asked for.

        Raises:
            OSError: the root cannot be used.
        """
        file = self.root.path / "secret"
        with SlotFolder(self.root.path).locked():
            with contextlib.suppress(FileNotFoundError):
                known = read_private(file)
                if len(known) == _SECRET_BYTES:
                    return known
            made = secrets.token_bytes(_SECRET_BYTES)
            replace_private(file, made)
        return made

    def opened(self, cache: DiskCache) -> None:
        """Tell a loaded model's to forget, until it is closed."""
        with self._lock:
            self._open = [other for other in self._open if not other.is_closed]
            self._open.append(cache)

    def forget(
        self, model: str | None = None, forget_filter: ForgetFilter | None = None
    ) -> tuple[int, int]:
        """
        Delete the slots of all models, loaded or not; how many, and their bytes.

        Args:
            model: of this one alone, however it was set up.
            forget_filter: conversations that are forgotten; None: all.
        Raises:
            OSError: some cannot be.
        """
        with self._lock:
            caches = [
                cache
                for cache in self._open
                if not cache.is_closed and model in (None, cache.model)
            ]
        found, done = list[tuple[int, int]](), set[Path]()
        failed: OSError | None = None
        for cache in caches:
            try:
                found.append(cache.forget(forget_filter))
            except OSError as error:  # what can be forgotten is
                failed = error
            done |= cache.folders
        if model is None and forget_filter is None:
            for cache in caches:
                cache.clear_tombstones()
        found.append(self.root.forget(model, forget_filter, done))
        if failed is not None:
            raise failed
        return sum(n for n, _ in found), sum(size for _, size in found)
