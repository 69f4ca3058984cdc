"""A word now and then while something long is waited for."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

EVERY_S = 10.0


@contextlib.contextmanager
def telling(
    say: Callable[[str], None], what: str, *, every_s: float = EVERY_S
) -> Iterator[None]:
    """Say what is being done, at once and then with the seconds it has taken."""
    say(f"{what} ...")
    began = time.monotonic()
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(every_s):
            say(f"{what} ... {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
