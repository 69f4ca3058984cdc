"""What a service manager starts, and what it has to be told of that."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MARK = "Written by `litellm-mlx service install`"


@dataclass(frozen=True, slots=True)
class Program:
    """
    The launcher as a service.

    Args:
        arguments: absolute, the program first. folder: where `.env` lies.
        output: file for what it prints. stop_s: how long its end may take.
    """

    arguments: tuple[str, ...]
    folder: Path
    output: Path
    stop_s: int


class ServiceManager(Protocol):
    """A system's own manager of a user's services."""

    @property
    def path(self) -> Path:
        """Where it looks for our file."""

    @property
    def advice(self) -> str:
        """What its user may want to do besides, in a sentence; "": nothing."""

    def text(self, program: Program) -> bytes:
        """The file."""

    def start(self) -> list[list[str]]:
        """Commands that start what the file says, now and at each login."""

    def stop(self) -> list[list[str]]:
        """Commands that stop it for good; its file is there still."""

    def removed(self) -> list[list[str]]:
        """Commands for when the file is gone."""

    def status(self) -> list[str]:
        """A command that prints how it is, and exits 0 while it runs."""
