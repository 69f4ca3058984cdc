"""What a model does beside chats: it classifies, answers batches, shows its keys."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sidecar.config.settings import EngineConfig, GenerationConfig
from sidecar.core.errors import (
    BadRequest,
    Busy,
    RequestCancelled,
    ServingPaused,
    SidecarError,
    ValidationFailed,
)
from sidecar.core.events import CollectedAnswer, Event, Finished, broken_as_text
from sidecar.core.native import (
    AttentionRequest,
    BatchAnswer,
    BatchRequest,
    Classified,
    ClassifyRequest,
    Prompt,
)
from sidecar.core.ports import RunningAnswer
from sidecar.core.requests import ChatRequest, ClientInfo, CompletionRequest
from sidecar.engine.native.classification import Classifier, NextToken, label_tokens
from sidecar.engine.native.inspection import AttentionKeys, inspect_attention
from sidecar.engine.sampling import settle
from sidecar.residents.model_state import ServedModel
from sidecar.residents.pool import ResidentPool
from sidecar.residents.resident import Resident, require_text
from sidecar.service.tasks import ending

if TYPE_CHECKING:
    from sidecar.service.chat import ChatService

_MAX_NUMBERS = 4_000_000  # numbers in one answer
_BUSY_WAIT_S = 0.1

Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class NativeSettings:
    """How long a request may take, and what one may ask for."""

    timeout_s: float
    engine: EngineConfig
    generation: GenerationConfig


class NativeService:
    """Answers the `/native/` routes. Any thread."""

    def __init__(
        self,
        pool: ResidentPool[ServedModel],
        chat: "ChatService",
        settings: NativeSettings,
    ) -> None:
        self._pool, self._chat, self._settings = pool, chat, settings

    def use(self, settings: NativeSettings) -> None:
        """Serve later requests by other settings."""
        self._settings = settings

    def classify(
        self, request: ClassifyRequest, is_connected: Callable[[], bool]
    ) -> list[Classified]:
        """
        The next token of each prompt; a prompt that cannot be read has an error.

        Raises:
            SidecarError: unknown model; labels that cannot be told apart; too late.
        """
        timeout_s = self._settings.timeout_s
        check = ending(self._pool, is_connected, timeout_s)
        with self._pool.lease(request.model, time_left_s=timeout_s) as leased:
            resident = require_text(leased)
            _require_few_logits(request, resident)
            labels = label_tokens(_encoded(request.labels, resident))
            found = _Prompts(resident, request.client, is_connected).read(
                request.prompts, resident.max_context - len(labels.shared), check
            )
            own = resident.engine.model.generation_config
            tokens = iter(
                self._classifier(resident).classify(
                    list(found.ids.values()),
                    labels,
                    settle(request.sampling, self._settings.generation, own),
                    check,
                    with_logits=request.with_logits,
                )
                if found.ids
                else ()
            )
            return [
                Classified(error=found.errors[place])
                if place in found.errors
                else _classified(next(tokens), request.labels, resident)
                for place in range(len(request.prompts))
            ]

    def batch_generate(
        self, request: BatchRequest, is_connected: Callable[[], bool]
    ) -> list[BatchAnswer]:
        """
        Have each prompt answered as a request of its own, as many at once as may run.

        Raises:
            RequestCancelled: the client is gone. RequestTimeout, Unavailable.
        """
        check = ending(self._pool, is_connected, self._settings.timeout_s)
        self._chat.require(request.first)
        most = min(len(request.readers), self._settings.engine.max_concurrent)
        with ThreadPoolExecutor(most, thread_name_prefix="batch") as threads:
            answers = threads.map(
                lambda read: self._answer(read, is_connected, check), request.readers
            )
            try:
                return list(answers)
            finally:
                threads.shutdown(cancel_futures=True)

    def inspect(
        self, request: AttentionRequest, is_connected: Callable[[], bool]
    ) -> tuple[dict[str, Any], Mapping[int, np.ndarray | None]]:
        """
        What is known of a model's layers, and the keys of those that are asked for.

        Raises:
            SidecarError: unknown model or layer; too long; too much for JSON.
        """
        timeout_s, engine = self._settings.timeout_s, self._settings.engine
        check = ending(self._pool, is_connected, timeout_s)
        with self._pool.lease(request.model, time_left_s=timeout_s) as leased:
            resident = require_text(leased)
            most = min(engine.attention_max_tokens, resident.max_context)
            read = _Prompts(resident, request.client, is_connected).read(
                (request.prompt,), most, check
            )
            for error in read.errors.values():
                raise BadRequest(error, param="prompt")
            found = inspect_attention(
                resident.engine, read.ids[0], self._chunk_len(resident), check
            )
        return _layer_facts(found), _wanted_keys(found, request)

    def _classifier(self, resident: Resident) -> Classifier:
        engine = self._settings.engine
        stall_s = engine.decode_stall_ms / 1000
        chunk_len = self._chunk_len(resident)
        return Classifier(resident.engine, stall_s, engine.classify_batch, chunk_len)

    def _chunk_len(self, resident: Resident) -> int:
        """Tokens of one prompt that keep streams waiting no longer than they may."""
        engine = self._settings.engine
        fitting = int(
            engine.decode_stall_ms / 1000 / max(resident.engine.token_s, 1e-9)
        )
        return max(64, min(engine.prefill_step_size, fitting))

    def _answer(
        self,
        read: Callable[[], ChatRequest | CompletionRequest],
        is_connected: Callable[[], bool],
        check: Check,
    ) -> BatchAnswer:
        events: list[Event] = []
        check()
        try:
            run = self._start(read(), is_connected, check)
            try:
                for event in run.events():
                    check()
                    events.append(event)
            finally:
                run.close()
        except ServingPaused:
            raise  # it is none of this prompt's
        except SidecarError as error:
            check()  # what ends the whole batch is no answer
            return _batch_answer(events, error.message)
        return _batch_answer(events)

    def _start(
        self,
        request: ChatRequest | CompletionRequest,
        is_connected: Callable[[], bool],
        check: Check,
    ) -> RunningAnswer:
        """Begin one; while all places are taken it waits for one."""
        timeout_s = self._settings.timeout_s
        while True:
            check()
            try:
                if isinstance(request, CompletionRequest):
                    return self._chat.start_completion(request, timeout_s)
                return self._chat.start_chat(request, timeout_s, is_connected)
            except Busy:
                time.sleep(_BUSY_WAIT_S)


def _batch_answer(events: Sequence[Event], error: str = "") -> BatchAnswer:
    """What came of one prompt; a call that is no JSON is text, as in a whole chat."""
    said = CollectedAnswer()
    for event in broken_as_text(events):
        said.take(event)
    return BatchAnswer(
        said.end.token_ids if said.end else (),
        "".join(said.text),
        "".join(said.reasoning),
        tuple(said.calls),
        said.end.reason if said.end else None,
        error,
        next((e.usage.rotated_field for e in events if isinstance(e, Finished)), {}),
    )


def _layer_facts(found: AttentionKeys) -> dict[str, Any]:
    """What is known of all layers, without their keys."""
    first = next((one for one in found.keys if one is not None), None)
    return {
        "architecture": found.architecture,
        "num_layers": len(found.keys),
        "seq_len": found.seq_len,
        "num_heads": None if first is None else first.shape[0],
        "head_dim": None if first is None else first.shape[2],
        "num_query_heads": found.num_query_heads,
        "layer_kinds": found.layer_kinds,
        "positions": found.positions,
    }


def _wanted_keys(
    found: AttentionKeys, request: AttentionRequest
) -> dict[int, np.ndarray | None]:
    """The keys of the layers that are asked for; in JSON not too many numbers."""
    num_layers = len(found.keys)
    layers = request.layers or tuple(range(num_layers))
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise ValidationFailed(
                f"layers must be 0..{num_layers - 1}, got {layer}", param="layers"
            )
    keys = {layer: found.keys[layer] for layer in layers}
    num_numbers = sum(one.size for one in keys.values() if one is not None)
    if num_numbers > _MAX_NUMBERS and not request.as_arrays:
        raise ValidationFailed(
            f"the keys are {num_numbers} numbers, and JSON holds {_MAX_NUMBERS} at "
            "most: name fewer layers, or format npz",
            param="format",
        )
    return keys


@dataclass(frozen=True, slots=True)
class _ReadPrompts:
    """Ids of prompts by their places, and why the others have none."""

    ids: dict[int, tuple[int, ...]]
    errors: dict[int, str]


class _Prompts:
    """Makes ids of prompts for one model."""

    def __init__(
        self, resident: Resident, client: ClientInfo, is_connected: Callable[[], bool]
    ) -> None:
        self._resident, self._client = resident, client
        self._is_connected = is_connected

    def read(
        self, prompts: tuple[Prompt, ...], maximum: int, check: Check
    ) -> _ReadPrompts:
        """The ids of each that can be read, of at most so many tokens."""
        found = _ReadPrompts({}, {})
        for place, prompt in enumerate(prompts):
            check()
            try:
                ids = self._ids(prompt)
                self._require(ids, maximum)
                found.ids[place] = ids
            except RequestCancelled:
                raise
            except SidecarError as error:
                found.errors[place] = error.message
        return found

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, ChatRequest):
            return self._resident.prepare(prompt, self._is_connected).model.ids
        if not prompt:
            raise BadRequest("the prompt is empty")
        return self._resident.prepare_raw(prompt, self._client)[0].ids

    def _require(self, ids: tuple[int, ...], maximum: int) -> None:
        size = self._resident.engine.model.vocab_size
        if not ids:
            raise BadRequest("the prompt is empty")
        if max(ids) >= size:
            raise BadRequest(f"token ids must be 0..{size - 1}")
        if len(ids) > maximum:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens, and may have {maximum}"
            )


def _encoded(labels: tuple[str, ...], resident: Resident) -> list[list[int]]:
    """Ids of labels, which the model must have a row for."""
    size = resident.engine.model.vocab_size
    found = [resident.engine.encode(label) for label in labels]
    for index, ids in enumerate(found):
        if max(ids, default=0) >= size:
            raise BadRequest(
                f"labels[{index}] has a token beyond 0..{size - 1}", param="labels"
            )
    return found


def _require_few_logits(request: ClassifyRequest, resident: Resident) -> None:
    if not request.with_logits:
        return
    size = resident.engine.model.vocab_size
    most = max(1, _MAX_NUMBERS // size)
    if len(request.prompts) > most:
        raise ValidationFailed(
            f"return_logits must be left out for more than {most} prompts: each has "
            f"{size}",
            param="return_logits",
        )


def _classified(
    token: NextToken, labels: tuple[str, ...], resident: Resident
) -> Classified:
    scores = dict(zip(labels, token.scores, strict=True))
    text = resident.engine.model.tokenizer.decode([token.token_id])
    return Classified(
        token.token_id,
        text,
        max(scores, key=lambda label: scores[label]) if scores else None,
        scores,
        None if token.logits is None else tuple(token.logits.tolist()),
    )
