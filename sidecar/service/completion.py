"""Several raw prompts in one request, told as one response."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    Idle,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from sidecar.service.generation import Generation


class CompletionRun:
    """
    The generations of one request; the choices of prompt i start at i * n.

    All run at once; they are told one after the other.
    """

    def __init__(
        self, generations: Sequence[Generation], echoes: Sequence[str], n: int
    ) -> None:
        self._generations = generations
        self._n = n
        self.echoes = [echo for echo in echoes for _ in range(n)]

    def events(self) -> Iterator[Event]:
        """Events of all prompts, one Finished at the end."""
        usages: list[Usage] = []
        for number, generation in enumerate(self._generations):
            for event in generation.events():
                if isinstance(event, Finished):
                    usages.append(event.usage)
                else:
                    yield _moved(event, number * self._n)
        yield Finished(_sum(usages))

    def close(self) -> None:
        """Free everything; idempotent."""
        for generation in self._generations:
            generation.close()


def _moved(event: Event, offset: int) -> Event:
    if isinstance(event, (TextDelta, ReasoningDelta, ToolCallDelta, ChoiceFinished)):
        return replace(event, choice=event.choice + offset)
    return Idle()


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        sum(u.prompt_tokens for u in usages),
        sum(u.completion_tokens for u in usages),
        sum(u.cached_tokens for u in usages),
        sum(u.reasoning_tokens for u in usages),
    )
