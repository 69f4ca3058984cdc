"""After a clean finish only: what the client was shown becomes part of the memory."""

from typing import Any

from sidecar.core.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from sidecar.core.prompt import PreparedPrompt
from sidecar.core.requests import ToolCall
from sidecar.engine.job import ChoiceEnded
from sidecar.pipeline.prepare import Pipeline
from sidecar.service.request_log import RequestLog

_BROKEN_OFF = ("cancelled", "client_gone", "timeout")


class TurnRecorder:
    """Collects what the first choice of a chat answer shows. One thread."""

    def __init__(
        self, pipeline: Pipeline, prompt: PreparedPrompt, log: RequestLog
    ) -> None:
        self._pipeline = pipeline
        self._prompt = prompt
        self._log = log
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._sampled: tuple[int, ...] = ()
        self._is_spoiled = False

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
        self._is_spoiled = self._is_spoiled or ended.is_aborted
        if ended.choice == 0 and ended.stop_string is None:
            self._sampled = ended.token_ids

    @property
    def headers(self) -> dict[str, str]:
        """What a client may want to know before the first token."""
        report = self._prompt.report
        return {
            "x-mlx-prompt-tokens": str(len(self._prompt.model_ids)),
            "x-mlx-cached-tokens": str(report.reused_len),
            "x-mlx-pinned": ",".join(report.pinned),
        }

    @property
    def planned_usage(self) -> Usage:
        """What is known at admission: the prompt, and what of it is reused."""
        prompt = self._prompt
        return Usage(len(prompt.model_ids), 0, prompt.report.reused_len, 0)

    def report(self, numbers: dict[str, Any]) -> None:
        """Tell how it ended; what was broken off may be asked again."""
        if numbers["outcome"] in _BROKEN_OFF:
            self._pipeline.keep_past(self._prompt)
        self._pipeline.note_cost(
            self._prompt, numbers["prompt_tokens"] - numbers["cached_tokens"]
        )
        said = {
            "reasoning": "".join(self._reasoning),
            "text": "".join(self._text),
            "calls": [(call.name, call.arguments) for call in self._calls],
        }
        self._log.ended(numbers, said)

    def commit(self) -> None:
        """Remember the turn, unless the watchdog ended it."""
        if self._is_spoiled:
            self._pipeline.counters.add("watchdog_abort")
            return
        self._pipeline.commit(
            self._prompt,
            "".join(self._text),
            "".join(self._reasoning),
            self._calls,
            self._sampled,
        )
