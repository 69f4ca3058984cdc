"""A request that runs, as people see it who look on."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunView:
    """
    Where a request stands.

    Args:
        number: in the order of admission. state: `queued`, `prefill` or `decode`.
        done_tokens: of the prompt, those reused included. age_s: since admission.
        predicted_ttft_s: as forecast; None: of a raw completion.
        rate: tokens a second since the first one.
    """

    number: int
    request_id: str
    client: str | None
    model: str
    session: str
    state: str
    prompt_tokens: int
    done_tokens: int
    cached_tokens: int
    output_tokens: int
    age_s: float
    predicted_ttft_s: float | None
    ttft_s: float | None
    rate: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}
