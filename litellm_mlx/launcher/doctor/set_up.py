"""Whether what is installed is whole, and there is room: Python, packages, disk."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from dotenv.parser import parse_stream
from packaging.requirements import Requirement

from litellm_mlx.launcher.doctor.finding import Finding
from litellm_mlx.launcher.settings import LaunchSettings

_PYTHONS = ((3, 11), (3, 13))
_GB = 1e9
_MIN_FREE_GB = 5
_INSTALL = "python3 install_and_run.py --check"


def check_set_up(
    settings: LaunchSettings, python: tuple[int, int] = sys.version_info[:2]
) -> Iterator[Finding]:
    """
    Findings of the set-up and the machine.

    Args:
        python: the version that runs.
    """
    found = [
        *_python(python),
        *_packages(),
        *_disk(settings.run_dir.parent),
        *_env_mode(settings.env_path),
        *_env_lines(settings.env_path),
    ]
    yield from found
    if all(one.state == "ok" for one in found):
        version = ".".join(map(str, python))
        yield Finding("set-up", "ok", f"Python {version}, packages within bounds")


def _env_lines(file: Path) -> Iterator[Finding]:
    """Those that are no NAME=value, or whose quote does not end."""
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as text:
        lines = [one.original.line for one in parse_stream(text) if one.error]
    for line in lines:
        found = f"line {line} of {file} is not read: it is no NAME=value"
        yield Finding("set-up", "bad", found, f"mend line {line} of {file}")


def _python(python: tuple[int, int]) -> Iterator[Finding]:
    lowest, highest = _PYTHONS
    if not lowest <= python <= highest:
        found = f"Python {python[0]}.{python[1]} runs; 3.11 to 3.13 are tested"
        yield Finding(
            "set-up", "bad", found, "python3 install_and_run.py --python 3.12"
        )
    if platform.system() == "Darwin" and platform.machine() != "arm64":
        found = "this Python is for Intel: MLX needs one for Apple silicon (arm64)"
        yield Finding("set-up", "bad", found, "brew install python@3.12, then again")


def _packages() -> Iterator[Finding]:
    """Those that are missing, or too old for this project."""
    try:
        wanted = importlib.metadata.requires("litellm-mlx") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("set-up", "bad", "litellm-mlx is not installed here", _INSTALL)
        return
    for text in wanted:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("set-up", "bad", f"{need.name} is missing", _INSTALL)
            continue
        if not need.specifier.contains(version, prereleases=True):
            found = f"{need.name} {version} is installed, {need.specifier} is needed"
            yield Finding("set-up", "bad", found, _INSTALL)
    try:
        importlib.metadata.version("sidecar")
    except importlib.metadata.PackageNotFoundError:
        return
    found = "another package called `sidecar` takes our server's import name"
    yield Finding("set-up", "bad", found, "pip uninstall sidecar, then " + _INSTALL)


def _disk(home: Path) -> Iterator[Finding]:
    while not home.exists() and home != home.parent:
        home = home.parent
    if not os.access(home, os.W_OK):
        found = f"{home} cannot be written to"
        yield Finding("set-up", "bad", found, "set MLX_CACHE_HOME to a folder of yours")
    free = shutil.disk_usage(home).free / _GB
    if free < _MIN_FREE_GB:
        found = f"{free:.1f} GB are free in {home}"
        yield Finding("set-up", "warn", found, "free some, or set MLX_CACHE_HOME")


def _env_mode(env_path: Path) -> Iterator[Finding]:
    """Keys stand in it."""
    try:
        mode = env_path.stat().st_mode & 0o777
    except OSError:
        return
    if mode & 0o077:
        found = f"{env_path} may hold keys and can be read by others ({mode:o})"

        def fix() -> None:
            env_path.chmod(0o600)

        yield Finding("settings", "warn", found, f"chmod 600 {env_path}", fix)
