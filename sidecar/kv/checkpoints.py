"""
Where one prefill takes checkpoints, for layers that cannot be cut back.

A hybrid or sliding model can go on from a checkpoint only, so each is placed where a
later prompt may part from this one: at ends of messages, of the prompt, and where two
prompts were seen to part.
"""

from collections.abc import Collection, Iterable

from sidecar.core.prompt import PROMPT_END, SYSTEM_END, Boundary

_RECENT_TOKENS = 2048
_BEFORE_PARTING = 64  # tokens: a line or two


def planned_stops(
    boundaries: Collection[Boundary],
    cached_len: int,
    shared_len: int,
    length: int,
    min_gap: int,
) -> list[Boundary]:
    """
    Where one prefill pass stops for a checkpoint, ascending.

    Args:
        cached_len: tokens that are restored. shared_len: tokens that another prompt
            shares, of which fewer are restored where no checkpoint lies as deep.
        min_gap: tokens between two checkpoints, and what a new one must gain.
    """
    if shared_len - cached_len >= min_gap:
        parting = places_of_parting(boundaries, shared_len)
        boundaries = sorted({*boundaries, *parting}, key=_at)
    return plan_stops(boundaries, cached_len, length, min_gap)


def places_of_parting(places: Iterable[Boundary], depth: int) -> set[Boundary]:
    """
    Where two prompts part inside a message, and where a third may part from both.

    It may well do so a little earlier (another day of the same month), or within the
    same message somewhere: so there is one before the parting, and one at the end of
    the last message before it.
    """
    message_end = max(
        (place.depth for place in places if place.depth < depth), default=0
    )
    earlier = max(message_end, depth - _BEFORE_PARTING)
    return {Boundary(at, SYSTEM_END) for at in (message_end, earlier, depth) if at > 0}


def plan_stops(
    boundaries: Iterable[Boundary], start: int, length: int, min_gap: int
) -> list[Boundary]:
    """
    Where to take checkpoints in one prefill pass.

    All places of high rank and the end; message ends in the last 2048 tokens; other
    message ends at least `min_gap` tokens apart.
    """
    last = length - 1
    chosen: list[Boundary] = []
    previous = start
    for place in boundaries:
        if not start < place.depth < last:
            continue
        is_near = place.depth >= length - _RECENT_TOKENS
        if place.rank <= 2 or is_near or place.depth - previous >= min_gap:
            chosen.append(place)
            previous = place.depth
    if last > start:
        chosen.append(Boundary(last, PROMPT_END))
    return chosen


def _at(place: Boundary) -> tuple[int, int]:
    return place.depth, place.rank
