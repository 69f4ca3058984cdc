"""
glibc's malloc, set up for large arrays that come and go.

On the CPU, MLX has no pool of buffers: each is malloc'ed and freed. Left to itself
glibc gives large ones back to the system and faults them in again, page by page: by
`python -m bench.overhead` 5 % of a prefill's time once KV is kept between requests.
"""

import ctypes
import logging
import platform

logger = logging.getLogger(__name__)

# From malloc.h. The map threshold's largest legal value is 32 MB. Arenas stay as many
# as glibc likes: with one, the interpreter and MLX's compute threads wait for each
# other's lock, 4 % of the decode rate of a small model.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_OPTIONS = {
    _M_MMAP_THRESHOLD: 32 << 20,
    _M_TRIM_THRESHOLD: 1 << 30,
    _M_TOP_PAD: 64 << 20,
}


def keep_freed_pages() -> bool:
    """
    Keep up to 1 GiB of freed memory; call it before any other thread starts.

    Returns:
        Whether it took effect: False where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    refused = [name for name, value in _OPTIONS.items() if not mallopt(name, value)]
    if refused:
        logger.warning("mallopt refused options=%s", refused)
    return not refused
