"""Imports without the search for garbage: what they make stays until the end."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """
    Look for no garbage within, and never among what is there at its end.

    Modules are not garbage. MLX, mlx-lm and transformers make so many objects that
    looking for it takes a tenth of the time of their import, and of each later
    collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
