"""
Writes requirements/: the releases that install_and_run.py installs, with hashes.

    python -m tools.lock_dependencies

Takes the newest that pyproject.toml allows, resolved once for all platforms and
Pythons. base.txt has what is always needed, a file of an extra's name what it adds, and
uv.txt the installer. No file names an index: that is the user's.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).parents[1]
LOCKS = REPO / "requirements"
_HEAD = "# Written by `python -m tools.lock_dependencies`.\n"
_UV = [sys.executable, "-m", "uv"]
_AS_LINES = ["--no-header", "--no-annotate", "--no-emit-project", "--frozen"]


def lock_texts() -> Iterator[tuple[str, str]]:
    """Each file's name and text; asks the package index."""
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(REPO / "pyproject.toml", folder)
        _run(folder, "lock")
        base = _export(folder, "--group", "build")
        yield "base.txt", "".join(base)
        for extra in extras:
            added = [
                each for each in _export(folder, "--extra", extra) if each not in base
            ]
            yield f"{extra}.txt", "".join(added)
        yield "uv.txt", "".join(_export(folder, "--only-group", "uv"))


def _export(folder: str, *wanted: str) -> Sequence[str]:
    """The requirements, each with its hashes."""
    text = _run(folder, "export", *_AS_LINES, *wanted)
    if "://" in text:
        raise SystemExit("a requirement names a place: it must come from an index")
    return re.findall(r"^\S.*\n(?: .*\n)*", text, re.MULTILINE)


def _run(folder: str, *arguments: str) -> str:
    command = [*_UV, *arguments, "--quiet", "--python", sys.executable]
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def main() -> None:
    """Write all files."""
    texts = dict(lock_texts())
    LOCKS.mkdir(exist_ok=True)
    for name, text in texts.items():
        (LOCKS / name).write_text(_HEAD + text)


if __name__ == "__main__":
    main()
