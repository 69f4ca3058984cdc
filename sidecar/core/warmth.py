"""What of a conversation's last prompt was computed again, and why."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Warmth:
    """
    How warm a prompt was.

    Args:
        cause: the name of the reason (docs/reuse.md s13); "": all was reused.
        lost: tokens computed again. lost_s: seconds that this took, as measured.
        detail: the reason in words. remedy: what would mend it; "": nothing need be.
        field: the kind of value that differed. message, role: where.
        before, now: the text there. rule: TOML for CACHE_RULES_FILE that would know it.
    """

    cause: str = ""
    lost: int = 0
    lost_s: float = 0.0
    detail: str = ""
    remedy: str = ""
    field: str | None = None
    message: int | None = None
    role: str | None = None
    before: str | None = None
    now: str | None = None
    rule: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


WARM = Warmth()
