"""The sub-commands of `python -m sidecar`; a tool is imported when it is called."""

import sys
from importlib import import_module
from typing import Any

from sidecar.cli.server import ServerError

# name -> module, what it does
TOOLS = {
    "pull": ("pull", "bring a model of the hub into its cache; goes on where it was"),
    "recommend": ("recommend", "which models this machine can serve to an agent"),
    "rm": ("rm", "remove a model from the hub's cache"),
    "probe": ("probe", "ask a running server like an agent; is enough reused?"),
    "bench": ("bench", "how fast a running server reads prompts and writes answers"),
    "diff-turns": ("diff_turns", "where two prompts of a session log first differ"),
    "inspect-cache": ("inspect_cache", "the tree of a running server, and what drifts"),
    "kv": ("kv", "KV on the disk: list, verify, export, import, forget"),
    "capabilities": ("capabilities", "ask a model of a running server what it can do"),
    "doctor": ("doctor", "is anything wrong with the settings and the models?"),
    "jsonl": ("jsonl", "a model on stdin and stdout: one JSON object a line"),
    "train": ("train", "train a LoRA adapter on rows of a file"),
    "fuse": ("fuse", "an adapter and its base as one model"),
    "selftest": ("selftest", "warm equals cold, tried on a model"),
}

_OF_MODELS = {  # all in one file, which is told which
    "list": "models of a running server, loaded or not",
    "ps": "what a running server does now",
    "load": "load a model of a running server",
    "unload": "let a model go",
    "pin": "keep a model loaded",
    "unpin": "let a model leave when room is short",
    "logs": "the last lines of a running server's log",
}
TOOLS |= {name: ("models", text) for name, text in _OF_MODELS.items()}


def run_tool(name: str, argv: list[str]) -> int:
    """Exit codes: 0 good, 1 a check failed, 2 bad usage, 130 Ctrl-C."""
    try:
        module: Any = import_module(f"sidecar.cli.{TOOLS[name][0]}")
        code: int = module.main([name, *argv] if name in _OF_MODELS else argv)
    except ServerError as error:
        sys.stderr.write(f"mlx-sidecar {name}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130
    return code


def tools_help() -> str:
    """The tools' lines of `--help`."""
    apart = [name for name in TOOLS if name not in _OF_MODELS]
    lines = [f"  {name:<15} {TOOLS[name][1]}" for name in apart]
    lines.append(f"  {' '.join(_OF_MODELS)} : of a running server")
    return "\n".join(["tools (mlx-sidecar TOOL --help):", *lines])
