"""A model ready for requests: its pipeline in, its engine, its syntax out."""

from collections.abc import Callable
from dataclasses import dataclass

from sidecar.core.prompt import PreparedPrompt
from sidecar.core.requests import ChatRequest
from sidecar.engine.text import TextEngine
from sidecar.pipeline.prepare import Pipeline


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the pool leases to a request."""

    engine: TextEngine
    pipeline: Pipeline

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together that fit now."""
        return self.engine.fitting_context

    def prepare(
        self, request: ChatRequest, is_connected: Callable[[], bool]
    ) -> PreparedPrompt:
        """
        What the model reads for a request, in the form that reuses most.

        Args:
            is_connected: whether the client is still there.

        Raises:
            BadRequest: the template refuses the conversation.
            RequestCancelled: the client is gone.
        """
        longest = self.engine.max_context - 1  # there must be room for an answer
        return self.pipeline.prepare(request, self.engine.store, longest, is_connected)

    def drain(self) -> None:
        """Take no new work."""
        self.engine.drain()

    def close(self) -> None:
        """Give the memory back."""
        self.engine.close()
