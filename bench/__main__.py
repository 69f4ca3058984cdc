"""
The benchmarks by name: `python -m bench NAME [options]`.

compare: all servers on equal work; agents: recorded traffic; fairness, overhead: single
figures; replay: recorded sessions by the clock; hostile: good clients beside hostile
ones; loading: a stream while a model is loaded; vision: a talk with screenshots; disk:
prompts brought back from it; writes: talks while KV is written to it; kept: what a turn
costs beside the model; structured: what a schema costs; speculation: what drafts gain;
streams: steps over HTTP against mlx-lm's batch; native: labels, and adapters;
prefill: how fast prompts are read; sampling: what an option costs; gaps: the longest
wait of a stream; page: what open admin pages cost; turns: the first token, turn by
turn; start: from the start of a process to its first answer; adapters: what they cost a
step.
`NAME --help` says more.
`python -m bench --device-model` runs overhead, compare and replay with a model of the
size that a GPU serves.
"""

import importlib
import sys

from bench import device

_NAMES = (
    "compare", "agents", "fairness", "overhead", "replay", "hostile", "loading",
    "vision", "disk", "writes", "start", "kept", "structured", "speculation",
    "streams", "native", "prefill", "sampling", "gaps", "page", "turns",
    "adapters",
)  # fmt: skip

_OF_DEV = ("psutil", "matplotlib")  # what the benchmarks need of the extra `dev`
_INSTALL = "python3 install_and_run.py test --version   installs what tests need"


def main(argv: list[str] | None = None) -> int:
    """Exit code of the benchmark; 2: no such name."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0].startswith("--device-model"):
        return device.main(argv)
    if not argv or argv[0] not in _NAMES:
        sys.stderr.write(f"usage: python -m bench {{{','.join(_NAMES)}}} [options]\n")
        return 2
    try:
        code: int = importlib.import_module(f"bench.{argv[0]}").main(argv[1:])
    except ModuleNotFoundError as error:
        if error.name not in _OF_DEV:
            raise
        sys.stderr.write(f"bench: {error.name} is missing. Fix: {_INSTALL}\n")
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
