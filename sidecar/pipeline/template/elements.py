"""What a rendered prompt is made of: literal text, volatile spans, spliced turns."""

from dataclasses import dataclass

from sidecar.memory.healing_store import Healed
from sidecar.volatile.spans import Span


@dataclass(frozen=True, slots=True)
class Splice:
    """A past turn of the model's own: its ids stand in for what the template prints."""

    message: int
    healed: Healed


Element = str | Span | Splice
