"""
Trains a LoRA adapter beside requests: mlx-lm's layers, batches and loss, step by step.

What is trained is a twin of the network: its modules are copies, its weights the very
arrays that serve. So nothing of a half-trained adapter is ever read by a request.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.tuner.datasets import create_dataset
from mlx_lm.tuner.trainer import default_loss, iterate_batches
from mlx_lm.tuner.utils import linear_to_lora_layers

from sidecar.core.errors import BadRequest, GenerationFailed
from sidecar.core.native import LoraJob
from sidecar.engine.adapters.adapter_files import CONFIG, WEIGHTS
from sidecar.engine.adapters.banked_linear import BankedLinear
from sidecar.engine.loading.loaded_model import LoadedModel

Example = tuple[list[int], int]  # ids, and from which of them on the loss counts
Weights = Mapping[str, mx.array]


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """
    One update of the weights.

    Args:
        num_tokens: that its loss is the mean of. seconds: it took.
    """

    number: int
    loss: float
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _BatchGradient:
    """The gradient of a batch, its loss, and what these took."""

    gradient: Any
    loss: float
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Settings:
    """What mlx-lm's `create_dataset` reads."""

    mask_prompt: bool


def read_examples(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    job: LoraJob,
    check: Callable[[], None],
) -> list[Example]:
    """
    Rows as mlx-lm's trainer takes them: `text`, `prompt` and `completion`, `messages`.

    Args:
        check: raises if it is to end before its end; called at each row.
    Raises:
        BadRequest: a row is none of these, or too few are left.
    """
    try:
        found = create_dataset(list(rows), tokenizer, _Settings(job.mask_prompt))
    except ValueError:
        found = None
    if found is None and job.mask_prompt:
        raise BadRequest(
            "mask_prompt must be left out for rows of text: they have no prompt",
            param="mask_prompt",
        )
    if found is None:
        raise BadRequest(
            "data must have text, prompt and completion, or messages in each row",
            param="data",
        )
    examples: list[Example] = []
    for index, row in enumerate(rows):
        check()
        _require_texts(row, f"data[{index}]")
        try:
            ids, start = found.process(row)
        except Exception as error:  # noqa: BLE001 - templates raise what they like
            raise BadRequest(
                f"data[{index}] cannot be read: {str(error)[:200]}",
                param=f"data[{index}]",
            ) from None
        if start >= min(len(ids), job.max_seq_length):
            raise BadRequest(
                f"data[{index}] has no answer within max_seq_length", param="data"
            )
        examples.append((list(ids)[: job.max_seq_length], start))
    if len(examples) < job.batch_size:
        raise BadRequest(
            f"data must have batch_size ({job.batch_size}) rows at least", param="data"
        )
    return examples


def _require_texts(row: Mapping[str, Any], path: str) -> None:
    for name in ("text", "prompt", "completion"):
        value = row.get(name)
        if value is not None and not (isinstance(value, str) and value):
            where = f"{path}.{name}"
            raise BadRequest(f"{where} must be a text that is not empty", param=where)


