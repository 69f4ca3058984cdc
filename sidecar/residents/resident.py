"""One loaded model with all its sides: pipeline in, engine, syntax out, memory."""

from collections.abc import Callable
from dataclasses import dataclass

from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.core.requests import ChatRequest, ClientInfo
from sidecar.engine.text import TextEngine
from sidecar.infra.metrics import HEALTHY_AT_ZERO
from sidecar.memory.conversation_memory import ConversationMemory
from sidecar.pipeline.prepare import Pipeline, PreparedPrompt
from sidecar.pipeline.reuse.prompt_ids import check_length


@dataclass(frozen=True, slots=True)
class Resident:
    """
    What the pool leases to a request.

    Args:
        shares_kv: CACHE_SHARE_BETWEEN_KEYS.
        leave: what becomes of its conversations when the weights are gone.
    """

    engine: TextEngine
    pipeline: Pipeline
    memory: ConversationMemory
    shares_kv: bool
    leave: Callable[[], None]

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.engine.model.name

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return self.engine.model.num_bytes

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together that fit now."""
        return self.engine.fitting_context

    def counters(self) -> dict[str, int]:
        """What its store, its pipeline and its memory have counted."""
        return {
            **self.engine.store.counters.snapshot(),
            **self.pipeline.counters.snapshot(),
            **self.memory.counters.snapshot(),
            "healing_ambiguous": self.memory.healing.num_ambiguous,
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
        return self.pipeline.prepare(request, salt, longest, is_connected)

    def prepare_raw(
        self, prompt: str | tuple[int, ...], client: ClientInfo
    ) -> tuple[ModelPrompt, str]:
        """
        A raw completion's prompt, and its text: no template, nothing remembered.

        Raises:
            ContextLengthExceeded: it is so much too long that a part tells.
        """
        if isinstance(prompt, str):
            longest = self.engine.max_context - 1
            check_length((prompt,), self.pipeline.encoder, longest, "prompt")
            ids, text = ModelIds(self.pipeline.encoder.encode(prompt).ids), prompt
        else:
            ids = ModelIds(prompt)
            text = self.engine.model.tokenizer.decode(list(prompt))
        salt, epoch = self._salt(client), self.memory.epoch
        return ModelPrompt(ids, salt=salt, epoch=epoch), text

    def _salt(self, client: ClientInfo) -> str:
        """
        The KV of each key that LiteLLM knows is a tree of its own.

        Else the count of cached tokens, or the time to the first one, would tell one
        key what another asked. Without keys, what clients send for one is made up; and
        the sidecar has one key itself, or none.
        """
        is_apart = client.is_key_checked and not self.shares_kv
        return client.api_key_id or "" if is_apart else ""

    def start_line(self) -> str:
        """
        How this model reuses, how its tests went, and the counters that should stay 0.

        Their values are those after the load: what has moved already says that
        something is wrong with this model.
        """
        engine, counters = self.engine, self.counters()
        layers = [(k.replace(" ", ""), n) for k, n in engine.store.layers.items()]
        tests = ",".join(
            f"{name}:{outcome}" for name, outcome in engine.selftest.items()
        )
        told = {
            "layers": ",".join(f"{n}x{kind}" for kind, n in layers),
            "checkpoints": "needed" if engine.store.needs_checkpoints else "not-needed",
            "splicing": "on" if self.pipeline.can_splice else "off",
            "selftest": tests or "-",
            **{name: counters[name] for name in HEALTHY_AT_ZERO},
        }
        return " ".join(f"{name}={value}" for name, value in told.items())

    def close(self) -> int:
        """Give the weights back; the bytes. A second time does nothing."""
        if self.engine.is_closed:
            return 0
        freed = self.engine.close()
        self.leave()
        return freed
