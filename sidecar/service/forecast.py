"""What a request would cost, before it is admitted."""

from dataclasses import asdict, dataclass
from typing import Any

from sidecar.core.errors import TooSlow
from sidecar.core.prompt import PreparedPrompt
from sidecar.engine.text import TextEngine


@dataclass(frozen=True, slots=True)
class Forecast:
    """
    Counts in tokens, times in seconds from measured rates and the present queue.

    Args:
        predicted_s: until `max_tokens` answers are out.
        fits: whether it would be admitted as far as memory and context go.
    """

    prompt_tokens: int
    cached_tokens: int
    predicted_ttft_s: float
    predicted_s: float
    fits: bool
    max_context_tokens: int
    queued: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def forecast(
    engine: TextEngine, prompt: PreparedPrompt, max_tokens: int | None
) -> Forecast:
    """Look ahead for one prompt."""
    total, cached = len(prompt.model_ids), prompt.report.reused_len
    return forecast_of(engine, (total, cached), max_tokens)


def forecast_of(
    engine: TextEngine, lengths: tuple[int, int], max_tokens: int | None
) -> Forecast:
    """The same for so many tokens, of which so many are stored."""
    total, cached = lengths
    largest = engine.fitting_context
    ttft_s = engine.predict_ttft(total - cached)
    num_new = min(max_tokens or 256, max(1, largest - total))
    return Forecast(
        prompt_tokens=total,
        cached_tokens=cached,
        predicted_ttft_s=round(ttft_s, 4),
        predicted_s=round(ttft_s + num_new * engine.decode_step_s, 4),
        fits=total < largest,
        max_context_tokens=largest,
        queued=engine.num_open,
    )


def require_ttft(found: Forecast, max_ttft_s: float | None) -> None:
    """
    Refuse what would begin too late, while a router can still send it elsewhere.

    Raises:
        TooSlow: the first token would take longer than the request allows.
    """
    if max_ttft_s is not None and found.predicted_ttft_s > max_ttft_s:
        raise TooSlow(
            f"the first token would take about {found.predicted_ttft_s:.1f} s, and "
            f"mlx_max_ttft_s is {max_ttft_s:g}",
            param="mlx_max_ttft_s",
        )
