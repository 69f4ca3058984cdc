"""
LiteLLM's advertising, which the launcher does not show.

Only lines that are known: its logo, links for feedback, its list of providers, the two
warnings that no master key is set, which the launcher says in its own words (it lets
LiteLLM run so on loopback alone), and one of the Admin UI's sign-in, which is shut.
Blank lines around them go with them.
"""

import re
from collections.abc import Iterable, Iterator

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOGO = re.compile(r"[\s█╗╔═║╝╚]+")
_KNOWN = re.compile(
    r"Provider List: https://\S+"
    r"|Give Feedback / Get Help: https://\S+"
    r"|LiteLLM\.Info: If you need to debug this error.*"
    r"|.*CRITICAL.*LITELLM_MASTER_KEY is not set!.*"
    r"|.*WARNING.*trusted_proxy_ranges is not set.*"
    r"|.*WARNING.*dangerously_permit_weak_or_unset_master_key is on,.*"
)


def without_chatter(lines: Iterable[str]) -> Iterator[str]:
    """The lines that say something, as they come; a blank one with the next."""
    num_blank, after_chatter = 0, False
    for line in lines:
        if not line.strip():
            num_blank += 1
            continue
        if is_chatter(line):
            num_blank, after_chatter = 0, True
            continue
        if not after_chatter:
            yield from [""] * num_blank
        num_blank, after_chatter = 0, False
        yield line


def is_chatter(line: str) -> bool:
    """Whether a line is one of those."""
    text = _COLOURS.sub("", line).strip()
    return bool(text) and bool(_LOGO.fullmatch(text) or _KNOWN.fullmatch(text))
