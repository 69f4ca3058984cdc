"""Where prompts stop sharing their beginning, and what that costs, per client."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from sidecar.core.prompt import ChatTokenizer, Divergence
from sidecar.memory.lineage import LineageRecord
from sidecar.pipeline.reuse.prompt_ids import Canonical
from sidecar.volatile.marked_message import MarkedMessage

_WINDOW_CHARS = 40
_WINDOW_IDS = 24
_MAX_PLACES = 512


def first_divergence(
    record: LineageRecord,
    canonical: Canonical,
    shared_len: int,
    tokenizer: ChatTokenizer,
    marked: Sequence[MarkedMessage],
) -> Divergence | None:
    """The first differing canonical id; None if one prompt extends the other."""
    if shared_len >= min(len(record.canonical), len(canonical.ids)):
        return None
    settled = [key for key, depth in canonical.settled.items() if depth > shared_len]
    message = min((key[0] for key in settled), default=len(marked) - 1)
    if message and canonical.begins.get(message, 0) > shared_len:
        message -= 1  # a turn of the model: it has no spans
    now = canonical.ids[shared_len : shared_len + _WINDOW_IDS]
    before = record.canonical[shared_len : shared_len + _WINDOW_IDS]
    return Divergence(
        shared_len,
        message,
        marked[message].message.role,
        tokenizer.decode(list(before))[:_WINDOW_CHARS],
        tokenizer.decode(list(now))[:_WINDOW_CHARS],
    )


def key_delta_chars(
    canonical: Canonical, shared_len: int, tokenizer: ChatTokenizer
) -> int:
    """
    How much of the cache key is new: characters of the canonical text (volatile values
    as marks, turns that are put back as digests) behind its first `shared_len` ids.
    """
    return len(tokenizer.decode(list(canonical.ids[shared_len:])))


class DriftReport:
    """Recurring places of divergence. Any thread."""

    def __init__(self) -> None:
        self._places: OrderedDict[tuple[str, str, str], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, agent: str | None, place: Divergence, num_prefilled: int) -> None:
        """Count a divergence and the tokens prefilled because of it."""
        key = (agent or "-", place.role, place.before[:16])
        with self._lock:
            entry = self._places.setdefault(
                key,
                {"agent": key[0], "role": place.role, "times": 0, "prefilled": 0},
            )
            entry["times"] += 1
            entry["prefilled"] += num_prefilled
            entry["before"], entry["now"] = place.before, place.now
            self._places.move_to_end(key)
            while len(self._places) > _MAX_PLACES:
                self._places.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._places.clear()

    def rows(self) -> list[dict[str, Any]]:
        """Places by the tokens they cost, the dearest first."""
        with self._lock:
            rows = [dict(entry) for entry in self._places.values()]
        return sorted(rows, key=lambda row: row["prefilled"], reverse=True)
