"""A small project with a copy of install_and_run.py, and wheels for it."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[1] / "install_and_run.py"
# The Python behind the venv the tests run in: one that can make venvs itself.
BASE = sys._base_executable  # type: ignore[attr-defined]

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "litellm-mlx"
version = "1"
dependencies = ["needed"]
[project.optional-dependencies]
cpu = []
cuda = []
dev = []
vision = []
audio = []
"""
# Enough of a build backend for an editable install, so that pip needs no index.
BACKEND = """
import zipfile
EXTRAS = ("cpu", "cuda", "dev", "vision", "audio")
def build_editable(folder, settings=None, metadata=None):
    name = "litellm_mlx-1-py3-none-any.whl"
    meta = "Metadata-Version: 2.1\\nName: litellm-mlx\\nVersion: 1\\n"
    meta += "Requires-Dist: needed\\n"
    meta += "".join(f"Provides-Extra: {extra}\\n" for extra in EXTRAS)
    wheel = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as file:
        file.writestr("litellm_mlx-1.dist-info/METADATA", meta)
        file.writestr("litellm_mlx-1.dist-info/WHEEL", wheel)
        file.writestr("litellm_mlx-1.dist-info/RECORD", "")
    return name
"""
# Stands in for the launcher and for pytest: says how it was called.
ECHO = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *ignored: sys.exit(17))
print("ECHO", __spec__.name, os.getcwd(), sys.prefix, sys.argv[1:], flush=True)
print("KEPT BACK", [s.name for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())])
time.sleep(30 if "wait" in sys.argv else 0)
sys.exit(3)
"""


def load_script() -> ModuleType:
    """install_and_run.py as a module."""
    spec = importlib.util.spec_from_file_location("install_and_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Project:
    """A small project with a copy of the script, as if just cloned."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copy(SCRIPT, root)
        (root / "pyproject.toml").write_text(PYPROJECT)
        (root / "backend.py").write_text(BACKEND)
        (root / ".env.example").write_text("# MODEL_PATH=\n")
        for name in ("litellm_mlx", "pytest"):
            (root / name).mkdir()
            (root / name / "__init__.py").touch()
        (root / "litellm_mlx" / "launcher.py").write_text(ECHO)
        (root / "pytest" / "__main__.py").write_text(ECHO)
        (root / "tools").mkdir()
        (root / "tools" / "smoke.py").write_text("raise SystemExit('does not answer')")
        (root / "home").mkdir()
        self.wheels = root / "wheels"
        self.wheels.mkdir()
        self.add_wheel("needed", "1", {"needed.py": "VERSION = 1"})
        # First on PATH a shim as pyenv leaves it: there, but it does not run.
        self.shims = root / "shims"
        self.shims.mkdir()
        for version in ("3.11", "3.12", "3.13"):
            make_script(self.shims / f"python{version}", "echo not here >&2; exit 127")

    def command(self, *arguments: str) -> list[str]:
        return [BASE, str(self.root / SCRIPT.name), *arguments]

    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.shims}:/usr/bin:/bin",
            "HOME": str(self.root / "home"),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": self.wheels.as_uri(),
        }

    def run(self, *arguments: str, cwd: Path | None = None, **env: str) -> "Result":
        done = subprocess.run(
            self.command(*arguments),
            cwd=cwd or self.root,
            env={**self.environment(), **env},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        return Result(done)

    def add_wheel(self, name: str, version: str, files: dict[str, str]) -> str:
        """A wheel of these files that can be installed from now on; its digest."""
        path = self.wheels / f"{name}-{version}-py3-none-any.whl"
        about = f"{name}-{version}.dist-info"
        wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        with zipfile.ZipFile(path, "w") as file:
            for place, text in files.items():
                entry = zipfile.ZipInfo(place)
                entry.external_attr = 0o100755 << 16  # or its scripts do not run
                file.writestr(entry, text)
            file.writestr(f"{about}/METADATA", meta)
            file.writestr(f"{about}/WHEEL", wheel)
            file.writestr(f"{about}/RECORD", "")
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def add_uv(self) -> str:
        """A wheel of uv, which is the one that the tests have; its digest."""
        uv = Path(sys.prefix, "bin", "uv")
        return self.add_wheel(
            "uv", "99", {"uv-99.data/scripts/uv": f"#!/bin/sh\nexec '{uv}' \"$@\"\n"}
        )

    def lock(self, name: str, requirement: str, digest: str) -> None:
        """Write a file of requirements/, of one release or of none."""
        folder = self.root / "requirements"
        folder.mkdir(exist_ok=True)
        line = f"{requirement} --hash=sha256:{digest}\n" if requirement else ""
        (folder / f"{name}.txt").write_text(line)

    def change(self) -> None:
        """Change pyproject.toml, so that the next start installs."""
        with (self.root / "pyproject.toml").open("a") as file:
            file.write("# changed\n")

    def version_of_needed(self) -> str:
        """What the project's venv imports."""
        command = [self.root / ".venv" / "bin" / "python", "-c"]
        code = "import needed; print(needed.VERSION)"
        return subprocess.check_output([*command, code], text=True).strip()


class Result:
    """What came of a run."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.error = done.returncode, done.stdout, done.stderr
        self.has_installed = "Installing" in done.stdout


def make_script(path: Path, body: str) -> None:
    """Write a shell script that can be run."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