class LoraTraining:
    """
    One training. GPU thread only, but for its making.

    Args:
        turn_tokens: that are computed in one turn, as whole rows; one row at least.
    """

    def __init__(
        self, model: LoadedModel, job: LoraJob, turn_tokens: int = 2048
    ) -> None:
        self._model, self._job, self._turn_tokens = model, job, turn_tokens

    def steps(
        self,
        examples: Sequence[Example],
        report: Callable[[TrainingStep], None],
        check: Callable[[], None],
    ) -> Generator[None, None, Weights]:
        """
        Train; the weights of the adapter. Requests go on at each yield.

        Args:
            report: takes each step. check: raises if it is to end before its end.
        """
        check()
        network = self._begin()
        yield
        job = self._job
        optimizer = optimizers.AdamW(
            job.learning_rate, weight_decay=job.weight_decay, bias_correction=True
        )
        batches = iterate_batches(
            examples, job.batch_size, job.max_seq_length, loop=True, seed=job.seed
        )
        summed: Any = None
        for number in range(1, job.iters + 1):
            found = yield from self._gradient(network, next(batches), check)
            check()
            started = time.perf_counter()
            summed = _added(summed, found.gradient)
            if number % job.grad_accumulation == 0 or number == job.iters:
                count = (number - 1) % job.grad_accumulation + 1
                optimizer.update(network, _scaled(summed, 1 / count))
                summed = None
            mx.eval(network.trainable_parameters(), optimizer.state, summed)
            if not math.isfinite(found.loss):
                raise GenerationFailed(f"the loss is no number at step {number}")
            seconds = found.seconds + time.perf_counter() - started
            report(TrainingStep(number, found.loss, found.num_tokens, seconds))
            yield
        return dict(tree_flatten(network.trainable_parameters()))

    def _gradient(
        self, network: Any, batch: tuple[mx.array, mx.array], check: Callable[[], None]
    ) -> Generator[None, None, _BatchGradient]:
        """Of a whole batch, its parts weighed by their tokens; a turn for each part."""
        loss_and_grad = nn.value_and_grad(network, default_loss)
        num_all, loss, seconds = _num_counted(*batch), 0.0, 0.0
        gradient: Any = None
        for part in self._parts(*batch):
            check()
            started = time.perf_counter()
            (own_loss, num_tokens), own = loss_and_grad(network, *part)
            share = num_tokens / num_all
            gradient = _added(gradient, _scaled(own, share))
            own_loss = own_loss * share
            mx.eval(gradient, own_loss)
            loss += own_loss.item()
            seconds += time.perf_counter() - started
            yield
        return _BatchGradient(gradient, loss, num_all, seconds)

    def _parts(
        self, batch: mx.array, lengths: mx.array
    ) -> Iterator[tuple[mx.array, mx.array]]:
        """A batch's rows, as many at once as a turn may take."""
        num_rows, width = batch.shape
        most = max(1, self._turn_tokens // width)
        for start in range(0, num_rows, most):
            yield batch[start : start + most], lengths[start : start + most]

    def _begin(self) -> Any:
        """The network that is trained; it begins by saying what the base says."""
        job, network = self._job, twin(self._model.model)
        mx.random.seed(job.seed)
        network.freeze()
        count = len(network.layers) if job.num_layers < 0 else job.num_layers
        linear_to_lora_layers(network, count, job.lora_parameters)
        names = [name for name, _ in tree_flatten(network.trainable_parameters())]
        for key in job.keys:
            if not any(f".{name}".endswith(f".{key}.lora_a") for name in names):
                raise BadRequest(
                    f"keys must name projections of this model, {key[:100]!r} is none",
                    param="keys",
                )
        network.update(_begun(network, job))
        if job.grad_checkpoint:
            for layer in network.layers:
                _recompute_for_gradients(layer)
        network.train()
        mx.eval(network.trainable_parameters())
        return network


def _added(summed: Any, gradient: Any) -> Any:
    return gradient if summed is None else tree_map(mx.add, summed, gradient)


def _scaled(gradient: Any, factor: float | mx.array) -> Any:
    return tree_map(lambda one: one * factor, gradient)


def _num_counted(batch: mx.array, lengths: mx.array) -> int:
    """Tokens of a batch that its loss is the mean of, as mlx-lm counts them."""
    steps = mx.arange(1, batch.shape[1])
    counted = mx.logical_and(steps >= lengths[:, 0:1], steps <= lengths[:, 1:])
    return int(np.array(counted).sum())


def _begun(network: Any, job: LoraJob) -> Any:
    """A drawn, B zero."""
    dtype = mx.bfloat16 if job.dtype == "bfloat16" else mx.float32

    def drawn(name: str, array: mx.array) -> mx.array:
        if name.endswith("lora_b"):
            return mx.zeros(array.shape, dtype)
        if job.init == "uniform":
            return array.astype(dtype)
        spread = math.sqrt(2 / array.shape[0])
        return (mx.random.normal(array.shape) * spread).astype(dtype)

    return tree_map_with_path(drawn, network.trainable_parameters())


def _recompute_for_gradients(layer: Any) -> None:
    """
    Have a layer keep no activations: they are computed anew for its gradient.

    mlx-lm's own function changes the layer's class, which those that serve have too.
    """
    kind: Any = type(layer)

    class Checkpointed(kind):  # type: ignore[misc]
        def __call__(self, *arguments: Any, **named: Any) -> Any:
            def run(parameters: Any, *arguments: Any, **named: Any) -> Any:
                self.update(parameters)
                return kind.__call__(self, *arguments, **named)

            own = self.trainable_parameters()
            return mx.checkpoint(run)(own, *arguments, **named)

    layer.__class__ = Checkpointed


def twin(module: Any, known: dict[int, Any] | None = None) -> Any:
    """Copies of a network's modules that share its arrays; adapters are left out."""
    known = {} if known is None else known
    if isinstance(module, BankedLinear):
        return twin(module.linear, known)
    if id(module) in known:
        return known[id(module)]
    copied = copy.copy(module)
    known[id(module)] = copied
    copied._no_grad = set(module._no_grad)
    for name, value in module.items():
        dict.__setitem__(copied, name, _twin_of(value, known))
    return copied


def _twin_of(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        return twin(value, known)
    if isinstance(value, list | tuple):
        return type(value)(_twin_of(one, known) for one in value)
    if isinstance(value, dict):
        return {name: _twin_of(one, known) for name, one in value.items()}
    return value


def write_adapter(
    folder: Path, weights: Weights, model: LoadedModel, job: LoraJob
) -> None:
    """Write an adapter as mlx-lm's trainer does; GPU thread only."""
    own = len(model.model.layers)
    num_layers = own if job.num_layers < 0 else min(job.num_layers, own)
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / WEIGHTS), dict(weights))
    config = {
        "fine_tune_type": "lora",
        "model": model.name,
        "num_layers": num_layers,
        "lora_parameters": job.lora_parameters,
        "iters": job.iters,
        "learning_rate": job.learning_rate,
        "batch_size": job.batch_size,
        "seed": job.seed,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
