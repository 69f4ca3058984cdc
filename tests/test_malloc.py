"""In a process of its own: the options stay for its life."""

import platform
import subprocess
import sys

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
