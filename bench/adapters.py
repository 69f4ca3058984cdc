"""
What adapters cost a decode step, without a server.

    python -m bench adapters [--model FOLDER] [--rounds 60]

Eight rows decode with the base, and with five adapters of rank 8 and the base mixed,
five steps of each in turns, in one process: medians, and the share of the base's rate.
The turns are short: hosts change their speed from second to second.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from bench.models import is_made, make
from bench.options import positive
from sidecar.engine.adapters.adapter_files import AdapterFiles
from sidecar.engine.adapters.banked_linear import Pair
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import load
from sidecar.engine.loading.model_source import find_model

_RANK, _NUM_ADAPTERS, _NUM_ROWS, _NUM_PROMPT, _NUM_STEPS = 8, 5, 8, 200, 5
_ADAPTED = ("self_attn.q_proj", "self_attn.v_proj")


def main(argv: list[str]) -> int:
    """Exit code 0; the figures go to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m bench adapters", description=__doc__
    )
    parser.add_argument("--model", type=Path, help="else a random one of 52 M")
    parser.add_argument("--rounds", type=positive, default=60)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = options.model or Path(scratch) / "model"
        if not is_made(folder):
            make(folder)
        model = load(find_model(str(folder.resolve())), trust=False)
        rows = [_load_adapter(model) for _ in range(_NUM_ADAPTERS)]
        base = _Rows(model, ())
        mixed = _Rows(model, [*rows, *[0] * (_NUM_ROWS - len(rows))])
        found = [
            (base.step_s(_NUM_STEPS), mixed.step_s(_NUM_STEPS))
            for _ in range(options.rounds + 1)
        ][1:]  # the first one compiles
    alone, together = (1000 * statistics.median(s) for s in zip(*found, strict=True))
    share = statistics.median(one / other for one, other in found)
    sys.stdout.write(
        f"{_NUM_ROWS} rows: {alone:.2f} ms a step with the base, {together:.2f} with "
        f"{_NUM_ADAPTERS} adapters and the base, {share:.3f} of its rate\n"
    )
    return 0


def _load_adapter(model: LoadedModel) -> int:
    """A random one of the query and value projections of all layers; its row."""
    pairs: dict[str, Pair] = {}
    for path, module in model.model.named_modules():
        if path.endswith(_ADAPTED):
            outputs, inputs = module.weight.shape
            a = 0.02 * mx.random.normal((inputs, _RANK))
            pairs[path] = (a, 0.02 * mx.random.normal((_RANK, outputs)))
    mx.eval(pairs)
    files = AdapterFiles("random", Path(), "", _RANK, 1.0, "", 0)
    return model.adapters.load(model.model, files, pairs)


class _Rows:
    """Rows that decode side by side, each behind a random prompt."""

    def __init__(self, model: LoadedModel, adapters: Sequence[int]) -> None:
        self._model, self._adapters = model, adapters
        self._cache = model.new_cache()
        prompts = mx.random.randint(5, 900, (_NUM_ROWS, _NUM_PROMPT))
        self._last = self._next(prompts)

    def step_s(self, num_steps: int) -> float:
        """Seconds of the median step; the next one is described while it runs."""
        times = []
        for _ in range(num_steps):
            began = time.perf_counter()
            following = self._next(self._last)
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            mx.eval(self._last)
            self._last = following
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def _next(self, ids: mx.array) -> mx.array:
        logits = self._model.forward(ids, self._cache, None, self._adapters)
        return mx.argmax(logits[:, -1:], axis=-1)
