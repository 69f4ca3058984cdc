"""
How many files, sockets among them, this process may have open.

The sidecar has the same for itself: the two share no code.
"""

import resource

# macOS starts programs with 256, and takes no more than this where the hard limit
# says "unlimited".
_WANTED = 10_240


def raise_file_limit() -> None:
    """Raise the soft limit, as servers do; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return  # a system with a lower limit of its own: served with what there is
