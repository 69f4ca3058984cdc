"""Files that are written whole, or stay as they were."""

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """
    Put a file in another's place, in a folder that is there.

    Args:
        mode: its permissions, e.g. 0o600.
    Raises:
        OSError: it cannot be written; names it.
    """
    try:
        _replace(path, data, mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(path: Path, data: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
