"""In a process of its own: the options stay for its life."""

import platform
import subprocess
import sys

import pytest

from sidecar.infra import malloc

_SCRIPT = """
import ctypes, resource
from sidecar.infra.malloc import keep_freed_pages
taken = keep_freed_pages()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
size = 24 << 20
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    before = faults()
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
    return faults() - before
print(taken, *[use() for _ in range(3)])
"""


def test_freed_pages_are_used_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    taken, _, second, third = done.stdout.split()
    if platform.libc_ver()[0] != "glibc":
        assert taken == "False"
        return
    assert taken == "True"
    assert max(int(second), int(third)) < 100  # of 6144 pages


def test_freed_memory_goes_back_once_it_is_idle() -> None:
    """Once, and not while anything is asked."""
    now, trimmed = [0.0], []
    idle = malloc.IdleTrim(lambda: trimmed.append(now[0]), lambda: now[0])

    def look(at: float, num_begun: int, num_running: int = 0) -> None:
        now[0] = at
        idle.look(num_begun, num_running)

    look(100, 0)
    look(200, 0)
    assert trimmed == []  # nothing was asked yet
    look(201, 1, 1)
    look(240, 1, 1)
    look(241, 2)  # begun and ended between two looks
    look(241 + malloc.IDLE_S, 2)
    assert trimmed == []
    look(241.1 + malloc.IDLE_S, 2)
    look(500, 2)
    assert trimmed == [241.1 + malloc.IDLE_S]


_TRIM = """
import ctypes
from sidecar.infra.malloc import give_back_freed_pages, keep_freed_pages
keep_freed_pages()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
blocks = [libc.malloc(1 << 20) for _ in range(100)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
for block in blocks:
    libc.free(block)
before = rss()
give_back_freed_pages()
print(before - rss())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own")
def test_all_that_was_freed_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TRIM], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 90 << 20
