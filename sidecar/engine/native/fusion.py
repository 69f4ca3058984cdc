"""Makes one model of an adapter and its base: mlx-lm's own program."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_lm import fuse

from sidecar.engine.loading.absent_fields import absent_fields
from sidecar.engine.loading.checkpoint_files import read_object

_MODEL = "--model"


def run_fuse(arguments: Sequence[str]) -> None:
    """
    Fuse as its command line says; what the model's config leaves out is filled in.

    Raises:
        OSError, ValueError, KeyError, RuntimeError, TypeError: it cannot be done.
    """
    with _whole(arguments) as filled:
        before, sys.argv = sys.argv, ["mlx-sidecar fuse", *filled]
        try:
            fuse.main()
        finally:
            sys.argv = before


@contextlib.contextmanager
def _whole(arguments: Sequence[str]) -> Iterator[list[str]]:
    """The arguments, the model's folder by one whose config says all."""
    given = [each for a in arguments for each in _parted(a)]
    at = given.index(_MODEL) + 1 if _MODEL in given[:-1] else 0
    folder = Path(given[at]) if at else Path()
    config = read_object(folder, "config.json") if at and folder.is_dir() else None
    absent = absent_fields(folder, config) if config else {}
    if not config or not absent:
        yield given
        return
    with tempfile.TemporaryDirectory() as scratch:
        for file in folder.resolve().iterdir():
            if file.name != "config.json":
                Path(scratch, file.name).symlink_to(file)
        filled = json.dumps({**config, **absent}, indent=2)
        Path(scratch, "config.json").write_text(filled)
        yield [*given[:at], scratch, *given[at + 1 :]]


def _parted(argument: str) -> list[str]:
    """`--model=FOLDER` as two."""
    name, equals, value = argument.partition("=")
    return [name, value] if equals and name == _MODEL else [argument]
