"""The log of both servers: every line that they write, in five files of 10 MB."""

import contextlib
import dataclasses
import functools
import logging
import logging.handlers
import os
from pathlib import Path

from litellm_mlx.launcher.child import Service

_MAX_BYTES, _NUM_OLD = 10_000_000, 4


class ServersLog:
    """
    Appends lines, each with its time and its server's name. Any thread.

    A disk that is full costs the line, and nothing else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        self._handler = _PrivateFiles(
            path, maxBytes=_MAX_BYTES, backupCount=_NUM_OLD, encoding="utf-8"
        )
        form = "%(asctime)s %(name)s %(message)s"
        self._handler.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))

    def keeping(self, service: Service) -> Service:
        """The same service, all of whose output is kept here."""
        keep = functools.partial(self.write, service.name)
        return dataclasses.replace(service, keep=keep)

    def write(self, name: str, line: str) -> None:
        """Keep a line of a server."""
        record = logging.LogRecord(name, logging.INFO, "", 0, line, None, None)
        with contextlib.suppress(OSError, ValueError):
            self._handler.handle(record)


class _PrivateFiles(logging.handlers.RotatingFileHandler):
    """Files for their owner alone; what cannot be written is not complained of."""

    def doRollover(self) -> None:  # noqa: N802 - the standard library's name
        """Begin a new file."""
        super().doRollover()
        with contextlib.suppress(OSError):
            os.chmod(self.baseFilename, 0o600)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - its name
        """Say nothing: the terminal has the line."""
