"""How many files, sockets among them, this process may have open."""

import contextlib
import resource
from collections.abc import Iterator

# macOS starts programs with 256, and takes no more than this where the hard limit
# says "unlimited".
_WANTED = 10_240


def raise_file_limit() -> None:
    """Raise the soft limit, as servers do; one that is higher already stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return  # a system with a lower limit of its own: served with what there is


@contextlib.contextmanager
def kept_file_limit() -> Iterator[None]:
    """
    Leave the limit as it is while mlx-lm is imported.

    It lowers both limits to 2,048 and 4,096, and ends with a ValueError where the hard
    one is lower than that.
    """
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda _resource, _limits: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit
