"""The GPU thread: order, errors, and the end of the process."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.engine.gpu_scheduler import Errand
from sidecar.engine.gpu_thread import gpu_thread
from tests.litellm_mlx.fake_sidecar import wait_until

REPO = Path(__file__).parents[2]


def test_there_is_one_thread_and_it_lives() -> None:
    """Whoever asks gets the same thread."""
    assert gpu_thread() is gpu_thread()
    assert gpu_thread().is_alive
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("gpu") == 1


def test_calls_run_there_and_return_or_raise_here() -> None:
    """A result or an exception comes back to the caller; the thread goes on."""
    gpu = gpu_thread()
    assert gpu.call(lambda: threading.current_thread().name) == "gpu"
    with pytest.raises(ZeroDivisionError):
        gpu.call(lambda: 1 / 0)
    assert gpu.call(lambda: gpu.call(lambda: 5)) == 5, "a call from the thread itself"


def test_what_is_posted_runs_in_order_before_later_calls() -> None:
    """First come, first served; a posted command that fails harms nobody."""
    gpu, ran = gpu_thread(), []
    for number in range(20):
        gpu.post(lambda n=number: ran.append(n if n != 7 else 1 / 0))
    assert gpu.call(lambda: list(ran)) == [n for n in range(20) if n != 7]


class CountDown(Errand):
    """A worker with a number of steps to do."""

    is_background = False

    def __init__(self, steps: int, log: list["CountDown"]) -> None:
        self.left = steps
        self._log = log

    def has_work(self) -> bool:
        return self.left > 0

    def interrupt(self, *, beside_streams: bool) -> bool:
        self.left -= 1
        self._log.append(self)
        return True


def test_workers_take_turns_and_commands_run_between() -> None:
    """Two busy workers share the time; a call does not wait for them to end."""
    gpu, log = gpu_thread(), list[CountDown]()
    first, second = CountDown(10**9, log), CountDown(10**9, log)
    gpu.add_worker(first)
    gpu.add_worker(second)
    try:
        seen = gpu.call(lambda: len(log))
        assert seen < 2 * 10**9
        wait_until(lambda: gpu.call(lambda: {first, second} <= set(log)))
    finally:
        gpu.remove_worker(first)
        gpu.remove_worker(second)
    left = first.left
    assert gpu.call(lambda: first.left) == left, "a removed worker gets no turn"


SLOW_EXIT = """
import sys
import time
from testkit.servers import running_sidecar

with running_sidecar({"MODEL_PATH": sys.argv[1]}):
    pass

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

kept_until_the_end = Slow()
"""


class Panic(BaseException):
    """As the Rust code of a tokenizer raises it."""


class Panicking(Errand):
    """A worker that fails some times, and has no more to do then."""

    def __init__(self) -> None:
        self.left = 5

    def has_work(self) -> bool:
        return self.left > 0

    def interrupt(self, *, beside_streams: bool) -> bool:
        self.left -= 1
        raise Panic("a tokenizer panicked")


def test_a_worker_that_panics_does_not_end_it() -> None:
    """All models have this one thread."""
    gpu, worker = gpu_thread(), Panicking()
    gpu.add_worker(worker)
    wait_until(lambda: not worker.left)
    gpu.remove_worker(worker)
    assert gpu.call(lambda: threading.current_thread().name) == "gpu"


def test_a_process_that_used_the_gpu_thread_ends_cleanly(
    model_folder: Callable[[str], Path],
) -> None:
    """However long Python takes to shut down, MLX does not abort it."""
    command = [sys.executable, "-c", SLOW_EXIT, str(model_folder("dense"))]
    ended = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_threads_at_work_do_not_keep_it_from_the_lock_for_long() -> None:
    """Else each of its steps waits for Python's 5 ms, several times."""
    gpu_thread()
    assert sys.getswitchinterval() <= 0.001
