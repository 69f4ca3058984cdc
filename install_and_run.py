#!/usr/bin/env python3
"""
Set up .venv, then start the MLX sidecar and LiteLLM (or run the tests).

    python3 install_and_run.py               set up and start both servers
    python3 install_and_run.py test [ARGS]   set up and run pytest [ARGS]
    python3 install_and_run.py --check       set up and say what is there

Runs on Python 3.9 or later with the standard library alone. The second start
installs nothing unless pyproject.toml changed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".litellm-mlx-installed.json"
VERSIONS = ("3.12", "3.13", "3.11")  # in order of preference
LAUNCHER_OPTIONS = ("model", "port", "proxy_port", "config")
NUM_TAIL_LINES = 30

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
DEVICE = "import mlx.core as mx; print(mx.default_device())"

AUDIO_AND_OCR = re.compile(
    r"whisper|parakeet|kokoro|speecht5|parler|outetts|chatterbox|_asr|_tts|_?ocr", re.I
)
MEDIA_NAME = re.compile(
    r"[-_.]vl[-_.\d]|vision|whisper|parakeet|kokoro|audio|[-_](tts|asr|ocr)", re.I
)

if sys.version_info < (3, 9):
    sys.exit("install_and_run.py itself needs Python 3.9 or later to run")


class SetupError(Exception):
    """The set-up cannot go on; the message says why and what to do."""


def main(argv: list[str]) -> int:
    """Run a command; returns its exit code, unless the process becomes another."""
    options, pytest_args = parse_options(argv)
    try:
        with only_one_at_a_time():
            set_up(options)
    except SetupError as error:
        print(f"install_and_run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninstall_and_run: interrupted", file=sys.stderr)
        return 130
    if options.check:
        return report()
    if options.test:
        return become(["-m", "pytest", *pytest_args])
    return become(["-m", "litellm_mlx.launcher", *launcher_arguments(options)])


def parse_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; what follows `test` and is not ours is pytest's."""
    parser = argparse.ArgumentParser(
        prog="install_and_run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("set-up").add_argument
    add("--check", action="store_true", help="set up, list what is there, exit 0 or 1")
    add("--full", action="store_true", help="add the vision and audio packages (1 GB)")
    add("--cuda", action="store_true", help="MLX for NVIDIA cards instead of the CPU")
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
            value = os.path.abspath(value) if is_path else str(value)
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


def set_up(options: argparse.Namespace) -> None:
    """Make `.env` and `.venv` ready; does nothing where they are."""
    if not (ROOT / ".env").exists() and (ROOT / ".env.example").exists():
        shutil.copyfile(ROOT / ".env.example", ROOT / ".env")
        os.chmod(ROOT / ".env", 0o600)  # keys will go there
    if not VENV.exists():
        create_venv()
    problems = contamination(VENV)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise SetupError(
            f"{VENV} does not fit together:\n{listed}\n"
            f"Fix: rm -rf {VENV}   then run this again; it is made anew."
        )
    stamp = read_stamp()
    extras = wanted_extras(options, stamp["extras"])
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp["pyproject"] == digest:
        if extras <= stamp["extras"]:
            return
        extras |= stamp["extras"]
    install(extras)
    STAMP.write_text(json.dumps({"pyproject": digest, "extras": sorted(extras)}))


# The interpreter.


def create_venv() -> None:
    """Create `.venv` with the best Python there is."""
    python, tried = find_interpreter()
    if python is None:
        raise SetupError(
            f"no usable Python {', '.join(VERSIONS)}. Looked on PATH, with "
            "`uv python find`, in pyenv's versions, Homebrew and framework places"
            + "".join(f"\n  tried {line}" for line in tried)
            + "\nFix: install Python 3.12 (brew install python@3.12, pyenv install "
            "3.12, uv python install 3.12, or python.org), then run this again."
        )
    print(f"Creating .venv with {python} ...", flush=True)
    done = False
    try:
        run_quietly([python, "-m", "venv", str(VENV)])
        done = True
    finally:
        if not done:
            shutil.rmtree(VENV, ignore_errors=True)  # half of one would be refused


def find_interpreter() -> tuple[str | None, list[str]]:
    """The first candidate that runs and is what its name says; and the failed ones."""
    tried: list[str] = []
    for version in VERSIONS:
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


def contamination(venv: Path) -> list[str]:
    """What in a venv does not fit its own Python version, one line each."""
    version = venv_version(venv)
    if version is None:
        return [f"{venv / 'pyvenv.cfg'}: missing, or names no version"]
    problems = []
    if version not in VERSIONS:
        wanted = ", ".join(VERSIONS)
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


def read_stamp() -> dict[str, Any]:
    """What was last installed: the digest of pyproject.toml, and the extras."""
    try:
        stamp = json.loads(STAMP.read_text())
        return {"pyproject": stamp["pyproject"], "extras": set(stamp["extras"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"pyproject": None, "extras": set()}


def wanted_extras(options: argparse.Namespace, installed: set[str]) -> set[str]:
    """The extras this run needs."""
    extras = {"dev"} if options.test else set()
    if sys.platform != "darwin":
        # Both backends bring the same library file, so a venv has one of them.
        if options.cuda and "cpu" in installed:
            raise SetupError(
                f"{VENV} has MLX for the CPU. Fix: rm -rf {VENV}   then run this again."
            )
        extras.add("cuda" if options.cuda or "cuda" in installed else "cpu")
    with_media = options.full
    if options.test:
        with_media = with_media or os.environ.get("LITELLM_MLX_TEST_ALL") == "1"
    elif not with_media:
        with_media = needs_media(options.model)
    return extras | {"vision", "audio"} if with_media else extras


def needs_media(model: str | None) -> bool:
    """True if a chosen model sees, hears or speaks."""
    model = model or setting("MODEL_PATH") or ""
    folders = [Path(model).expanduser()] if model else []
    hub = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(hub, "hub"))
    folders += hub.glob(f"models--{model.replace('/', '--')}/snapshots/*")
    is_here = any((folder / "config.json").exists() for folder in folders)
    if not is_here and MEDIA_NAME.search(model):
        return True  # not downloaded yet: its name has to do
    for root in (setting("MODEL_DIR") or "").split(":"):
        for pattern in ("*", "*/*", "*/snapshots/*") if root else ():
            folders += Path(root).expanduser().glob(pattern)
    return any(is_media_model(folder) for folder in folders)


def is_media_model(folder: Path) -> bool:
    """True if a model folder's config.json speaks of images or sound."""
    try:
        config = json.loads((folder / "config.json").read_text())
        index = folder / "model.safetensors.index.json"
        weights = index.read_text() if index.exists() else "vision"
    except (OSError, ValueError):
        return False
    kind = f"{config.get('architectures')} {config.get('model_type')}"
    sound_keys = ("audio", "tts", "stt", "vocoder", "codec")
    if any(config.get(f"{key}_config") for key in sound_keys):
        return True
    if re.search(AUDIO_AND_OCR, kind):
        return True
    # Conversions for text alone keep the config but not the weights.
    sees = config.get("vision_config") or re.search(r"VL|_vl|[Vv]ision", kind)
    return bool(sees) and ("vision" in weights or "visual" in weights)


def setting(name: str) -> str | None:
    """A setting from the environment or `.env`, as far as the set-up needs one."""
    if os.environ.get(name):
        return os.environ[name]
    with contextlib.suppress(OSError):
        for line in (ROOT / ".env").read_text().splitlines():
            key, _, value = line.removeprefix("export ").partition("=")
            if key.strip() == name:
                return value.partition(" #")[0].strip().strip("'\"") or None
    return None


def install(extras: set[str]) -> None:
    """Install the project, editable, with its extras."""
    target = f".[{','.join(sorted(extras))}]"
    by_pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    ways = {"pip": by_pip}
    if shutil.which("uv"):
        by_uv = ["uv", "pip", "install", "--python", str(PYTHON)]
        # pip stays as the second way: uv does not read pip's index settings.
        ways = {"uv": by_uv, "pip": by_pip}
    faults = []
    for way, command in ways.items():
        print(f"Installing {target} with {way}; the first time takes minutes ...")
        started = time.monotonic()
        try:
            if way == "pip" and output_of([*by_pip[:3], "--version"]) is None:
                run_quietly([str(PYTHON), "-m", "ensurepip"])  # uv makes venvs bare
            run_quietly([*command, "-e", target])
        except SetupError as error:
            faults.append(str(error))
            continue
        print(f"Installed in {time.monotonic() - started:.0f} s", flush=True)
        return
    raise SetupError("\n".join(faults))


def report() -> int:
    """Say what is installed and what is missing; 0 if the servers can start."""
    listed = output_of([str(PYTHON), "-c", INVENTORY])
    requires, versions = json.loads(listed) if listed else ([], {})
    device = output_of([str(PYTHON), "-c", DEVICE])
    print(f"python       {venv_version(VENV)} in {VENV}")
    print(f"MLX runs on  {device or 'MISSING: import mlx.core fails'}")
    print(f"model        {setting('MODEL_PATH') or 'built-in'}")
    is_complete = bool(requires) and device is not None
    for group, names in by_extra(requires or []).items():
        absent = [name for name in names if name not in versions]
        is_complete = is_complete and not (absent and group == "needed")
        found = [f"{name} {versions[name]}" for name in names if name in versions]
        missing = f"{'MISSING' if group == 'needed' else 'absent'}: {', '.join(absent)}"
        print(f"{group:12} {', '.join([*found, missing] if absent else found)}")
    return 0 if is_complete else 1


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


def become(arguments: list[str]) -> NoReturn:
    """Turn into the venv's python: signals and exit code go straight through."""
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execv(PYTHON, [str(PYTHON), *arguments])


def run_quietly(command: list[str]) -> None:
    """Run a command in ROOT; its output is shown only if it fails."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        tail = "\n".join(result.stdout.splitlines()[-NUM_TAIL_LINES:])
        raise SetupError(f"failed: {' '.join(command)}\n{tail}")


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
