"""
Trains a LoRA adapter on a file of rows, and draws its loss.

    mlx-sidecar train rows.jsonl adapters/NAME --model FOLDER --iters 300

A row is a JSON object with `text`, with `prompt` and `completion`, or with `messages`.
The folder is one that ADAPTER_DIR can hold; its loss is drawn in `loss.png`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidecar.config.sources import ConfigError
from sidecar.core.errors import RequestCancelled, SidecarError
from sidecar.core.native import LoraJob
from sidecar.infra.logs import setup_logging

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_FLAGS: dict[str, type] = {
    "rank": int, "alpha": float, "num_layers": int, "learning_rate": float,
    "weight_decay": float, "batch_size": int, "iters": int, "max_seq_length": int,
    "grad_accumulation": int, "seed": int, "init": str, "dtype": str,
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Exit codes: 0 trained, 1 it failed, 2 bad usage, 130 broken off."""
    options = _parser().parse_args(argv)
    setup_logging("WARNING", {})
    try:
        rows = _read_rows(options.rows)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"train: {options.rows}: {error}\n")
        return 2
    try:
        found = _train(options, rows)
    except (KeyboardInterrupt, RequestCancelled):
        sys.stderr.write("\ntrain: broken off, nothing is kept\n")
        return 130
    except (SidecarError, ConfigError) as error:
        sys.stderr.write(f"\ntrain: {error}\n")
        return 1
    losses = [loss for _, loss in found["losses"]]
    sys.stdout.write(f"\nloss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}\n")
    if _draw(losses, options.out / "loss.png"):
        sys.stdout.write(f"{options.out / 'loss.png'}\n")
    sys.stdout.write(f"{options.out}: serve it with ADAPTER_DIR={options.out.parent}\n")
    return 0


def _read_rows(file: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is no object")
        rows.append(row)
    return rows


def _train(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    from sidecar.library import open_model

    out: Path = options.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    fields = {n: v for n in _FLAGS if (v := getattr(options, n)) is not None}
    fields |= {"mask_prompt": options.mask_prompt}
    fields |= {"grad_checkpoint": options.grad_checkpoint}
    if options.keys:
        fields["keys"] = options.keys
    with open_model(options.model, {"ADAPTER_DIR": str(out.parent)}) as model:
        return model.train_lora(rows, out.name, _show, **fields)


def _show(found: dict[str, Any]) -> None:
    """One line that is written over."""
    if found["loss"] is None:
        return
    done, iters = found["step"], found["iters"]
    filled = round(20 * done / iters)
    left_s = found["seconds_left"]
    left = "" if left_s is None else f" {left_s:.0f} s left"
    bar = "#" * filled + "." * (20 - filled)
    line = f"{bar} {done}/{iters} loss {found['loss']:.3f}{left}"
    sys.stdout.write(f"\r{line:<78}")
    sys.stdout.flush()


def sparkline(losses: Sequence[float]) -> str:
    """Numbers as a row of bars, at most 60: the means of equal parts."""
    count = min(_WIDTH, len(losses))
    cuts = [round(len(losses) * n / count) for n in range(count + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    low, high = min(means), max(means)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((mean - low) / step)] for mean in means)


def _draw(losses: Sequence[float], file: Path) -> bool:
    """A picture of the losses; whether there is a library for it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    figure.savefig(file)
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", type=Path, help="a file of JSON lines")
    parser.add_argument("out", type=Path, help="the adapter's folder, not there yet")
    parser.add_argument("--model", help="a folder or a name of the hub (built in)")
    job = LoraJob()
    for name, kind in _FLAGS.items():
        flag, default = f"--{name.replace('_', '-')}", getattr(job, name)
        parser.add_argument(flag, type=kind, metavar="N", help=f"({default})")
    parser.add_argument("--keys", nargs="+", help=f"({' '.join(job.keys)})")
    for name in ("mask-prompt", "grad-checkpoint"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser
