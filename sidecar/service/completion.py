"""Several raw prompts in one request, answered as one response."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sidecar.core.events import (
    ChoiceFinished,
    Event,
    Finished,
    Idle,
    PrefillProgress,
    ReasoningDelta,
    TextDelta,
    Usage,
)
from sidecar.core.ports import RunningAnswer


class CompletionRun:
    """
    The runs of one request; the choices of prompt i start at i * n.

    All run at once; they are sent one after the other.

    Args:
        headers: what a client may want to know before the first token.
    """

    def __init__(
        self,
        runs: Sequence[RunningAnswer],
        echoes: Sequence[str],
        n: int,
        headers: Mapping[str, str],
    ) -> None:
        self._runs = runs
        self.headers = headers
        self._n = n
        self.echoes = [echo for echo in echoes for _ in range(n)]

    def events(self) -> Iterator[Event]:
        """Events of all prompts, one Finished at the end."""
        usages: list[Usage] = []
        metrics = None
        for number, run in enumerate(self._runs):
            for event in run.events():
                if isinstance(event, Finished):
                    usages.append(event.usage)
                    metrics = event.metrics
                else:
                    yield _moved(event, number * self._n)
        yield Finished(Usage.total(usages), metrics if len(usages) == 1 else None)

    def close(self) -> None:
        """Free everything; idempotent."""
        for run in self._runs:
            run.close()


def _moved(event: Event, offset: int) -> Event:
    if isinstance(event, (TextDelta, ReasoningDelta, ChoiceFinished)):
        return replace(event, choice=event.choice + offset)
    return event if isinstance(event, PrefillProgress) else Idle()
