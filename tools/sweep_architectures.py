"""
Holds warm against cold on a tiny random model of each architecture there is.

    python -m tools.sweep_architectures [--json FILE] [NAME ...]

Text architectures are mlx-lm's, those that see are mlx-vlm's (`NAME` or `vision:NAME`).
Each runs in a process of its own, so that a crash or a hang is one line of the table.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.tiny_seeing import seeing_architectures

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120.0
_STAGE = "stage "
_RESULT = "result "
_MAX_REASON = 240
_MUCH_NOISE = 1e-3  # fp32 rounding makes 1e-6


@dataclass
class Tried:
    """
    How an architecture went.

    Args:
        outcome: made, or why there is no more to tell: "not made" (the tool cannot),
            "refused" (the loader said why), "crashed" (anything else).
        layers: how many cache layers of each kind. eyes: whether it takes images.
        passed, failed: names of ways; of the failed ones with the reason.
        noise: how far two honest computations in other chunks were apart.
    """

    architecture: str
    kind: str
    outcome: str = "crashed"
    reason: str = ""
    layers: dict[str, int] = field(default_factory=dict)
    vision_encoder: bool | None = None
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    noise: float = 0.0
    trace: str = ""


class Faults(logging.Handler):
    """Keeps what the project logs as going wrong, for the reason of a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line, or the end of a traceback."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = short(record.exc_info[1])
        self.told.append(text)

    def take(self) -> str:
        """All lines since the last time; the first says why, the last one only that."""
        told, self.told = self.told, []
        return "; ".join(told[:-1] or told)


