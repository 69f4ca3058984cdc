"""How much of the house a request passes, and how deep its imports go."""

import ast
import functools
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from testkit.servers import running_sidecar

REPO = Path(__file__).parents[2]
HOUSE = f"{REPO}/sidecar/"
MAX_FILES = 82  # speculation, on by default, has seven of them; steps ahead one
ROUNDS = {
    "listener",
    "pool",
    "expiry",
    "savings",
    "sessions",
    "audit",
}  # threads whose rounds come at their own times
MAX_DOORS = 4  # modules of a folder that are called from outside it
MAX_CHAIN = 14


class Walk:
    """The files of ours that are entered while it is on, and by which doors."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.doors: dict[str, set[str]] = defaultdict(set)

    def __enter__(self) -> "Walk":
        threading.setprofile_all_threads(self._seen)
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile_all_threads(None)
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _arg: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(HOUSE):
            return
        if threading.current_thread().name in ROUNDS:
            return
        entered = name.removeprefix(HOUSE)
        self.files.add(entered)
        caller = next(_callers(frame), "")
        folder = entered.partition("/")[0]
        if caller and caller.partition("/")[0] != folder:
            self.doors[folder].add(entered)


def _callers(frame: FrameType) -> Iterator[str]:
    behind = frame.f_back
    while behind is not None:
        name = behind.f_code.co_filename
        if name.startswith(HOUSE):
            yield name.removeprefix(HOUSE)
        behind = behind.f_back


def ask(url: str, messages: list[dict[str, str]]) -> str:
    """A streamed chat of a few tokens; what was said."""
    body = {"model": "local", "messages": messages, "stream": True, "max_tokens": 8}
    said = ""
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=120
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"] or [{"delta": {}}]
                said += choice["delta"].get("content") or ""
    return said


def test_a_warm_chat_passes_few_files(model_folder: Callable[[str], Path]) -> None:
    """
    Files of one idea each: fewer would mean that ideas share one.

    The next person reads what a request passes; this holds the number where it is.
    """
    talk = [{"role": "user", "content": "hello there " + "word " * 60}]
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        for more in ("and now?", "more?"):
            talk += [{"role": "assistant", "content": ask(app.url, talk)}]
            talk += [{"role": "user", "content": more}]
        url = app.url
        with Walk() as walk:
            ask(url, talk)
    assert "pipeline/prepare.py" in walk.files
    assert len(walk.files) <= MAX_FILES, sorted(walk.files)
    crowded = {f: sorted(d) for f, d in walk.doors.items() if len(d) > MAX_DOORS}
    assert crowded == {}


def modules() -> dict[str, Path]:
    found = {}
    for file in (REPO / "sidecar").rglob("*.py"):
        name = ".".join(file.relative_to(REPO).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file
    return found


def test_no_import_goes_deep() -> None:
    """The longest chain of modules, each of which imports the next at its top."""
    known = modules()

    @functools.cache
    def imported(name: str) -> frozenset[str]:
        found: set[str] = set()
        for node in ast.parse(known[name].read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {w if w in known else node.module for w in whole}
        return frozenset(found & known.keys() - {name})

    @functools.cache
    def chain(name: str) -> tuple[str, ...]:
        rest = max(map(chain, imported(name)), key=len, default=())
        return (name, *rest)

    longest = max(map(chain, known), key=len)
    assert len(longest) <= MAX_CHAIN, longest
    assert len(longest) > 5
