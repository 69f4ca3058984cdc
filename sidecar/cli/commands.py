"""The sub-commands of `python -m sidecar`; a tool is imported when it is called."""

from importlib import import_module
from typing import Any

# name -> module, what it does
TOOLS = {
    "probe": ("probe", "ask a running server like an agent; is enough reused?"),
    "diff-turns": ("diff_turns", "where two prompts of a session log first differ"),
    "inspect-cache": ("inspect_cache", "the tree of a running server, and what drifts"),
    "kv": ("kv", "KV on the disk: list, verify, export, import, forget"),
    "capabilities": ("capabilities", "ask a model of a running server what it can do"),
    "jsonl": ("jsonl", "a model on stdin and stdout: one JSON object a line"),
    "train": ("train", "train a LoRA adapter on rows of a file"),
    "fuse": ("fuse", "an adapter and its base as one model"),
    "selftest": ("selftest", "warm equals cold, tried on a model"),
}


def run_tool(name: str, argv: list[str]) -> int:
    """Exit codes: 0 good, 1 a check failed, 2 bad usage."""
    module: Any = import_module(f"sidecar.cli.{TOOLS[name][0]}")
    code: int = module.main(argv)
    return code


def tools_help() -> str:
    """The tools' lines of `--help`."""
    lines = [f"  {name:<15} {text}" for name, (_, text) in TOOLS.items()]
    return "\n".join(["tools (mlx-sidecar TOOL --help):", *lines])
