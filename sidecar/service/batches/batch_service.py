"""Batches as clients see them: made, listed, cancelled; their folder, which is ours."""

import contextlib
import fcntl
import logging
import os
import threading
from pathlib import Path

from sidecar.core.batches import BatchOrder
from sidecar.core.errors import BadRequest, Busy, NotFound, Unavailable
from sidecar.kv.disk.durable_files import (
    MALFORMED,
    open_regular,
    read_private,
    replace_private,
)
from sidecar.service.batches.batch import Batch, batch_from_file, new_batch
from sidecar.service.batches.stored_files import StoredFile, StoredFiles

logger = logging.getLogger(__name__)

_MAX_OPEN = 100


class BatchService:
    """
    The batches of a folder. Any thread.

    The folder is made by the first file that is kept. One process has it at a time: a
    second one would answer what the first one answers.

    Args:
        root: the folder, BATCH_DIR.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = StoredFiles(root)
        self._batches: dict[str, Batch] = {}
        self._lock_file: int | None = None
        self.changed = threading.Condition(threading.RLock())  # of batches and runs

    @property
    def files(self) -> StoredFiles:
        """
        The files, once the folder is ours.

        Raises:
            Unavailable: it cannot be had.
        """
        self.open()
        return self._files

    def open(self) -> None:
        """
        Have the folder, and know what is in it; repeatable.

        Raises:
            Unavailable: it cannot be made, or another process has it.
        """
        with self.changed:
            if self._lock_file is not None:
                if self._is_still_there(self._lock_file):
                    return
                self._forget()
            try:
                self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
                number = open_regular(self._root / "lock", os.O_RDWR | os.O_CREAT)
            except OSError as error:
                why = f"BATCH_DIR cannot be used: {error.strerror}"
                raise Unavailable(why) from error
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(number)
                why = "another process has BATCH_DIR: one answers batches at a time"
                raise Unavailable(why) from error
            self._lock_file = number
            self._files.read()
            self._read()
            self.changed.notify_all()

    def _is_still_there(self, lock_file: int) -> bool:
        """Whether the folder is the one that was opened: people delete caches."""
        try:
            now = os.stat(self._root / "lock")
        except OSError:
            return False
        return os.path.samestat(now, os.fstat(lock_file))

    def _forget(self) -> None:
        logger.warning("BATCH_DIR was deleted, and with it all batches")
        self.close()
        self._files = StoredFiles(self._root)
        self._batches = {}

    def open_if_used(self) -> None:
        """Go on with what an earlier run left, if there is anything."""
        if self._root.is_dir():
            with contextlib.suppress(Unavailable):
                self.open()

    def close(self) -> None:
        """Let another process have the folder; repeatable."""
        with self.changed:
            if self._lock_file is not None:
                os.close(self._lock_file)
                self._lock_file = None

    def upload(self, owner: str | None, name: str, data: bytes) -> StoredFile:
        """Keep the file of a batch."""
        return self.files.create(owner, name, "batch", data)

    def delete_file(self, owner: str | None, file_id: str) -> None:
        """
        Delete a file.

        Raises:
            NotFound. BadRequest: a batch still reads it.
        """
        with self.changed:
            for batch in self._batches.values():
                if not batch.has_ended and file_id == batch.order.input_file_id:
                    raise BadRequest(f"{batch.id} reads this file: cancel it first")
            self.files.delete(owner, file_id)

    def create(self, owner: str | None, order: BatchOrder) -> Batch:
        """
        Begin a batch; its file is read by whoever answers it.

        Raises:
            NotFound: there is no such file. Busy: too many wait.
        """
        with self.changed:
            self.files.find(owner, order.input_file_id)
            own = [one for one in self._batches.values() if one.owner == owner]
            num_open = sum(not batch.has_ended for batch in own)
            if num_open >= _MAX_OPEN:
                raise Busy(f"{_MAX_OPEN} batches wait: cancel some", retry_after_s=60)
            batch = new_batch(owner, order)
            self.keep(batch)
            self._batches[batch.id] = batch
            self.changed.notify_all()
        return batch

    def find(self, owner: str | None, batch_id: str) -> Batch:
        """
        A batch by its id.

        Raises:
            NotFound: its owner has none.
        """
        self.open()
        found = self._batches.get(batch_id)
        if found is None or found.owner != owner:
            raise NotFound(f"no batch has the id {batch_id[:64]!r}")
        return found

    def all(self, owner: str | None) -> list[Batch]:
        """Those of an owner, the newest first."""
        self.open()
        with self.changed:
            own = [batch for batch in self._batches.values() if batch.owner == owner]
        return sorted(own, key=lambda batch: (-batch.times["created"], batch.id))

    def cancel(self, owner: str | None, batch_id: str) -> Batch:
        """
        End a batch; what was answered is kept.

        Raises:
            NotFound. BadRequest: it has ended.
        """
        with self.changed:
            batch = self.find(owner, batch_id)
            if batch.has_ended:
                raise BadRequest(f"the batch is {batch.status} already")
            if batch.status != "cancelling":
                batch.become("cancelling")
                self.keep(batch)
                self.changed.notify_all()
        return batch

    def has(self, batch: Batch) -> bool:
        """Whether it is one of this folder still."""
        return self._batches.get(batch.id) is batch

    def open_batches(self) -> list[Batch]:
        """Those that have not ended, the oldest first."""
        with self.changed:
            waiting = [one for one in self._batches.values() if not one.has_ended]
        return sorted(waiting, key=lambda batch: batch.times["created"])

    def keep(self, batch: Batch) -> None:
        """
        Have a batch outlive this process, as it stands.

        Raises:
            Unavailable: it cannot be written.
        """
        path = self._root / f"{batch.id}.json"
        try:
            replace_private(path, batch.as_file(), is_durable=True)
        except OSError as error:
            why = f"the batch cannot be written: {error.strerror}"
            raise Unavailable(why) from error

    def _read(self) -> None:
        for path in self._root.glob("batch_*.json"):
            try:
                batch = batch_from_file(read_private(path))
                if batch.id == path.stem:
                    self._batches[batch.id] = batch
            except (OSError, *MALFORMED) as error:
                logger.warning("%s is no batch: %s", path.name, error)
