"""Who may import whom: the contracts of pyproject.toml hold, and they bite."""

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def lint_imports(folder: Path) -> tuple[int, str]:
    """Run import-linter on a tree with our pyproject.toml."""
    code = "import sys; from importlinter.cli import lint_imports;"
    code += "sys.exit(lint_imports(cache_dir=None))"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "NO_COLOR": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    text = re.sub(r"\x1b\[[0-9;]*m", "", ended.stdout + ended.stderr)
    return ended.returncode, text


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of both packages' code, to plant violations in."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copy(REPO / "pyproject.toml", folder)
    code_only = shutil.ignore_patterns("__pycache__", "builtin_model")
    for package in ("sidecar", "litellm_mlx"):
        shutil.copytree(REPO / package, folder / package, ignore=code_only)
    return folder


def test_all_contracts_hold() -> None:
    """Imports point down, and nobody reaches past their neighbours."""
    code, text = lint_imports(REPO)
    assert code == 0, text
    assert "0 broken" in text


def imported(package: str) -> set[str]:
    """Top-level names that a package's code imports."""
    names: set[str] = set()
    for file in (REPO / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    ("package", "strangers"),
    [
        ("bench", {"tests"}),
        ("testkit", {"tests", "bench"}),
        ("sidecar", {"tests", "bench", "testkit"}),
        ("litellm_mlx", {"tests", "bench", "testkit"}),
    ],
)
def test_benches_and_tests_share_one_package(package: str, strangers: set[str]) -> None:
    """And the product knows of none of them."""
    assert imported(package) & strangers == set()


@pytest.mark.parametrize("package", ["sidecar", "litellm_mlx"])
def test_what_is_imported_is_declared(package: str) -> None:
    """In pyproject.toml itself: another package's dependency may go with a release."""
    said = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    named = ("vision", "audio", "plot")
    extras = [one for name in named for one in said["optional-dependencies"][name]]
    names = [re.split(r"[\[>=<]", one)[0] for one in (*said["dependencies"], *extras)]
    declared = {name.lower() for name in names}
    owners = {**{name.replace("-", "_"): [name] for name in names},
              **packages_distributions()}  # fmt: skip
    ours = imported(package) - set(sys.stdlib_module_names)
    for name in ours - {"sidecar", "litellm_mlx"}:
        found = {owner.lower().replace("_", "-") for owner in owners[name]}
        assert found & {one.replace("_", "-") for one in declared}, name


@pytest.mark.parametrize("folder", ["tools", "bench", "testkit", "tests", "sidecar"])
def test_what_is_imported_of_ours_exists(folder: str) -> None:
    """Also what a function imports when it runs, which the type checker skips here."""
    for file in (REPO / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module.split(".")[0] not in {"sidecar", "litellm_mlx", "testkit"}:
                continue
            module = importlib.import_module(node.module)
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_there = hasattr(module, alias.name) or importlib.util.find_spec(name)
                assert is_there, f"{file}: {name}"


VIOLATIONS = {
    "upwards": (
        "sidecar/core/events.py",
        "from sidecar.infra import metrics",
        "layers point down",
    ),
    "between siblings": (
        "sidecar/dialects/fields.py",
        "from sidecar.service import models",
        "layers point down",
    ),
    "a folder without a place": (
        "sidecar/misc/__init__.py",
        "",
        "layers point down",
    ),
    "the pipeline asks the KV": (
        "sidecar/pipeline/prepare.py",
        "from sidecar.kv import prefix_store",
        "what was said never meets its KV",
    ),
    "the plugin asks the sidecar": (
        "litellm_mlx/sse.py",
        "from sidecar.core import events",
        "plugin and sidecar meet over HTTP only",
    ),
    "a dialect parses text": (
        "sidecar/dialects/openai_chat/request.py",
        "from sidecar.output import reasoning_splitter",
        "wire formats know only JSON and core",
    ),
    "arrays in the pipeline": (
        "sidecar/pipeline/template/chat_template.py",
        "import mlx.core as mx",
        "MLX stays in engine and kv",
    ),
    "arrays in a service": (
        "sidecar/service/chat.py",
        "import mlx_lm",
        "no direct MLX above the engine",
    ),
    "sockets in a service": (
        "sidecar/service/chat.py",
        "import http.client",
        "only the server knows HTTP, nobody knows LiteLLM",
    ),
    "a circle": (
        "sidecar/core/errors.py",
        "from sidecar.core import events",
        "no circles",
    ),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_planted_violation_is_caught(case: str, tree: Path) -> None:
    """Each contract breaks when it should, and by its own name."""
    name, line, contract = VIOLATIONS[case]
    file = tree / name
    before = file.read_text() if file.exists() else None
    file.parent.mkdir(exist_ok=True)
    extra = "from sidecar.core import errors\n" if case == "a circle" else ""
    file.write_text(f"{before or ''}\n{line}\n")
    other = tree / "sidecar/core/events.py"
    untouched = other.read_text()
    if extra:
        other.write_text(untouched + extra)
    try:
        code, text = lint_imports(tree)
    finally:
        other.write_text(untouched)
        if before is None:
            shutil.rmtree(file.parent)
        else:
            file.write_text(before)
    assert code == 1, text
    assert re.search(rf"^{re.escape(contract)} BROKEN", text, re.MULTILINE), text
