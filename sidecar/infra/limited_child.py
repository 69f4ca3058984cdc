"""
Runs a script of ours on what a client sent, in a process that can be ended.

    python limited_child.py SCRIPT

That process is this file as well: it limits its processor time and memory, then runs
the script. No more than two run at once: each takes a processor for up to two seconds.
"""

import contextlib
import resource
import runpy
import subprocess
import sys
import threading
from pathlib import Path

_MAX_CHILDREN = 2
_CPU_S, _MEMORY_BYTES = 2, 1 << 30
_RUN_S, _WAIT_S = 30.0, 15.0  # processor time is what is limited
_children = threading.Semaphore(_MAX_CHILDREN)


class ChildBusy(Exception):
    """It could not be run now: others are, or the machine is too busy."""


def run_limited(script: Path, given: bytes) -> bytes | None:
    """
    What a script writes; None: it went beyond its limits, or could not go on.

    Raises:
        ChildBusy: it did not begin or end in time.
    """
    if not _children.acquire(timeout=_WAIT_S):
        raise ChildBusy("others are run just now")
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__, str(script)], input=given,
            capture_output=True, timeout=_RUN_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ChildBusy("the machine is too busy") from None
    finally:
        _children.release()
    return done.stdout if done.returncode == 0 else None


def _limit() -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS knows no limit of memory
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))


if __name__ == "__main__":
    _limit()
    runpy.run_path(sys.argv[1], run_name="__main__")