def short(error: BaseException) -> str:
    """An error and the innermost places of its traceback, in one line."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    places = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
    first = (str(error).strip().splitlines() or [""])[0][:_MAX_REASON]
    return f"{type(error).__name__}: {first} [{' > '.join(places)}]"


def text_architectures() -> list[str]:
    """Modules of mlx-lm that define a model; told from their source, none is run."""
    import mlx_lm.models as library

    files = sorted(Path(library.__path__[0]).glob("*.py"))
    return [file.stem for file in files if "class ModelArgs(" in file.read_text()]


def try_one(architecture: str, kind: str) -> Tried:
    """Make, load, generate, test one; in this process."""
    tried, faults = Tried(architecture, kind), Faults()
    logging.getLogger("sidecar").addHandler(faults)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, architecture)
        try:
            tell("making a checkpoint")
            make(folder, architecture, kind)
        except BaseException as error:  # noqa: BLE001 - some modules end the process
            tried.outcome, tried.reason = "not made", short(error)
            return tried
        try:
            _load_and_test(folder, tried, faults)
            tried.outcome = "made"
        except Exception as error:  # noqa: BLE001 - any is a line of the table
            is_told = type(error).__name__ == "ModelLoadFailed"
            tried.outcome = "refused" if is_told else "crashed"
            tried.reason = str(error) if is_told else short(error)
            tried.trace = "".join(traceback.format_exception(error))
    return tried


def make(folder: Path, architecture: str, kind: str) -> None:
    """Write a tiny checkpoint."""
    from tools.tiny_checkpoints import make_seeing, make_text

    (make_text if kind == "text" else make_seeing)(folder, architecture)


def _load_and_test(folder: Path, tried: Tried, faults: Faults) -> None:
    from sidecar.engine.loading.loader import finish, read_model, run_to_end
    from sidecar.engine.loading.model_source import find_model
    from sidecar.engine.memory_fit import fit_memory
    from sidecar.engine.selftest.self_test import SelfTest
    from sidecar.engine.vision.vision_encoder import FeatureMemo
    from sidecar.kv import kv_layers

    tell("loading")
    source = find_model(str(folder))
    memo = FeatureMemo(1 << 28) if tried.kind == "vision" else None
    reading = read_model(source, trust=False, memo=memo)
    model = run_to_end(finish(run_to_end(reading), None))
    tried.layers = kv_layers.kinds(model.new_cache())
    if tried.kind == "vision":
        tried.vision_encoder, tried.reason = (
            model.vision_encoder is not None,
            faults.take(),
        )
    tell("generating")
    generate(model)
    tell("measuring its memory")
    run_to_end(fit_memory(model, 256))
    faults.take()
    test = SelfTest(model)
    while test.pending:
        tell(f"testing {test.pending[0]}")
        result = run_to_end(test.advance())
        tried.noise = max(tried.noise, result.difference.noise or 0.0)
        if result.outcome == "ok":
            tried.passed.append(result.name)
        else:
            tried.failed[result.name] = faults.take()


def generate(model: Any, num_tokens: int = 4) -> list[int]:
    """A greedy answer to a few ids; every logit has to be a number."""
    import mlx.core as mx
    import numpy as np

    cache = model.new_cache()
    said: list[int] = []
    ids = mx.array([[(5 * i + 1) % 997 for i in range(24)]])
    for _ in range(num_tokens):
        logits = model.forward(ids, cache)[:, -1]
        if not mx.all(mx.isfinite(logits)).item():
            raise ValueError("logits that are no numbers")
        ids = mx.argmax(logits, axis=-1, keepdims=True)
        said += map(int, np.array(ids).reshape(-1))
    return said


def tell(stage: str) -> None:
    """Say on stdout what comes next, for the parent to know where it ended."""
    print(f"{_STAGE}{stage}", flush=True)


def run_apart(architecture: str, kind: str) -> Tried:
    """Try one in a process of its own."""
    command = [sys.executable, "-m", "tools.sweep_architectures"]
    command += ["--one", f"{kind}:{architecture}"]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip
        output, how = ended.stdout, f"ended with {ended.returncode}"
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        output = raw.decode() if isinstance(raw, bytes) else raw
        how = f"took more than {LIMIT_S:.0f} s"
    stage = "starting"
    for line in output.splitlines():
        if line.startswith(_RESULT):
            return Tried(**json.loads(line.removeprefix(_RESULT)))
        if line.startswith(_STAGE):
            stage = line.removeprefix(_STAGE)
    return Tried(architecture, kind, "crashed", f"{how} while {stage}")


def row(tried: Tried) -> str:
    """A line of the Markdown table."""
    layers = ", ".join(f"{n} {kind}" for kind, n in tried.layers.items())
    failed = "; ".join(f"{name}: {why}" for name, why in grouped(tried.failed))
    note = "" if tried.outcome == "made" else f"{tried.outcome}: "
    if tried.kind == "vision" and tried.outcome == "made":
        note = "sees. " if tried.vision_encoder else "text only: "
    if tried.noise > _MUCH_NOISE:
        note += f"its results hang on the chunks (noise {tried.noise:.1e}). "
    cells = (
        tried.architecture, tried.kind, layers, ", ".join(tried.passed), failed,
        note + tried.reason,
    )  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|").strip() for cell in cells) + " |"


def grouped(failed: dict[str, str]) -> list[tuple[str, str]]:
    """Ways that failed alike, together."""
    by_reason: dict[str, list[str]] = {}
    for name, why in failed.items():
        by_reason.setdefault(why, []).append(name)
    return [(", ".join(names), why) for why, names in by_reason.items()]


def table(all_tried: Sequence[Tried]) -> str:
    """All of it, with the counts behind."""
    made = [t for t in all_tried if t.outcome == "made"]
    counts = {
        "all ways passed": sum(not t.failed for t in made),
        "some ways failed": sum(bool(t.failed) for t in made),
    }
    for outcome in ("refused", "crashed", "not made"):
        counts[outcome] = sum(t.outcome == outcome for t in all_tried)
    head = (
        "architecture", "kind", "cache layers", "passed", "failed", "note",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    lines += map(row, all_tried)
    told = ", ".join(f"{n} {name}" for name, n in counts.items())
    return "\n".join([*lines, "", f"{len(all_tried)} tried: {told}."])


def main() -> int:
    """Try all, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path, help="a line for each is written there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        kind, _, architecture = asked.one.partition(":")
        print(_RESULT + json.dumps(asdict(try_one(architecture, kind))), flush=True)
        return 0
    wanted = [("text", name) for name in text_architectures()]
    wanted += [("vision", name) for name in seeing_architectures()]
    if asked.names:
        chosen = set(asked.names)
        wanted = [w for w in wanted if not chosen.isdisjoint((w[1], ":".join(w)))]
    all_tried = []
    for kind, architecture in wanted:
        tried = run_apart(architecture, kind)
        all_tried.append(tried)
        print(row(tried), file=sys.stderr, flush=True)
        if asked.json:
            text = "".join(json.dumps(asdict(t)) + "\n" for t in all_tried)
            asked.json.write_text(text)
    print(table(all_tried))
    return 0


if __name__ == "__main__":
    sys.exit(main())
