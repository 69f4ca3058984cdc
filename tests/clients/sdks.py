"""The libraries: each runs a program of `programs/`, whole and streamed."""

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from tests.clients.case import Case, Place, Run, call, npm_version, pip_version

_PROGRAMS = Path(__file__).parent / "programs"


def _program(name: str, venv: str, wire: str, stream: bool, **env: str) -> Run:
    def run(place: Place) -> list[str]:
        given = {"BASE": place.url, "WIRE": wire, "STREAM": str(int(stream)), **env}
        given["CASE"] = place.folder.name
        if name.endswith(".mjs"):
            given["MODULES"] = str(place.clients / venv)
            command: list[str | Path] = [place.node / "node"]
        else:
            given["OPENAI_API_KEY"] = "any"
            given["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
            command = [place.clients / venv / "bin/python" if venv else sys.executable]
        said = call(place, [*command, _PROGRAMS / name], given)
        if said.code == 0:
            return []
        lines = (said.out + said.error).strip()
        return [f"exit {said.code}: {lines[-600:]}"]

    return run


def _cases(
    name: str,
    client: str,
    program: str,
    venv: str,
    read_version: Callable[[Path], str],
    wires: tuple[str, ...],
) -> list[Case]:
    cases = []
    for wire in wires:
        for stream in (False, True):
            env = {"STORE": "1"} if wire == "responses-stored" else {}
            run = _program(program, venv, wire.removesuffix("-stored"), stream, **env)
            label = f"{wire}, {'streamed' if stream else 'whole'}"
            key = f"{name}-{wire}-{'stream' if stream else 'whole'}"
            cases.append(Case(key, client, label, read_version, run))
    return cases


_OPENAI = ("chat", "responses", "previous_id")
_ALL = ("chat", "messages", "responses")
_VERCEL = ("chat", "compatible", "messages", "responses", "responses-stored")
_GRAPH = ("langgraph", "langchain-openai", "langchain-anthropic")


def _litellm_version(_clients: Path) -> str:
    return version("litellm")


CASES = [
    case
    for name, client, program, venv, read_version, wires in (
        ("openai", "openai SDK", "openai_sdk.py", "sdk",
         pip_version("sdk", "openai"), _OPENAI),
        ("anthropic", "anthropic SDK", "anthropic_sdk.py", "sdk",
         pip_version("sdk", "anthropic"), ("messages",)),
        ("vercel", "Vercel AI SDK", "vercel.mjs", "vercel",
         npm_version("vercel", "ai"), _VERCEL),
        ("agents-py", "OpenAI Agents, Python", "agents_sdk.py", "agents-py",
         pip_version("agents-py", "openai-agents"), _OPENAI),
        ("agents-js", "OpenAI Agents, JS", "agents.mjs", "agents-js",
         npm_version("agents-js", "@openai/agents"), _OPENAI),
        ("langgraph", "LangGraph", "langgraph_loop.py", "langgraph",
         pip_version("langgraph", *_GRAPH), _ALL),
        ("pydantic", "pydantic-ai", "pydantic_loop.py", "pydantic",
         pip_version("pydantic", "pydantic-ai-slim"), _ALL),
        ("litellm", "litellm.completion", "litellm_sdk.py", "", _litellm_version, _ALL),
    )
    for case in _cases(name, client, program, venv, read_version, wires)
]  # fmt: skip
