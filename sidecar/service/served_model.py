"""A model ready for requests: its pipeline in, its engine, its syntax out."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from sidecar.core.prompt import ModelIds, PreparedPrompt
from sidecar.core.requests import ChatRequest, ClientInfo
from sidecar.engine.text import TextEngine
from sidecar.pipeline.prepare import Pipeline


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the pool leases to a request."""

    engine: TextEngine
    pipeline: Pipeline
    shares_kv: bool = False  # CACHE_SHARE_BETWEEN_KEYS

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together that fit now."""
        return self.engine.fitting_context

    def counters(self) -> dict[str, int]:
        """What its store and its pipeline have counted."""
        return {
            **self.engine.store.counters.snapshot(),
            **self.pipeline.counters.snapshot(),
            "healing_ambiguous": self.pipeline.healing.num_ambiguous,
        }

    def prepare(
        self, request: ChatRequest, is_connected: Callable[[], bool]
    ) -> PreparedPrompt:
        """
        What the model reads for a request, in the form that reuses most.

        Args:
            is_connected: whether the client is still there.

        Raises:
            BadRequest: the template refuses the conversation.
            ContextLengthExceeded: it is so much too long that a part tells.
            RequestCancelled: the client is gone.
        """
        longest = self.engine.max_context - 1  # there must be room for an answer
        salt = self._salt(request.client)
        matcher = self.engine.store.salted(salt)
        prompt = self.pipeline.prepare(request, matcher, longest, is_connected)
        return replace(prompt, salt=salt)

    def prepare_raw(
        self, prompt: str | tuple[int, ...], client: ClientInfo
    ) -> PreparedPrompt:
        """A raw completion's prompt: no template, and nothing is known of it."""
        if isinstance(prompt, str):
            ids, text = ModelIds(self.pipeline.encoder.encode(prompt).ids), prompt
        else:
            ids = ModelIds(prompt)
            text = self.engine.model.tokenizer.decode(list(prompt))
        return PreparedPrompt(ids, text, False, False, salt=self._salt(client))

    def _salt(self, client: ClientInfo) -> str:
        """
        The KV of each key that LiteLLM knows is a tree of its own.

        Else the count of cached tokens, or the time to the first one, would tell one
        key what another asked. Without keys, what clients send for one is made up; and
        the sidecar has one key itself, or none.
        """
        is_apart = client.is_key_checked and not self.shares_kv
        return client.api_key_id or "" if is_apart else ""

    def drain(self) -> None:
        """Take no new work."""
        self.engine.drain()

    def close(self) -> None:
        """Give the memory back."""
        self.engine.close()
