"""A model's folder -> a loaded model, its weights evaluated and its syntax known."""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer

from sidecar.config.settings import CacheConfig
from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.loading.absent_fields import absent_fields
from sidecar.engine.loading.checkpoint_files import (
    brought_code,
    context_len,
    read_object,
    stamp,
)
from sidecar.engine.loading.fallback_template import give_template
from sidecar.engine.loading.generation_config import read_generation_config
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.model_place import ModelSource
from sidecar.engine.loading.printed_stops import printed_stops
from sidecar.engine.loading.reachable_arrays import evaluate_in_slices
from sidecar.engine.loading.weights import weights_nbytes
from sidecar.engine.vision.vision_encoder import (
    FeatureMemo,
    SeeingModel,
    open_vision_encoder,
    read_seeing,
)
from sidecar.kv.quantization import KVQuantization
from sidecar.output.families import AS_FOUND, find_family, output_syntax
from sidecar.output.syntax_settings import SyntaxSettings
from sidecar.output.tool_syntax import opener_ids

logger = logging.getLogger(__name__)

T = TypeVar("T")

_UNKNOWN_CONTEXT = 1 << 20
_MAX_REASON = 300  # characters
BLIND_HERE = "this model takes text only here"


def kv_quantization(config: CacheConfig) -> KVQuantization | None:
    """How KV_BITS and its companions want KV quantised."""
    if config.kv_bits == "OFF":
        return None
    return KVQuantization(
        int(config.kv_bits), int(config.kv_group_size), config.quantized_kv_start
    )


def load(
    source: ModelSource,
    settings: SyntaxSettings = AS_FOUND,
    *,
    trust: bool,
    quantization: KVQuantization | None = None,
) -> LoadedModel:
    """
    Load a text model, all of it on this thread: the GPU thread.

    Raises:
        ModelLoadFailed: with the reason.
    """
    reading = read_model(source, settings, trust=trust)
    return run_to_end(finish(run_to_end(reading), quantization))


def read_model(
    source: ModelSource,
    settings: SyntaxSettings = AS_FOUND,
    *,
    trust: bool,
    memo: FeatureMemo | None = None,
    tell: Callable[[int], None] = lambda num_bytes: None,
) -> Generator[None, None, LoadedModel]:
    """
    Read a text model: on any thread of MLX's, a slice of its weights between yields.

    Args:
        source: from `find_model`, which has checked its files.
        settings: what is set of its output.
        trust: let the model's folder bring code of its own.
        memo: for what its vision tower gives; None: it is read for text alone.
        tell: takes how many bytes of its weights are there.
    Returns:
        The model, of which nothing was computed: `finish` it.
    Raises:
        ModelLoadFailed: with the reason.
    """
    started, folder = time.monotonic(), source.folder
    with _load_errors(source):
        before = stamp(folder)
        model, config = _weights(folder, trust=trust, sees=memo is not None)
        # Weights are made at random before they are read. Nobody computes those, and
        # each hangs on the one before by the generator's state: 32 KB a load, for good.
        mx.eval(mx.random.state)
        yield
        for num_bytes in evaluate_in_slices(model):
            tell(num_bytes)
            yield
        tokenizer = load_tokenizer(
            folder,
            tokenizer_config_extra={"trust_remote_code": trust},
            eos_token_ids=config.get("eos_token_id"),
        )
        described = _describe(source, (model, tokenizer), config, settings)
        loaded = _with_vision(described, config, memo, trust=trust)
        if stamp(folder) != before:  # else other weights' KV would go by its name
            raise ValueError("its files changed while they were read")
    seconds, message = (
        time.monotonic() - started,
        "loaded model=%s bytes=%d seconds=%.1f",
    )
    logger.info(message, source.name, loaded.num_bytes, seconds)
    return loaded


def finish(
    loaded: LoadedModel, quantization: KVQuantization | None
) -> Generator[None, None, LoadedModel]:
    """
    Compute with a model for the first time: in turns on the GPU thread.

    Args:
        quantization: of its KV; tried here, since not all models can.
    Raises:
        ModelLoadFailed: with the reason.
    """
    with _load_errors(ModelSource(loaded.name, loaded.folder)):
        vocab_size = _first_step(loaded.model, sorted(loaded.stop_ids))
        loaded = replace(loaded, vocab_size=vocab_size)
        _tell_of_ids_without_rows(loaded)
        if quantization:
            yield
            _try_quantized(loaded.model, quantization)
            key = f"{loaded.key} {quantization.bits} {quantization.group_size}"
            loaded = replace(loaded, key=key, quantization=quantization)
    return loaded


