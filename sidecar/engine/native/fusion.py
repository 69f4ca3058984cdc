"""Makes one model of an adapter and its base: mlx-lm's own program."""

import sys
from collections.abc import Sequence

from mlx_lm import fuse


def run_fuse(arguments: Sequence[str]) -> None:
    """
    Fuse as its command line says.

    Raises:
        OSError, ValueError, KeyError, RuntimeError: it cannot be done.
    """
    before, sys.argv = sys.argv, ["mlx-sidecar fuse", *arguments]
    try:
        fuse.main()
    finally:
        sys.argv = before
