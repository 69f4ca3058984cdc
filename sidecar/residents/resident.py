"""One loaded model with all its sides: pipeline in, engine, syntax out, memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.core.conversation import Conversation, unknown, with_adapter
from sidecar.core.errors import BadRequest, Unavailable
from sidecar.core.prompt import Hit, ModelIds, ModelPrompt, SeenImage
from sidecar.core.requests import (
    ChatRequest,
    ClientInfo,
    GenerationOptions,
    Message,
)
from sidecar.engine.adapters.adapter_files import AdapterFiles, adapter_in
from sidecar.engine.job import Forecast
from sidecar.engine.text_engine import TextEngine
from sidecar.images.text_only import without_unseen
from sidecar.infra.metrics import HEALTHY_AT_ZERO
from sidecar.kv.cache import KVCache
from sidecar.kv.disk.disk_cache import DiskCache
from sidecar.kv.disk.ports import READING, WRITING
from sidecar.memory.conversation_memory import ConversationMemory
from sidecar.pipeline.prepare import Pipeline, PreparedPrompt
from sidecar.pipeline.reuse.prompt_ids import check_length
from sidecar.residents.model_state import ServedModel
from sidecar.residents.ocr import with_prompt

if TYPE_CHECKING:  # of the extra `vision`
    from sidecar.images.reader import ImageReader


_NO_DISK = dict.fromkeys((*WRITING, *READING), 0)
_NO_IMAGES = {"images_seen": 0, "images_decoded": 0}


@dataclass(frozen=True, slots=True)
class ReadWith:
    """
    The adapter that a request is read with: nothing is shared with another one's.

    Args:
        digest: "": none. row: of the model's bank; 0 for a forecast, too.
    """

    digest: str = ""
    row: int = 0

    def salt(self, salt: str) -> str:
        """The prefix tree of a tenant's KV with this adapter."""
        return with_adapter(salt, self.digest) if self.digest else salt

    def client(self, client: ClientInfo) -> ClientInfo:
        """A client as the tenant of what is read with this adapter."""
        if not self.digest:
            return client
        return replace(client, api_key_id=with_adapter(client.api_key_id, self.digest))


NO_ADAPTER = ReadWith()
_NO_OPTIONS = GenerationOptions()


