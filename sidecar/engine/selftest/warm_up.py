"""
Every kernel of serving used once at load, on devices that compile them at first use.

On CUDA each kind of gather or scatter takes seconds to compile, in which no stream
moves; compiled kernels are kept on disk, so only the first load of a machine pays.
"""

import logging
import time
import traceback
from collections.abc import Generator
from dataclasses import replace

import mlx.core as mx

from sidecar.config.settings import GenerationConfig
from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.core.requests import SamplingParams
from sidecar.engine.decode_batches import DecodeBatches
from sidecar.engine.job import JobSpec
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.sampling import Sampling, settle
from sidecar.engine.selftest.attention_plans import plan_attention
from sidecar.kv import kv_layers
from sidecar.kv.kv_layers import is_attention_planned, release_freed_memory

logger = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0)
_KINDS = (  # each needs kernels that the others do not
    _GREEDY,
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.05),
    replace(_GREEDY, repetition_penalty=1.1),
    replace(_GREEDY, presence_penalty=0.5),
    replace(_GREEDY, frequency_penalty=0.5),
    replace(_GREEDY, logit_bias=((0, 1.0),)),
)
_NUM_TOP = 5
_NUM_TOKENS = 3


def warm_up(model: LoadedModel) -> Generator[None, None, None]:
    """
    Decode a few tokens in every way, in turns; nothing to do on the CPU.

    On CUDA attention is planned ahead as well.
    """
    if mx.default_device() == mx.cpu:
        return
    started = time.monotonic()
    try:
        yield from decode_in_every_way(model)
        if is_attention_planned():
            yield from plan_attention(model)
    except Exception as error:
        # Some models cannot be batched: the self-test finds that out and keeps to it.
        logger.warning("warm-up ended early model=%s: %s", model.name, error)
        logger.debug("where it ended", exc_info=True)
        traceback.clear_frames(error.__traceback__)
    logger.info("warmed up seconds=%.1f", time.monotonic() - started)


def decode_in_every_way(model: LoadedModel) -> Generator[None, None, int]:
    """Rows with all kinds of sampling, beside each other; how many tokens they said."""
    fitting, num_said = DecodeBatches(model), 0
    ids = ModelIds((0,) * 9)
    own = model.generation_config or {}
    for uid, asked in enumerate(_KINDS):
        sampling: Sampling = settle(asked, GenerationConfig(), own)
        cache = model.new_cache()
        model.forward(mx.array([ids[:-1]]), cache)
        kv_layers.evaluate(cache)
        num_top = _NUM_TOP if uid == 0 else None
        prompt = ModelPrompt(ids)
        spec = JobSpec(prompt, sampling, _NUM_TOKENS, top_logprobs=num_top)
        fitting.join(uid, fitting.begin(uid, spec, cache), len(ids))
        num_said += len(fitting.next())
        yield
    while fitting.has_rows:
        num_said += len(fitting.next())
        yield
    release_freed_memory()
    return num_said
