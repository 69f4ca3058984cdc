"""Imports with the garbage collector off: what they make stays until the end."""

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

# Modules that httpx does without where they are missing: its command line, which takes
# a twentieth of a second for the libraries that colour a terminal.
_NEEDLESS = ("httpx._main",)


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """
    Look for no garbage within, and never among what is there at its end.

    Modules are not garbage. MLX, mlx-lm and transformers make so many objects that
    looking for it takes a tenth of the time of their import, and of each later
    collection.
    """
    left_out: dict[str, Any] = {
        name: None for name in _NEEDLESS if name not in sys.modules
    }
    sys.modules.update(left_out)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in left_out:
            if sys.modules.get(name, ...) is None:
                del sys.modules[name]
