#!/usr/bin/env python3
"""
Set up .venv, then start the MLX sidecar and LiteLLM (or run the tests).

    python3 install_and_run.py               set up and start both servers
    python3 install_and_run.py test [ARGS]   run pytest [ARGS]; --rest: the rest
    python3 install_and_run.py --check       set up, say what is there, try it
    python3 install_and_run.py VERB          launch, doctor, pull, stop, ...

Runs on Python 3.9 or later with the standard library alone. What it installs
are the releases in requirements/, which were tested (--latest: the newest). The
second start installs nothing unless those or pyproject.toml changed.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # a Ctrl-C in one of the imports is no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import ast
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent
LOCKS = ROOT / "requirements"  # written by tools/lock_dependencies.py
VERSIONS = ("3.12", "3.13", "3.11")  # in order of preference
_OF_OTHER_PYTHONS = ("PYTHONPATH", "PYTHONHOME")
VERBS = (  # of the launcher
    "launch", "admin", "doctor", "service", "stop", "upgrade", "pull", "recommend",
    "rm", "list", "ps", "load", "unload", "pin", "unpin", "logs", "bench", "probe",
)  # fmt: skip
LAUNCHER_OPTIONS = ("model", "port", "proxy_port", "config")
UV = "uv>=0.9"
NEWEST, UNFINISHED = "newest", "unfinished"  # in the stamp, in a digest's place
NUM_TAIL_LINES = 30
SAID_EVERY_S = 10.0  # where there is no terminal to show a live line on
NO_SUCH_PYTHON = 3  # exit code, so that a script can pass over a missing one

# Debian's Python comes without ensurepip, and cannot make a venv then.
CAN_MAKE_VENVS = "import ensurepip, venv; "
PROBE = (
    "import sys, platform; print('%d.%d' % sys.version_info[:2], platform.machine())"
)
INVENTORY = (
    "import importlib.metadata as m, json; "
    "print(json.dumps([m.requires('litellm-mlx'), "
    "{d.name.lower().replace('_', '-'): d.version for d in m.distributions()}]))"
)
# What pip and uv say of an index that does not answer.
UNREACHABLE = re.compile(
    r"(?i)failed to establish a new connection|name resolution|cannot connect to proxy"
    r"|connection refused|network is unreachable|connect timeout|timed out|dns error"
    r"|failed to fetch|error sending request"
)
UNREACHABLE_REMEDY = (
    "Fix: the package index cannot be reached: check the connection, or the "
    "proxy in HTTPS_PROXY, then run this again."
)
# What they say of a file that is not the one that was tested.
OTHER_FILE = re.compile(r"(?i)hash mismatch|do not match the hashes")
OTHER_FILE_REMEDY = (
    "Fix: the package index has another file than the one that was tested. Use another "
    "index, or, if you trust this one, run this again with --latest."
)
# What they say of a release that the index does not have.
NOT_THERE = re.compile(r"(?i)no (?:version of|matching distribution found for) (\S+\w)")
# pip's settings, which uv does not read, by what uv calls them.
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
DEVICE = "import mlx.core as mx; print(mx.default_device())"
# The index that pip asks where nothing names one.
PIP_INDEX = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"

if sys.version_info < (3, 9):
    sys.exit("install_and_run.py itself needs Python 3.9 or later to run")


class SetupError(Exception):
    """The set-up cannot go on; the message says why and what to do."""


class OtherFile(SetupError):
    """A package's file is not the one that was tested: nothing is to go on."""


class Unreachable(SetupError):
    """The package index does not answer: what else is tried there fails as well."""


class NoPython(SetupError):
    """No Python that could be used was found."""


class Venv:
    """The virtual environment: its folder and what of it is used here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.stamp = path / ".litellm-mlx-installed.json"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def removal(self) -> str:
        """The command that removes it, for a shell."""
        return f"rm -rf {shlex.quote(str(self))}"


def main(argv: list[str]) -> int:
    """Run a command; returns its exit code, unless the process becomes another."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _OF_OTHER_PYTHONS:  # their packages would come before the venv's
        os.environ.pop(name, None)
    if argv[:1] and argv[0] in VERBS:
        return run_verb(argv)  # unless it becomes another process
    try:
        options, pytest_args = parse_options(argv)
        place = Path(os.path.abspath(options.venv)) if options.venv else ROOT / ".venv"
        venv = Venv(place)
        with only_one_at_a_time():
            set_up(venv, options)
        if options.check:
            return check(venv)
    except SetupError as error:
        print(f"install_and_run: {error}", file=sys.stderr)
        return NO_SUCH_PYTHON if isinstance(error, NoPython) else 1
    except KeyboardInterrupt:
        print("\ninstall_and_run: interrupted", file=sys.stderr)
        return 130
    if options.test:
        return become(venv, ["-m", "pytest", *pytest_args])
    # Kept back until the launcher, which imports for a second, can act on it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    return become(venv, ["-m", "litellm_mlx.launcher", *launcher_arguments(options)])


