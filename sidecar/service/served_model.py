"""A model ready for requests: its pipeline in, its engine, its syntax out."""

from dataclasses import dataclass

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

    def drain(self) -> None:
        """Take no new work."""
        self.engine.drain()

    def close(self) -> None:
        """Give the memory back."""
        self.engine.close()
