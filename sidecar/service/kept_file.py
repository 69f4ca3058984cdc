"""
A small JSON file that outlives the process.

A thread looks each half minute whether what it holds has changed, and writes it then:
what is killed before that is lost.
"""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sidecar.kv.disk.durable_files import MALFORMED, read_private, replace_private

logger = logging.getLogger(__name__)

T = TypeVar("T")
EVERY_S = 30.0


class KeptFile:
    """
    Writes a file when what it is to hold has changed. Any thread.

    Args:
        name: what it holds, for the log.
        content: gives what it is to hold, as JSON.
        every_s: how often it is written at most.
    """

    def __init__(
        self,
        file: Path,
        name: str,
        content: Callable[[], Any],
        every_s: float = EVERY_S,
    ) -> None:
        self._file, self._name, self._content = file, name, content
        self._written, self._has_warned = content(), False
        self._is_over = threading.Event()
        self._every_s = every_s
        self._thread = threading.Thread(target=self._run, name=file.stem, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what has changed, and stop; repeatable."""
        self._is_over.set()
        self._thread.join()
        self._write()

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._write()

    def _write(self) -> None:
        content = self._content()
        if content == self._written:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_private(self._file, json.dumps(content).encode())
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s: cannot be kept: %s", self._name, error)
            self._has_warned = True
            return
        self._written, self._has_warned = content, False


def read_kept(file: Path, name: str, parse: Callable[[Any], T], absent: T) -> T:
    """What a file holds; one that is damaged counts as absent, with a warning."""
    try:
        return parse(json.loads(read_private(file)))
    except FileNotFoundError:
        pass
    except (OSError, *MALFORMED) as error:
        logger.warning("%s: %s cannot be read: %s", name, file, error)
    return absent
