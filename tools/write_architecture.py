"""
Writes the end of `docs/architecture.md`: a line for each module, its docstring's.

    python -m tools.write_architecture
"""

import ast
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

REPO = Path(__file__).parents[1]
PAGE = REPO / "docs" / "architecture.md"
_ROOMS = {  # in the order in which they may import each other
    "sidecar": "the composition root and the command line",
    "sidecar/cli": "sub-commands; most ask a running server over HTTP",
    "sidecar/server": "sockets, bytes, routes, access; the stdlib's http.server",
    "sidecar/dialects": "wire formats; each knows JSON and core only",
    "sidecar/dialects/openai_chat": "Chat Completions",
    "sidecar/dialects/openai_responses": "Responses",
    "sidecar/dialects/anthropic_messages": "Messages",
    "sidecar/service": "use cases, between a dialect and what does the work",
    "sidecar/service/batches": "requests of files, answered while nobody else asks",
    "sidecar/residents": "loaded models with all their sides, and their pool",
    "sidecar/pipeline": "the dual pipeline: messages to the ids that the model reads",
    "sidecar/pipeline/template": "text and ids by the model's own chat template",
    "sidecar/pipeline/reuse": "what older prompts lend to this one",
    "sidecar/engine": "one text model on the GPU thread: scheduler, batches, memory",
    "sidecar/engine/loading": "models' files: found, downloaded, identified, read",
    "sidecar/engine/selftest": "warm equals cold, proved on the user's machine",
    "sidecar/engine/speculation": "several tokens a step, the same tokens",
    "sidecar/engine/adapters": "LoRA adapters beside one base, a row of a bank each",
    "sidecar/engine/native": "what a model does beside answering: labels, keys, memory",
    "sidecar/engine/vision": "pictures in a model that sees",
    "sidecar/engine/audio": "models that hear and speak",
    "sidecar/memory": "what conversations left, under one lifetime: no arrays",
    "sidecar/images": "images of requests: fetched, decoded, told apart",
    "sidecar/audio": "sound files: read in windows, written as they come",
    "sidecar/kv": "ids to KV: the radix tree and the only surgery on caches",
    "sidecar/kv/disk": "KV that outlives the process: slots, and when they are written",
    "sidecar/volatile": "what changes in a prompt although nothing was said",
    "sidecar/output": "the model's text to reasoning, content and tool calls",
    "sidecar/output/grammars": "what an answer may be, as grammars for llguidance",
    "sidecar/output/calls": "each format of calls, read as it comes",
    "sidecar/infra": "logs, metrics, bounded maps",
    "sidecar/config": "one table of settings, one reader of the environment",
    "sidecar/core": "the nouns that all share; the standard library only",
    "litellm_mlx": "the LiteLLM plugin; it meets the sidecar over HTTP only",
    "litellm_mlx/launcher": "starts both servers and keeps them running",
    "litellm_mlx/launcher/clients": "agents, started on the local model",
    "litellm_mlx/launcher/doctor": "what is wrong, and the line that mends it",
    "litellm_mlx/launcher/service": "the servers at login, and again on failure",
}
_MARK = "<!-- From here on: python -m tools.write_architecture -->\n"


def architecture_page() -> str:
    """The page as it is up to the mark, and what belongs behind it."""
    head = PAGE.read_text(encoding="utf-8").partition(_MARK)[0]
    modules = sorted(_modules(), key=lambda path: (_rank(path), path.name))
    parts = [head, _MARK]
    for folder, files in groupby(modules, key=lambda path: path.parent):
        room = folder.relative_to(REPO).as_posix()
        parts.append(f"\n### `{room}/`: {_ROOMS[room]}\n\n")
        parts += [f"- `{file.name}`: {_purpose(file)}\n" for file in files]
    return "".join(parts)


def _modules() -> Iterator[Path]:
    for package in ("sidecar", "litellm_mlx"):
        for file in (REPO / package).rglob("*.py"):
            if file.name != "__init__.py":
                yield file


def _rank(module: Path) -> int:
    room = module.parent.relative_to(REPO).as_posix()
    if room not in _ROOMS:
        raise SystemExit(f"{room} has no line in _ROOMS of tools/write_architecture.py")
    return list(_ROOMS).index(room)


def _purpose(module: Path) -> str:
    said = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return " ".join(said.partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(architecture_page(), encoding="utf-8")
