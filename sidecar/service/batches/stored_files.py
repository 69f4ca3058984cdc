"""Files that clients upload for batches, and what those answer, each in a folder."""

import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sidecar.core.errors import NotFound, PayloadTooLarge, Unavailable
from sidecar.kv.disk.durable_files import MALFORMED, read_private, replace_private

logger = logging.getLogger(__name__)

_MAX_FILES = 10_000
_ID = re.compile(r"file-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """
    What is known of a file beside its content.

    Args:
        owner: a name for the key that it was sent with; nobody else sees it.
        created_at: seconds since 1970.
    """

    id: str
    owner: str | None
    name: str
    purpose: str
    num_bytes: int
    created_at: int


class StoredFiles:
    """
    The files of one folder: `ID.jsonl` beside `ID.json`. Any thread.

    A file is there once its second part is, which is written last.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, StoredFile] = {}

    def read(self) -> None:
        """Find what earlier runs left."""
        for path in self._root.glob("file-*.json"):
            try:
                file = StoredFile(**json.loads(read_private(path)))
                _require_types(file)
                if file.id == path.stem:
                    self._files[file.id] = file
            except (OSError, *MALFORMED) as error:
                logger.warning("%s is no file of a batch: %s", path.name, error)

    def create(
        self, owner: str | None, name: str, purpose: str, data: bytes
    ) -> StoredFile:
        """
        Keep a file.

        Raises:
            PayloadTooLarge: there are too many. Unavailable: it cannot be written.
        """
        if len(self._files) >= _MAX_FILES:
            raise PayloadTooLarge(f"at most {_MAX_FILES} files are kept: delete some")
        file_id = new_file_id()
        try:
            replace_private(self.path(file_id), data, is_durable=True)
        except OSError as error:
            raise _unwritable(error) from error
        return self.keep_written(file_id, owner, name, purpose)

    def keep_written(
        self, file_id: str, owner: str | None, name: str, purpose: str
    ) -> StoredFile:
        """Keep what lies in a file's place already."""
        path = self.path(file_id)
        try:
            size = path.stat().st_size
            file = StoredFile(file_id, owner, name, purpose, size, int(time.time()))
            described = json.dumps(asdict(file)).encode()
            replace_private(path.with_suffix(".json"), described, is_durable=True)
        except OSError as error:
            raise _unwritable(error) from error
        self._files[file_id] = file
        return file

    def find(self, owner: str | None, file_id: str) -> StoredFile:
        """
        A file by its id.

        Raises:
            NotFound: its owner has none.
        """
        found = self._files.get(file_id)
        if found is None or found.owner != owner:
            raise NotFound(f"no file has the id {file_id[:64]!r}")
        return found

    def all(self, owner: str | None) -> list[StoredFile]:
        """Those of an owner, the newest first."""
        own = [file for file in self._files.copy().values() if file.owner == owner]
        return sorted(own, key=lambda file: (-file.created_at, file.id))

    def content(self, owner: str | None, file_id: str) -> bytes:
        """What a file holds."""
        try:
            return self.path(self.find(owner, file_id).id).read_bytes()
        except OSError as error:
            raise NotFound(f"file {file_id[:64]} cannot be read") from error

    def delete(self, owner: str | None, file_id: str) -> None:
        """Delete a file; at once, and for good."""
        path = self.path(self.find(owner, file_id).id)
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        self._files.pop(file_id, None)

    def path(self, file_id: str) -> Path:
        """Where the content of a file is, or will be."""
        return self._root / f"{file_id}.jsonl"


def new_file_id() -> str:
    """A name that no other file has."""
    return f"file-{secrets.token_hex(12)}"


def is_file_id(name: object) -> bool:
    """Whether it is the name of a file, and no path to another place."""
    return isinstance(name, str) and _ID.fullmatch(name) is not None


def _require_types(file: StoredFile) -> None:
    are_texts = isinstance(file.name, str) and isinstance(file.purpose, str)
    are_numbers = type(file.num_bytes) is int and type(file.created_at) is int
    if not (is_file_id(file.id) and are_texts and are_numbers):
        raise TypeError("a field is of a wrong type")


def _unwritable(error: OSError) -> Unavailable:
    return Unavailable(f"the file cannot be written: {error.strerror}")


def file_object(file: StoredFile) -> Mapping[str, Any]:
    """A file as the OpenAI API has it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
