"""After a clean finish only: what the client was shown becomes part of the memory."""

from sidecar.core.events import Event, ReasoningDelta, TextDelta, ToolCallDelta
from sidecar.core.prompt import PreparedPrompt
from sidecar.core.requests import ToolCall
from sidecar.engine.job import ChoiceEnded
from sidecar.pipeline.prepare import Pipeline


class TurnRecorder:
    """Collects what the first choice of a chat answer shows. One thread."""

    def __init__(self, pipeline: Pipeline, prompt: PreparedPrompt) -> None:
        self._pipeline = pipeline
        self._prompt = prompt
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._sampled: tuple[int, ...] = ()

    def take(self, event: Event) -> None:
        """Note what the client is sent."""
        if getattr(event, "choice", 0) != 0:
            return
        if isinstance(event, TextDelta):
            self._text.append(event.text)
        elif isinstance(event, ReasoningDelta):
            self._reasoning.append(event.text)
        elif isinstance(event, ToolCallDelta):
            self._calls.append(event.call)

    def end(self, ended: ChoiceEnded) -> None:
        """Note the ids; a turn cut at a stop string holds text nobody was shown."""
        if ended.choice == 0 and ended.stop_string is None:
            self._sampled = ended.token_ids

    def commit(self) -> None:
        """Remember the turn."""
        self._pipeline.commit(
            self._prompt,
            "".join(self._text),
            "".join(self._reasoning),
            self._calls,
            self._sampled,
        )