def run_verb(argv: list[str]) -> int:
    """Hand a verb on to what is installed, in the folder where it was called."""
    venv = Venv(ROOT / ".venv")
    python = venv.python
    is_whole = any(venv.path.glob("lib/python*/site-packages/dotenv"))
    if not is_whole or read_stamp(venv)["digest"] == UNFINISHED:
        print("install_and_run: nothing is installed yet. Fix: run me", file=sys.stderr)
        return 1
    environ = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", "litellm_mlx.launcher", *argv]
    return os.execve(python, command, environ)


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; what follows `test` and is not ours is pytest's."""
    parser = argparse.ArgumentParser(
        prog="install_and_run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("set-up").add_argument
    add("--check", action="store_true", help="set up, list, try it: exit 0 or 1")
    add("--latest", action="store_true", help="install the newest, not the tested")
    add("--full", action="store_true", help="add the vision and audio packages (1 GB)")
    add("--cuda", action="store_true", help="MLX for NVIDIA cards instead of the CPU")
    add("--python", choices=sorted(VERSIONS), help="which Python a new venv has")
    add("--venv", metavar="DIR", help="where the packages go; default .venv")
    add = parser.add_argument_group("servers (variable)").add_argument
    add("--model", help="hub id or folder; default the built-in model (MODEL_PATH)")
    add("--port", type=int, help="sidecar port; default 8080 (MLX_PORT)")
    add("--proxy-port", type=int, help="LiteLLM port; default 4000 (PROXY_PORT)")
    add("--no-proxy", action="store_true", help="start the sidecar without LiteLLM")
    add("--config", help="your LiteLLM config; default litellm_config.yaml")
    is_test = argv[:1] == ["test"]
    if is_test:
        options, rest = parser.parse_known_args(argv[1:])
    else:
        options, rest = parser.parse_args(argv), []
    options.test = is_test
    return options, rest


def launcher_arguments(options: argparse.Namespace) -> list[str]:
    """The launcher's command line; paths become absolute, as it runs in ROOT."""
    arguments = ["--no-proxy"] if options.no_proxy else []
    for name in LAUNCHER_OPTIONS:
        value = getattr(options, name)
        if value is not None:
            is_path = name == "config" or (name == "model" and os.path.exists(value))
            if is_path:  # a shell leaves the ~ of --config=~/x to us
                value = os.path.abspath(os.path.expanduser(value))
            value = str(value)
            arguments += ["--" + name.replace("_", "-"), value]
    return arguments


@contextlib.contextmanager
def only_one_at_a_time() -> Iterator[None]:
    """Hold a lock on ROOT, so that two set-ups cannot write one .venv."""
    descriptor = os.open(ROOT, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("Waiting for another set-up of this folder ...", flush=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def set_up(venv: Venv, options: argparse.Namespace) -> None:
    """Make `.env` and the venv ready; does nothing where they are."""
    if not (ROOT / ".env").exists() and (ROOT / ".env.example").exists():
        try:
            shutil.copyfile(ROOT / ".env.example", ROOT / ".env")
            os.chmod(ROOT / ".env", 0o600)  # keys will go there
        except OSError as error:
            raise SetupError(
                f"{ROOT} cannot be written to ({error.strerror}).\n"
                "Fix: git clone it into a folder of your own"
            ) from None
    wanted = (options.python,) if options.python else VERSIONS
    if not venv.path.exists():
        create_venv(venv, wanted)
    problems = contamination(venv.path, wanted)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise SetupError(
            f"{venv} does not fit together:\n{listed}\n"
            f"Fix: {venv.removal}   then run this again; it is made anew."
        )
    stamp = read_stamp(venv)
    extras = wanted_extras(venv, options, stamp["extras"])
    digest = NEWEST if options.latest else digest_of_requirements()
    if stamp["digest"] == digest:
        if extras <= stamp["extras"] and not options.latest:
            return
        extras |= stamp["extras"]
    is_unfinished = stamp["digest"] == UNFINISHED
    write_stamp(venv, UNFINISHED, extras | stamp["extras"])
    install(venv, extras, locks_of(extras, options), is_unfinished)
    write_stamp(venv, digest, extras)
    # uv does not compile as pip does: what is imported first is compiled then.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


# The interpreter.


def create_venv(venv: Venv, versions: Sequence[str]) -> None:
    """Create the venv with the first of these Pythons that can be used."""
    python, tried = find_interpreter(versions)
    if python is None:
        raise NoPython(
            f"no usable Python {', '.join(versions)}. Looked on PATH, with "
            "`uv python find`, in pyenv's versions, Homebrew and framework places"
            + "".join(f"\n  tried {line}" for line in tried)
            + f"\nFix: install Python {versions[0]} (brew install "
            f"python@{versions[0]}, pyenv install {versions[0]}, uv python install "
            f"{versions[0]}, or python.org), then run this again."
        )
    print(f"Creating {venv.path.name} with {python} ...", flush=True)
    done = False
    try:
        run_quietly([python, "-m", "venv", str(venv)])
        done = True
    finally:
        if not done:
            shutil.rmtree(venv.path, ignore_errors=True)  # half of one would be refused


def find_interpreter(versions: Sequence[str]) -> tuple[str | None, list[str]]:
    """The first candidate that runs and is what its name says; and the failed ones."""
    tried: list[str] = []
    for version in versions:
        for path in dict.fromkeys(candidates(version)):
            fault = interpreter_fault(path, version, CAN_MAKE_VENVS)
            if fault is None:
                return path, tried
            tried.append(f"{path}: {fault}")
    return None, tried


def candidates(version: str) -> Iterator[str]:
    """Paths where a Python of this version may be, best first."""
    name = f"python{version}"
    folders = os.environ.get("PATH", "").split(os.pathsep)
    paths = [Path(folder) / name for folder in folders if folder]
    if shutil.which("uv"):
        # --system: else uv would name the very .venv that is being made.
        found = output_of(["uv", "python", "find", "--system", version])
        paths += [Path(found)] if found else []
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    newest_first = sorted(
        pyenv.glob(f"versions/{version}*"),
        key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name)],
        reverse=True,
    )
    paths += [folder / "bin" / name for folder in newest_first]
    for prefix in ("/opt/homebrew", "/usr/local"):
        paths.append(Path(prefix, "bin", name))
        paths.append(Path(prefix, "opt", f"python@{version}", "bin", name))
    framework = "/Library/Frameworks/Python.framework/Versions"
    paths.append(Path(framework, version, "bin", name))
    yield from (str(path) for path in paths if os.access(path, os.X_OK))
    if version == "{}.{}".format(*sys.version_info):
        yield sys.executable


def interpreter_fault(path: str, version: str, first: str = "") -> str | None:
    """Why this is no Python of that version that can be used here, or None."""
    command = [path, "-c", first + PROBE]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({error})"
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        # A traceback's reason is its last line, a shim's complaint its first.
        reason = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        return f"does not run ({reason})"
    found, machine = (result.stdout.split() + ["", ""])[:2]
    if found != version:
        return f"is Python {found or 'unknown'}, not {version}"
    if sys.platform == "darwin" and machine != "arm64":
        return f"is built for {machine}; MLX on macOS needs arm64"
    return None


# The venv.


def contamination(venv: Path, versions: Sequence[str] = VERSIONS) -> list[str]:
    """What in a venv does not fit its own Python version, one line each."""
    version = venv_version(venv)
    if version is None:
        return [f"{venv / 'pyvenv.cfg'}: missing, or names no version"]
    problems = []
    if version not in versions:
        wanted = ", ".join(versions)
        problems.append(f"{venv / 'pyvenv.cfg'}: Python {version}, needed {wanted}")
    for path in [*sorted((venv / "bin").glob("*")), *sorted((venv / "lib").glob("*"))]:
        match = re.fullmatch(r"(?:python|pip)(3\.\d+)", path.name)
        if match and match[1] != version:
            problems.append(f"{path}: of another Python, this venv has {version}")
        elif re.fullmatch(r"pip(3(\.\d+)?)?", path.name):
            owner = script_python(path)
            if owner is None or not is_same_folder(owner.parent, venv / "bin"):
                problems.append(f"{path}: runs {owner}, not this venv's python")
    fault = interpreter_fault(str(venv / "bin" / "python"), version)
    return problems + ([f"{venv / 'bin' / 'python'}: {fault}"] if fault else [])


def venv_version(venv: Path) -> str | None:
    """`3.12` for a venv of Python 3.12.1, as its pyvenv.cfg has it."""
    try:
        text = (venv / "pyvenv.cfg").read_text()
    except OSError:
        return None
    # uv and virtualenv write version_info; virtualenv's `version` may be its own.
    for key in ("version_info", "version"):
        match = re.search(rf"^{key}\s*=\s*(3\.\d+)", text, re.MULTILINE)
        if match:
            return match[1]
    return None


def script_python(script: Path) -> Path | None:
    """The Python in a script's first line."""
    with open(script, "rb") as file:
        head = file.read(2048).decode(errors="replace")
    # pip writes the second form where the path is long or has a blank in it.
    match = re.match(r"#!/bin/sh\n'''exec' \"?([^\"\n]+?)\"? \"\$0\"", head)
    match = match or re.match(r"#!\s*([^\n]+?)\s*\n", head)
    return Path(match[1]) if match else None


def is_same_folder(one: Path, other: Path) -> bool:
    """True if both paths lead to one folder."""
    return os.path.realpath(one) == os.path.realpath(other)


# What to install.


def read_stamp(venv: Venv) -> dict[str, Any]:
    """What was last installed: the digest of what was asked for, and the extras."""
    try:
        stamp = json.loads(venv.stamp.read_text())
        return {"digest": stamp["digest"], "extras": set(stamp["extras"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"digest": None, "extras": set()}


def write_stamp(venv: Venv, digest: str, extras: set[str]) -> None:
    """Keep what is installed, or that an install of it has begun."""
    venv.stamp.write_text(json.dumps({"digest": digest, "extras": sorted(extras)}))


def digest_of_requirements() -> str:
    """Changes with pyproject.toml and with every file in requirements/."""
    files = [ROOT / "pyproject.toml", *sorted(LOCKS.glob("*.txt"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def locks_of(extras: set[str], options: argparse.Namespace) -> list[Path]:
    """The files with the releases that were tested; none if others are wanted."""
    locks = [LOCKS / f"{name}.txt" for name in ["base", *sorted(extras)]]
    return [] if options.latest or not all(map(Path.exists, locks)) else locks


def wanted_extras(
    venv: Venv, options: argparse.Namespace, installed: set[str]
) -> set[str]:
    """The extras this run needs."""
    # The packages for images and sound are a gigabyte: for the tests, which try all
    # there is, and for who asks for them.
    extras = {"vision", "audio"} if options.full or options.test else set()
    extras |= {"dev"} if options.test else set()
    if sys.platform != "darwin":
        # Both backends bring the same library file, so a venv has one of them.
        if options.cuda and "cpu" in installed:
            raise SetupError(
                f"{venv} has MLX for the CPU. Fix: {venv.removal}   then run this "
                "again."
            )
        extras.add("cuda" if options.cuda or "cuda" in installed else "cpu")
    return extras


def setting(name: str) -> str | None:
    """A setting from the environment or `.env`, as far as the set-up needs one."""
    if os.environ.get(name):
        return os.environ[name]
    with contextlib.suppress(OSError):
        text = (ROOT / ".env").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            key, _, value = line.removeprefix("export ").partition("=")
            if key.strip() == name:
                return value.partition(" #")[0].strip().strip("'\"") or None
    return None


# How to install it.


class Installer:
    """pip or uv, installing into the venv."""

    def __init__(self, name: str, command: list[str], settings: dict[str, str]) -> None:
        self.name = name
        self._command = command
        self._environment = {**settings, **os.environ}  # what is set is not changed

    def install(self, *arguments: str) -> None:
        """Run it; raises SetupError with what it said, and what to do where known."""
        command = [*self._command, *arguments]
        try:
            run_quietly(command, LiveLine(sys.stdout), self._environment)
        except SetupError as error:
            if OTHER_FILE.search(str(error)):
                raise OtherFile(f"{error}\n{OTHER_FILE_REMEDY}") from None
            if UNREACHABLE.search(str(error)):
                raise Unreachable(f"{error}\n{UNREACHABLE_REMEDY}") from None
            raise

    def install_locked(self, locks: list[Path]) -> bool:
        """Install the tested releases; False, and a line, if they cannot be had."""
        if not locks:
            return False
        files = [part for lock in locks for part in ("-r", str(lock))]
        try:
            self.install("--require-hashes", "--no-deps", *files)
        except (OtherFile, Unreachable):
            raise
        except SetupError as error:
            lacking = NOT_THERE.search(str(error))
            named = f" ({lacking[1]} is missing)" if lacking else ""
            print(
                f"The tested releases cannot be had here{named}: "
                "installing the newest that fit",
                flush=True,
            )
            return False
        return True


def install(
    venv: Venv, extras: set[str], locks: list[Path], is_unfinished: bool
) -> None:
    """Install the project, editable, with its extras."""
    started = time.monotonic()
    target = f".[{','.join(sorted(extras))}]"
    faults = []
    for installer in installers(venv, bool(locks), is_unfinished):
        waits = "; the first time takes minutes" if installer.name == "pip" else ""
        print(f"Installing {target} with {installer.name}{waits} ...", flush=True)
        try:
            if installer.install_locked(locks):
                # Its build backend is one of the tested releases, too.
                installer.install("--no-deps", "--no-build-isolation", "-e", ".")
            else:
                installer.install("--upgrade", "-e", target)
        except OtherFile:
            raise
        except SetupError as error:
            faults.append(str(error))
            continue
        print(f"Installed in {time.monotonic() - started:.0f} s", flush=True)
        return
    raise SetupError("\n".join(faults))


def installers(venv: Venv, is_locked: bool, is_unfinished: bool) -> Iterator[Installer]:
    """The ways to install, best first: uv where it can be had, pip."""
    python = str(venv.python)
    pip = [python, "-m", "pip"]
    if output_of([*pip, "--version"]) is None:  # uv makes venvs without it
        with contextlib.suppress(SetupError):
            run_quietly([python, "-m", "ensurepip"])
    # A package that was just being written is taken for whole: all are written again.
    again = {"uv": [], "pip": []}
    if is_unfinished:
        again = {"uv": ["--reinstall"], "pip": ["--force-reinstall"]}
    by_pip = [*pip, "install", "--disable-pip-version-check", *again["pip"]]
    uv = find_uv(venv, Installer("pip", by_pip, {}), is_locked)
    if uv:
        by_uv = [uv, "pip", "install", "--python", python, *again["uv"]]
        yield Installer("uv", by_uv, uv_settings(pip))
    yield Installer("pip", by_pip, {})


def find_uv(venv: Venv, pip: Installer, is_locked: bool) -> str | None:
    """The venv's uv, the user's, or the one that pip can put there; or None."""
    own = str(venv.path / "bin" / "uv")
    for path in (own, shutil.which("uv")):
        if path and output_of([path, "--version"]):
            return path
    try:
        if not pip.install_locked([LOCKS / "uv.txt"] if is_locked else []):
            pip.install(UV)
    except (OtherFile, Unreachable):
        raise
    except SetupError:
        pass
    if output_of([own, "--version"]):
        return own
    print("uv cannot be had here: pip goes on alone, which is slower", flush=True)
    return None


def uv_settings(pip: list[str]) -> dict[str, str]:
    """What pip's files and variables say of the index, in uv's variables."""
    settings: dict[str, str] = {}
    listed = (output_of([*pip, "config", "list"]) or "").splitlines()
    order = ("global", "install", ":env:")  # later wins
    found = [
        re.fullmatch(r"(global|install|:env:)\.([\w-]+)=(.*)", line) for line in listed
    ]
    for match in sorted(filter(None, found), key=lambda match: order.index(match[1])):
        name = UV_NAMES.get(match[2])
        if name:
            words = str(ast.literal_eval(match[3])).split()
            settings[name] = ("," if name == "UV_FIND_LINKS" else " ").join(words)
    if "UV_INDEX" in settings:
        # As pip does: the best release of all indexes, not of the first that has any.
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        # Of one release uv takes the files of the first index alone, where pip looks at
        # all: the main index has all of them, a further one often only some.
        main_index = settings.get("UV_DEFAULT_INDEX") or output_of(
            [*pip[:-2], "-c", PIP_INDEX]
        )
        if main_index and "UV_NO_INDEX" not in settings:
            settings["UV_INDEX"] = f"{main_index} {settings['UV_INDEX']}"
    return settings


def check(venv: Venv) -> int:
    """Say what is installed and try it; 0 if the servers can start and answer."""
    if not report(venv):
        return 1
    print("Trying it: imports, self-test, an answer over the wire ...", flush=True)
    smoke = [str(venv.python), str(ROOT / "tools" / "smoke.py")]
    return 0 if subprocess.run(smoke, check=False).returncode == 0 else 1


def report(venv: Venv) -> bool:
    """Say what is installed and what is missing; True if nothing needed is."""
    listed = output_of([str(venv.python), "-c", INVENTORY])
    requires, versions = json.loads(listed) if listed else ([], {})
    device = output_of([str(venv.python), "-c", DEVICE])
    print(f"python       {venv_version(venv.path)} in {venv}")
    print(f"MLX runs on  {device or 'MISSING: import mlx.core fails'}")
    print(f"model        {setting('MODEL_PATH') or 'built-in'}")
    if sys.platform == "darwin":
        print(f"wired        {setting('WIRED_LIMIT') or 'off'} (WIRED_LIMIT)")
    is_complete = bool(requires) and device is not None
    for group, names in by_extra(requires or []).items():
        absent = [name for name in names if name not in versions]
        is_complete = is_complete and not (absent and group == "needed")
        found = [f"{name} {versions[name]}" for name in names if name in versions]
        missing = f"{'MISSING' if group == 'needed' else 'absent'}: {', '.join(absent)}"
        print(f"{group:12} {', '.join([*found, missing] if absent else found)}")
    return is_complete


def by_extra(requires: list[str]) -> dict[str, list[str]]:
    """Package names by the extra that asks for them; "needed" without one."""
    groups: dict[str, list[str]] = {"needed": []}
    for requirement in requires:
        extra = re.search(r"extra == .(\w+)", requirement)
        name = re.split(r"[^\w.-]", requirement)[0]
        name = name.lower().replace("_", "-")
        if name not in groups["needed"]:  # as mlx[cpu] and mlx are
            groups.setdefault(extra[1] if extra else "needed", []).append(name)
    return groups


# Commands.


def become(venv: Venv, arguments: list[str]) -> NoReturn:
    """Turn into the venv's python: signals and exit code go straight through."""
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execv(venv.python, [str(venv.python), *arguments])


class LiveLine:
    """
    Shows that a long command is at work: its last line of output, and the seconds.

    On a terminal one line that changes; elsewhere a line every ten seconds.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._started = time.monotonic()
        self._said_at = self._started

    def show(self, doing: str) -> None:
        """Say what is done now; called a few times a second."""
        now = time.monotonic()
        text = f"  {now - self._started:.0f} s  {doing}".rstrip()
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{text[:width]}")
            self._stream.flush()
        elif now - self._said_at >= SAID_EVERY_S:
            self._said_at = now
            self._stream.write(f"{text[:100]}\n")
            self._stream.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def run_quietly(
    command: list[str],
    live: LiveLine | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    """Run a command in ROOT; its output is shown only if it fails."""
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        reader = threading.Thread(target=lines.extend, args=(process.stdout,))
        try:  # a Ctrl-C from here on ends the command, however early it comes
            reader.start()
            while reader.is_alive():
                reader.join(0.3)
                if live:
                    live.show(latest_step(lines))
        except BaseException:
            process.kill()
            raise
        finally:
            if live:
                live.clear()
    if process.returncode != 0:
        tail = "".join(lines[-NUM_TAIL_LINES:]).rstrip()
        raise SetupError(f"failed: {shlex.join(command)}\n{tail}")


def latest_step(lines: Sequence[str]) -> str:
    """What pip or uv said last of what it does; not its warnings and bars."""
    for line in reversed(lines[-200:]):
        if re.match(r"\s*(Collect|Download|Process|Build|Prepar|Install|Resolv)", line):
            return line.partition(" (from ")[0].strip()
    return ""


def output_of(command: list[str]) -> str | None:
    """What a command prints, or None if it fails."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
