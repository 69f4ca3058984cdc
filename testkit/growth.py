"""How work grows with its input, by the time of the thread that does it."""

import time
from collections.abc import Callable
from typing import TypeVar

Input = TypeVar("Input")


def cpu_s(work: Callable[[Input], object], given: Input) -> float:
    """Seconds that the calling thread computes."""
    start = time.thread_time()
    work(given)
    return time.thread_time() - start


def grows_linearly(
    work: Callable[[Input], object], make: Callable[[int], Input], size: int
) -> bool:
    """Four times the input takes far less than sixteen times the time."""
    small, large = make(size), make(4 * size)
    for _ in range(5):
        once = max(min(cpu_s(work, small) for _ in range(2)), 0.002)
        if min(cpu_s(work, large) for _ in range(2)) < 8 * once:
            return True
    return False
