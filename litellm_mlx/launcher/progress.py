"""A word now and then while something long is waited for."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

EVERY_S = 10.0


@contextlib.contextmanager
def telling(
    say: Callable[[str], None],
    what: str,
    how_far: Callable[[], str | None] = str,
    *,
    every_s: float = EVERY_S,
) -> Iterator[None]:
    """
    Say what is being done, at once and then with how far it is and its seconds.

    Args:
        how_far: "": that is not known; None: it is done, and nothing more is said.
    """
    say(f"{what} ...")
    began = time.monotonic()
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(every_s):
            found, seconds = how_far(), f"{time.monotonic() - began:.0f} s"
            if found is not None:
                say(f"{what} ... {', '.join(filter(None, (found, seconds)))}")

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