def run_to_end(steps: Generator[None, None, T]) -> T:
    """What a load in steps returns, without a pause between them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value


@contextlib.contextmanager
def _load_errors(source: ModelSource) -> Iterator[None]:
    """Whatever a library says, in one sentence, without a path of this machine."""
    try:
        yield
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # libraries end the program, or panic in Rust
        reason = _reason(error).replace(str(source.folder), source.name)
        message = f"model {source.name} cannot be loaded: {reason}"
        raise ModelLoadFailed(message) from error


def _reason(error: BaseException) -> str:
    """The first line of what a library says; a bare KeyError says nothing alone."""
    lines = [line for line in map(str.strip, str(error).splitlines()) if line] or [""]
    if lines[0].endswith(":") and len(lines) > 1:  # what it is of stands below
        lines[0] = f"{lines[0]} {lines[1].rstrip(',')}"
    if isinstance(error, (ValueError, OSError)) and lines[0]:
        return lines[0][:_MAX_REASON]
    return f"{type(error).__name__} {lines[0]}"[:_MAX_REASON]


def _tell_of_ids_without_rows(model: LoadedModel) -> None:
    highest = max(model.tokenizer.get_vocab().values(), default=0)
    if highest >= model.vocab_size:
        logger.warning(
            "model %s: its tokenizer has ids up to %d and its weights have rows for "
            "%d: prompts with one beyond are refused",
            model.name,
            highest,
            model.vocab_size,
        )


def _try_quantized(model: Any, quantization: KVQuantization) -> None:
    """A window that rotates, an odd head width or another attention cannot do it."""
    cache = make_prompt_cache(model)
    try:
        model(mx.array([[0] * 8]), cache=cache)
        replace(quantization, start=0).apply(cache)
        for length in (8, 1):
            mx.eval(model(mx.array([[0] * length]), cache=cache))
        if not any(isinstance(layer, QuantizedKVCache) for layer in cache):
            raise TypeError("no layer has keys and values that can be")
    except Exception as error:
        bits, group = quantization.bits, quantization.group_size
        raise ValueError(
            f"its KV cannot be quantised with KV_BITS={bits}, KV_GROUP_SIZE={group}: "
            f"{error}"
        ) from error


def _weights(folder: Path, *, trust: bool, sees: bool) -> tuple[Any, dict[str, Any]]:
    """The model and its config; nothing is computed yet."""
    if sees and (trust or not brought_code(folder)):
        try:
            return read_seeing(folder)
        except BaseException as error:  # noqa: BLE001 - mlx-lm may take it
            logger.warning("read without its vision tower: %s", _reason(error))
    written = read_object(folder, "config.json") or {}
    model, config = load_model(
        folder,
        lazy=True,
        trust_remote_code=trust,
        model_config=absent_fields(folder, written),
    )
    return model, config


def _with_vision(
    loaded: LoadedModel,
    config: dict[str, Any],
    memo: FeatureMemo | None,
    *,
    trust: bool,
) -> LoadedModel:
    """Its image processor; without one it serves text alone."""
    if memo is None:
        return loaded
    if not isinstance(loaded.model, SeeingModel):
        file = None if trust else brought_code(loaded.folder)
        why = "mlx-vlm does not take it"
        if file:
            why = f"its {file} brings code of its own, TRUST_REMOTE_CODE=true runs it"
        return replace(loaded, no_vision_reason=f"{BLIND_HERE}: {why}")
    # What mlx-vlm computes is not to the bit what mlx-lm does.
    loaded = replace(loaded, key=f"{loaded.key} seeing")
    try:
        vision_encoder = open_vision_encoder(
            loaded.model, loaded.folder, config, loaded.tokenizer, memo, trust=trust
        )
    except BaseException as error:  # noqa: BLE001 - whatever it likes
        reason = _reason(error).replace(str(loaded.folder), loaded.name)
        why = f"{BLIND_HERE}: {reason}"
        logger.warning("model %s: %s", loaded.name, why)
        return replace(loaded, no_vision_reason=why)
    return replace(loaded, vision_encoder=vision_encoder)


def _describe(
    source: ModelSource,
    parts: tuple[Any, Any],
    config: dict[str, Any],
    settings: SyntaxSettings,
) -> LoadedModel:
    model, tokenizer = parts
    name, folder = source.name, source.folder
    give_template(tokenizer)
    family = find_family(settings.family, name, str(config.get("model_type", "")))
    vocab = tokenizer.get_vocab()
    for token in family.stop_tokens:
        if token in vocab:  # the pipeline, too, must know what ends a turn
            tokenizer.add_eos_token(str(vocab[token]))
    stop_ids = set(tokenizer.eos_token_ids)
    think = (tokenizer.think_start, tokenizer.think_end)
    syntax = output_syntax(
        family,
        think if tokenizer.has_thinking else None,
        _library(tokenizer),
        str(tokenizer.chat_template or ""),
        vocab,
        settings,
    )
    return LoadedModel(
        name=name,
        folder=folder,
        key=f"{folder.resolve()} {_stamp(folder)} {_template_digest(tokenizer)}",
        model=model,
        tokenizer=tokenizer,
        syntax=replace(syntax, opener_ids=opener_ids(syntax.calls, vocab)),
        context_len=context_len(config) or _UNKNOWN_CONTEXT,
        vocab_size=0,
        stop_ids=frozenset(stop_ids),
        generation_config=read_generation_config(folder),
        num_bytes=weights_nbytes(model),
        printed_stops=printed_stops(tokenizer, stop_ids),
    )


def is_as_loaded(model: LoadedModel) -> bool:
    """Whether its folder's files are those that it was read from."""
    return f" {_stamp(model.folder)} " in model.key


def _stamp(folder: Path) -> str:
    """Other weights have other KV."""
    return hashlib.sha256(repr(stamp(folder)).encode()).hexdigest()[:16]


def _template_digest(tokenizer: Any) -> str:
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]


def _library(tokenizer: Any) -> tuple[str, str, Callable[..., Any]] | None:
    if not tokenizer.has_tool_calling:
        return None
    return tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser


def _first_step(model: Any, stop_ids: list[int]) -> int:
    """
    Compute a single step; the logits' width.

    No more than that: a model that has been measured here before answers next, and
    waits for no kernels that its prompt may not need.
    """
    token = stop_ids[0] if stop_ids else 0
    logits = model(mx.array([[token]]), cache=make_prompt_cache(model))
    mx.eval(logits)
    return int(logits.shape[-1])
