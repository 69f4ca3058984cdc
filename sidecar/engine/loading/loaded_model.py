"""A model in memory, with all that its files say of it."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from sidecar.engine.adapters.adapter_bank import AdapterBank
from sidecar.engine.loading.weights import let_go_measured
from sidecar.engine.step_ahead import Forward, max_rows_described
from sidecar.engine.vision.vision_encoder import VisionEncoder
from sidecar.engine.vision.vision_inputs import VisionInputs
from sidecar.kv.kv_layers import KVLayers
from sidecar.kv.quantization import KVQuantization
from sidecar.output.output_syntax import OutputSyntax


@dataclass(frozen=True)
class LoadedModel:
    """
    One model in memory.

    Args:
        folder: where it was loaded from.
        context_len: most tokens it was made for.
        vocab_size: width of its logits; 0: nothing was computed yet.
        stop_ids: tokens that end a turn.
        generation_config: the model's own defaults, None if it ships none.
        num_bytes: bytes of its weights. key: tells its KV from any other model's.
        quantization: of its KV, None for none.
        printed_stops: what stands for a stop token once another turn follows.
        vision_encoder: None if it takes no images.
        no_vision_reason: why it does not although it was made to; "": it was not.
        adapters: what its rows may be read with besides.
        draft: a small model that drafts its answers (DRAFT_MODEL).
        applied: the name of an adapter that is part of it; "": none is.
        applied_digest: of that adapter's files.
    """

    name: str
    folder: Path
    key: str
    model: Any
    tokenizer: Any
    syntax: OutputSyntax
    context_len: int
    vocab_size: int
    stop_ids: frozenset[int]
    generation_config: dict[str, Any] | None
    num_bytes: int
    quantization: KVQuantization | None = None
    printed_stops: Mapping[int, int] = field(default_factory=dict)
    vision_encoder: VisionEncoder | None = None
    no_vision_reason: str = ""
    adapters: AdapterBank = field(default_factory=AdapterBank)
    draft: "LoadedModel | None" = None
    applied: str = ""
    applied_digest: str = ""

    @property
    def all_bytes(self) -> int:
        """Of its weights, and its draft model's."""
        return self.num_bytes + (self.draft.num_bytes if self.draft else 0)

    @cached_property
    def max_rows_ahead(self) -> float:
        """The most rows of a step that only describes; GPU thread only."""
        if self.quantization is not None:  # its layers take the place of others
            return 0

        def shifted(ids: mx.array, cache: KVLayers) -> mx.array:
            shifts = mx.zeros((len(ids), 1), mx.int32)
            return self.forward(ids, cache, VisionInputs(shifts=shifts))

        passes: list[Forward] = [self.forward]
        if self.vision_encoder is not None:
            passes.append(shifted)
        return min(max_rows_described(one, self.new_cache) for one in passes)

    def new_cache(self) -> KVLayers:
        """Empty caches for one sequence."""
        cache: KVLayers = make_prompt_cache(self.model)
        return cache

    def forward(
        self,
        ids: mx.array,
        cache: KVLayers,
        vision_inputs: VisionInputs | None = None,
        adapters: Sequence[int] = (),
    ) -> mx.array:
        """
        The one call of the model; GPU thread, or the one that describes for it.

        Args:
            ids: (rows, tokens). cache: of as many rows; grows by the tokens.
            vision_inputs: what a model that sees is given besides (`VisionInputs`).
            adapters: the row of the bank that each row is read with; none: no adapter.
        Returns:
            Logits, (rows, tokens, vocabulary); not computed yet.
        """
        extra = {"vision_inputs": vision_inputs} if vision_inputs is not None else {}
        bank = self.adapters.reading(adapters) if any(adapters) else nullcontext()
        with bank:
            logits: mx.array = self.model(ids, cache=cache, **extra)
        return logits

    def release(self) -> int:
        """
        Let the weights go, whoever still holds the model; GPU thread only.

        Returns:
            The bytes that came back, its draft model's included.
        """
        freed = let_go_measured(self.model)
        return freed + (self.draft.release() if self.draft is not None else 0)
