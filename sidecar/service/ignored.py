"""What a request asks for that has no effect here, as its client and the log see it."""

import re
from collections.abc import Sequence

HEADER = "x-litellm-mlx-ignored"
_MOST_NAMES = 32
_MOST_NAME_CHARS = 80
_ODD = re.compile(r"[^A-Za-z0-9_.=\[\]/-]")


def told_names(names: Sequence[str]) -> str:
    """The names in one line; a client wrote them, so nothing odd and not too many."""
    told = [_ODD.sub("?", name)[:_MOST_NAME_CHARS] for name in names[:_MOST_NAMES]]
    more = len(names) - _MOST_NAMES
    return ", ".join([*told, f"and {more} more"] if more > 0 else told)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The response header that names them; none if there are none."""
    return {HEADER: told_names(names)} if names else {}
