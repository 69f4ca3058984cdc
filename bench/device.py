"""
The benchmarks on a GPU, with a model of the size that is served there.

    python -m bench --device-model [FOLDER] [--quick] [--out FOLDER]

Makes a random bf16 model of 8.2 B parameters (16.4 GB) where the folder holds none,
then runs overhead, compare and replay on it, each in a process of its own.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.models import is_made

_REPOSITORY = Path(__file__).parents[1]
_QUICK = {
    "overhead": ("--runs", "2", "--short-runs", "6"),
    "compare": ("--runs", "2"),
    "replay": ("--peer-seconds", "15"),
}


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 if one of them failed or missed a bar."""
    options = _parser().parse_args(argv)
    folder: Path = options.device_model
    if not is_made(folder):
        print(f"making {folder}", flush=True)
        _python("bench.models", str(folder), "--large")
    options.out.mkdir(parents=True, exist_ok=True)
    codes = {}
    for name in options.only.split(","):
        more = _QUICK[name] if options.quick else ()
        out = str(options.out / f"{name}.json")
        print(f"\n== {name}", flush=True)
        codes[name] = _python(
            "bench", name, "--model", str(folder), "--json", out, *more
        )
    print("\n" + ", ".join(f"{name}: exit code {code}" for name, code in codes.items()))
    return int(any(codes.values()))


def _python(module: str, *arguments: str) -> int:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=_REPOSITORY, check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=(__doc__ or "").split("\n\n")[0].strip()
    )
    scratch = Path(tempfile.gettempdir()) / "litellm-mlx-bench"
    parser.add_argument(
        "--device-model", type=Path, nargs="?", const=scratch / "device-8b",
        required=True, metavar="FOLDER", help=f"of the model ({scratch}/device-8b)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few runs: minutes")
    parser.add_argument("--only", default=",".join(_QUICK), help="some of them (all)")
    parser.add_argument("--out", type=Path, default=scratch, help="for JSON files")
    return parser
