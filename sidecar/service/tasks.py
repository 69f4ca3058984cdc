"""What requests for models that do not chat share: whom they mean, when they end."""

import time
from collections.abc import Callable

from sidecar.core.errors import (
    GOING_DOWN,
    RequestCancelled,
    RequestTimeout,
    Unavailable,
)
from sidecar.residents.model_state import ServedModel
from sidecar.residents.pool import ResidentPool

_UNNAMED = ("", "default", "local")


def meant(pool: ResidentPool[ServedModel], name: str, kind: str) -> str:
    """The model that is meant where none is named: the only one of its kind."""
    if name not in _UNNAMED:
        return name
    found = [e.id for e in pool.entries() if e.kind == kind and e.is_usable]
    return found[0] if len(found) == 1 else name


def ending(
    pool: ResidentPool[ServedModel], is_connected: Callable[[], bool], timeout_s: float
) -> Callable[[], None]:
    """
    What is asked between two pieces of work, from now on.

    It raises RequestCancelled if the client is gone, RequestTimeout if it is too late,
    Unavailable if the server goes down and waits no longer.
    """
    deadline = time.monotonic() + timeout_s

    def check() -> None:
        if not is_connected():
            raise RequestCancelled("the client closed the connection")
        if pool.is_stopped:
            raise Unavailable(GOING_DOWN, retry_after_s=5)
        if time.monotonic() > deadline:
            raise RequestTimeout(f"it took longer than {timeout_s:g} s")

    return check
