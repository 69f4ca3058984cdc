"""What is said of a model's probe as it goes on (service/capability_probe)."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["running", "completed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """
    A step of a probe as it begins or ends.

    Args:
        value: what was found of the capability. diagnostics: what people should know.
    """

    step: str
    status: Status
    capability: str | None = None
    value: Any = None
    error: str | None = None
    diagnostics: Sequence[dict[str, str]] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        shown = {name: getattr(self, name) for name in self.__slots__}
        return {**shown, "diagnostics": list(self.diagnostics)}


Steps = Generator[ProbeStep | None, None, None]  # None: nothing new yet
