"""
`python -m sidecar` whose forward passes wait while a file is there.

    HELD_BY=FILE [END_SECONDS=N] python -m testkit.held_sidecar [FLAGS]

So that an answer lasts until a test has seen what it wants to see beside it. Whoever
lets the file lie has a server that cannot end: it does so by END_SECONDS all the same.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from mlx_lm.models import qwen3

from sidecar import __main__ as command


def hold_forward_passes(file: Path) -> None:
    """Make the tiny dense model's passes wait for the file to go."""
    kind: Any = qwen3.Model
    original = kind.__call__

    def held(*args: Any, **kwargs: Any) -> Any:
        while file.exists():
            time.sleep(0.01)
        return original(*args, **kwargs)

    kind.__call__ = held


if __name__ == "__main__":
    hold_forward_passes(Path(os.environ["HELD_BY"]))
    command._END_S = float(os.environ.get("END_SECONDS", command._END_S))
    sys.exit(command.main())
