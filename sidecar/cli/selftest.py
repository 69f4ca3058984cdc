"""
Tries on a model whether reuse changes what it says, and how its answers are cut.

    mlx-sidecar selftest mlx-community/Qwen3-0.6B-4bit
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sidecar.app import prepare_device
from sidecar.config.settings import Config, load_config
from sidecar.config.sources import ConfigError
from sidecar.config.values import BUILTIN
from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import kv_quantization, load
from sidecar.engine.loading.model_place import BUILTIN_NAME, ModelSource
from sidecar.engine.loading.model_source import find_model
from sidecar.engine.selftest.self_test import PathResult, run_selftest
from sidecar.infra.logs import setup_logging
from sidecar.output.splitter_check import splitter_faults
from sidecar.output.syntax_settings import SyntaxSettings

_LEGEND = """moved: KV and states out of the store, against those chunks computed anew.
computed: logits of the same forced tokens after that (batch: and the KV they leave).
noise: two honest computations of this model on this device, in other chunks."""
_BUILTIN = (*BUILTIN, BUILTIN_NAME)


def main(argv: list[str]) -> int:
    """Exit codes: 0 all paths good, 1 one failed or no such model, 2 bad usage."""
    options = _parser().parse_args(argv)
    try:
        config = load_config({}, Path(".env"))
    except ConfigError as error:
        sys.stderr.write(f"selftest: {error}\n")
        return 2
    setup_logging("ERROR", {})
    path = config.model.path if options.model is None else options.model
    try:
        source = find_model(None if path in _BUILTIN else path)
        model, results = gpu_thread().call(lambda: _load_and_test(source, config))
    except ModelLoadFailed as error:
        sys.stderr.write(f"selftest: {error}\n")
        return 1
    faults = splitter_faults(model.syntax)
    sys.stdout.write(_table(model.name, results) + _of_splitter(faults))
    return 1 if faults or any(r.outcome == "failed" for r in results) else 0


def _load_and_test(
    source: ModelSource, config: Config
) -> tuple[LoadedModel, list[PathResult]]:
    prepare_device(config)
    model = load(
        source,
        SyntaxSettings(config.model.family),
        trust=config.model.trust_remote_code,
        quantization=kv_quantization(config.cache),
    )
    return model, run_selftest(model)


def _table(name: str, results: list[PathResult]) -> str:
    lines = [f"{name}: reused against computed anew, relative to the spread", ""]
    head = ("path", "outcome", "moved", "computed", "allowed", "noise")
    lines.append(_line(head))
    for result in results:
        found = result.difference
        noise = "-" if found.noise is None else f"{found.noise:.1e}"
        numbers = (f"{n:.1e}" for n in (found.moved, found.computed, found.limit))
        lines.append(_line((result.name, result.outcome, *numbers, noise)))
    outcomes = Counter(result.outcome for result in results)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    return "\n".join([*lines, "", counts, "", _LEGEND, ""])


def _of_splitter(faults: Sequence[str]) -> str:
    if not faults:
        return "splitter of thinking, text and calls: ok\n"
    return "".join(f"splitter FAILED: {fault}\n" for fault in faults)


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:<14}{cells[1]:<10}" + "".join(f"{c:>12}" for c in cells[2:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar selftest",
        description="Tries on a model whether reuse changes what it says, and whether "
        "its answers are cut rightly. A path of reuse that fails is switched off when "
        "this model is served.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder, hub id or `built-in` (MODEL_PATH)",
    )
    return parser