@dataclass(frozen=True, slots=True)
class Resident:
    """
    What the pool leases to a request.

    Args:
        cache: its KV, in memory and on the disk.
        shares_kv: CACHE_SHARE_BETWEEN_KEYS.
        images: how it takes images; None: it takes text only.
        unsupported_images: UNSUPPORTED_IMAGES: what becomes of those it does not take.
        leave: what becomes of its conversations when the weights are gone.
        ocr: what it is asked where a client sends a picture alone; "": nothing.
        adapter_folder: of the adapter that it is read with where a request names none.
        files: says what its files, and its adapter's, are known again by.
    """

    engine: TextEngine
    pipeline: Pipeline
    memory: ConversationMemory
    cache: KVCache
    shares_kv: bool
    leave: Callable[[], None]
    images: "ImageReader | None" = None
    unsupported_images: str = "auto"
    ocr: str = ""
    adapter_folder: Path | None = None
    files: Callable[[], str] = str

    @property
    def disk(self) -> DiskCache | None:
        """Where its KV outlives the process; None: it does not."""
        return self.cache.disk

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.engine.model.name

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return self.engine.model.all_bytes

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together that fit now."""
        return self.engine.fitting_context

    @property
    def failed_tests(self) -> tuple[str, ...]:
        """Names of the tests at load that it failed."""
        return self.engine.failed_tests

    def own_adapter(self) -> AdapterFiles | None:
        """
        The adapter that it is read with where a request names none.

        Raises:
            Unavailable: it was served once, and cannot be any more.
        """
        if self.adapter_folder is None:
            return None
        try:
            return adapter_in(self.adapter_folder, "model")
        except BadRequest as error:
            raise self.broken_adapter(error) from None

    def require_bare(self) -> None:
        """
        Refuse a named adapter where the model has one as part of it.

        Raises:
            BadRequest: it has.
        """
        if applied := self.engine.model.applied:
            raise BadRequest(
                f"adapter must be left out: {self.name} is read with {applied}, which "
                "is part of it",
                param="adapter",
            )

    def broken_adapter(self, error: BadRequest) -> Unavailable:
        """What a client is told that has not named the adapter: the fault is ours."""
        return Unavailable(
            f"the adapter_path of {self.name} cannot be used: {error.message}",
            retry_after_s=30,
        )

    @property
    def takes_images(self) -> bool:
        """Whether it sees, and has proved at its load that it sees right."""
        has_tower = self.engine.guard.tower is not None  # else it could not be tried
        has_vision_encoder = self.images is not None and has_tower
        return has_vision_encoder and self.engine.is_allowed("images")

    def _why_blind(self) -> str:
        if self.images is not None:
            return "this model's test of images failed at its load"
        return self.engine.model.no_vision_reason or "this model takes text only"

    def counters(self) -> dict[str, int]:
        """What its store, its pipeline and its memory have counted."""
        return {
            **self.engine.store.counters.snapshot(),
            **self.pipeline.counters.snapshot(),
            **self.memory.counters.snapshot(),
            **(self.images.counters.snapshot() if self.images else _NO_IMAGES),
            **_NO_DISK,
            **(self.disk.counters() if self.disk else {}),
            "healing_ambiguous": self.memory.healing.num_ambiguous,
        }

    def prepare(
        self,
        request: ChatRequest,
        is_connected: Callable[[], bool],
        adapter: ReadWith = NO_ADAPTER,
    ) -> PreparedPrompt:
        """
        What the model reads for a request, in the form that reuses most.

        Args:
            is_connected: whether the client is still there.
            adapter: that it is read with.

        Raises:
            BadRequest: the template refuses the conversation, or an image is bad.
            ContextLengthExceeded: it is so much too long that a part tells.
            RequestCancelled: the client is gone.
        """
        longest = self.engine.longest_prompt(request.options)
        salt = adapter.salt(self._salt(request.client))
        request = replace(request, client=adapter.client(request.client))
        readable, unseen = self._without_unseen(request)
        messages, seen = self._see(readable.messages, salt, is_connected)
        readable = replace(readable, messages=messages)
        prepared = self.pipeline.prepare(readable, salt, longest, is_connected, seen)
        _decode_first(prepared)
        model = replace(prepared.model, adapter=adapter.row)
        prepared = replace(prepared, unseen=unseen, model=model)
        return self._windowed(prepared, request.options)

    def _windowed(
        self, prepared: PreparedPrompt, options: GenerationOptions
    ) -> PreparedPrompt:
        """The same, of which no more is reused than its context keeps."""
        model = self.engine.windowed(prepared.model, options)
        if model.window is None:
            return prepared
        asked_by = prepared.pending_turn.conversation
        hit = self.cache.lookup(model.reusable_ids, asked_by)
        return replace(prepared, model=model).with_hit(hit)

    def _without_unseen(
        self, request: ChatRequest
    ) -> tuple[ChatRequest, tuple[str, ...]]:
        """The request without what this model cannot see, and the places of that."""
        sent = [image for message in request.messages for image in message.images]
        if all(self.takes_images and not image.is_file for image in sent):
            return request, ()
        why_blind = "" if self.takes_images else self._why_blind()
        policy = self.unsupported_images
        messages, unseen = without_unseen(request.messages, policy, why_blind)
        return replace(request, messages=messages), unseen

    def _see(
        self,
        messages: tuple[Message, ...],
        salt: str,
        is_connected: Callable[[], bool],
    ) -> tuple[tuple[Message, ...], tuple[SeenImage, ...]]:
        if self.images is None or not any(message.images for message in messages):
            return messages, ()
        messages = with_prompt(messages, self.ocr) if self.ocr else messages
        return self.images.read(messages, salt, is_connected)

    def forecast(self, prepared: PreparedPrompt, maximum: int | None) -> Forecast:
        """What a prompt will cost, the time to bring some of it back included."""
        found = self.engine.forecast(prepared.lengths, maximum, prepared.model.window)
        found = found.later(self.engine.look_s(prepared.model))
        return found.later(prepared.hit.restore_s)

    def restore(
        self, prepared: PreparedPrompt, is_connected: Callable[[], bool]
    ) -> PreparedPrompt:
        """Have in memory what the disk holds of a prompt; it, as it is held then."""
        hit = self.cache.restore(prepared.model, prepared.hit, is_connected)
        return prepared if hit is prepared.hit else prepared.with_hit(hit)

    def restore_raw(self, prompt: ModelPrompt, is_wanted: Callable[[], bool]) -> Hit:
        """Have in memory what the disk holds of a raw prompt; what is held then."""
        asked_by = prompt.conversation or unknown(self.engine.store.generation)
        hit = self.cache.lookup(prompt.reusable_ids, asked_by)
        return self.cache.restore(prompt, hit, is_wanted)

    def prepare_raw(
        self,
        prompt: str | tuple[int, ...],
        client: ClientInfo,
        adapter: ReadWith = NO_ADAPTER,
        options: GenerationOptions = _NO_OPTIONS,
    ) -> tuple[ModelPrompt, str]:
        """
        A raw completion's prompt, and its text: no template, nothing remembered.

        Args:
            adapter: that it is read with. options: what else is asked for.
        Raises:
            ContextLengthExceeded: it is so much too long that a part tells.
        """
        if isinstance(prompt, str):
            longest = self.engine.longest_prompt(options)
            check_length((prompt,), self.pipeline.encoder, longest, "prompt")
            ids, text = ModelIds(self.pipeline.encoder.encode(prompt).ids), prompt
        else:
            ids = ModelIds(prompt)
            text = self.engine.model.tokenizer.decode(list(prompt))
        conversation = Conversation(
            adapter.client(client).api_key_id,
            client.session or "",
            salt=adapter.salt(self._salt(client)),
            generation=self.memory.generation,
            is_batch=client.is_batch,
        )
        model = ModelPrompt(ids, conversation=conversation, adapter=adapter.row)
        return self.engine.windowed(model, options), text

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
        vitals = {
            "layers": ",".join(f"{n}x{kind}" for kind, n in layers),
            "checkpoints": "needed" if engine.store.needs_checkpoints else "not-needed",
            "splicing": "on" if self.pipeline.can_splice else "off",
            "selftest": tests or "-",
            **{name: counters[name] for name in HEALTHY_AT_ZERO},
        }
        return " ".join(f"{name}={value}" for name, value in vitals.items())

    def close(self) -> int:
        """Give the weights back; the bytes. A second time does nothing."""
        if self.engine.is_closed:
            return 0
        if self.disk is not None:
            self.disk.close()  # what it still writes needs the model
        freed = self.engine.close()
        self.leave()
        return freed


def _decode_first(prepared: PreparedPrompt) -> None:
    """Have the pixels that are needed first before the GPU's turn comes."""
    reused = prepared.report.reused_len
    due = (placed for placed in prepared.model.images if placed.end > reused)
    first = next(due, None)
    if first is not None and first.image.pixels is not None:
        first.image.pixels.wait()


def require_text(model: ServedModel) -> Resident:
    """
    A model that writes.

    Raises:
        BadRequest: it is of another kind.
    """
    if isinstance(model, Resident):
        return model
    raise BadRequest(f"{model.name} does not answer chats", param="model")
