"""House rules that no linter knows: sizes, leftovers, foreign addresses."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PACKAGES = ("sidecar", "litellm_mlx")
SOURCES = sorted(p for name in PACKAGES for p in (REPO / name).rglob("*.py"))
MAX_LINES = 600
MAX_FUNCTION_LINES = 60
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)

# Spelt so that this file does not hold what it looks for.
LEFTOVERS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
ADDRESSES = re.compile(
    "|".join(
        re.escape(a + b)
        for a, b in [
            ("huggingface", ".co"), ("hf-mirror", ".com"), ("pypi", ".org"),
            ("pythonhosted", ".org"), ("registry.npmjs", ".org"), ("anaconda", ".org"),
            ("../sha", "red"), ("/work/sha", "red"), ("/work/ve", "nv"),
        ]
    )
)  # fmt: skip


def name_of(path: Path) -> str:
    return str(path.relative_to(REPO))


def tracked() -> list[Path]:
    """All files of the repository, new ones included; empty outside of git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    ended = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, check=False
    )
    return [REPO / line for line in ended.stdout.splitlines()]


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
        return ""


def test_there_is_something_to_look_at() -> None:
    """The rules below are not true of an empty list only."""
    assert len(SOURCES) > 50


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_fits_in_the_head(path: Path) -> None:
    """At most 600 lines."""
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    """At most 60 lines, docstring included."""
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, FUNCTION)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_what_is_public_says_what_it_does(path: Path) -> None:
    """Each file, and each public class and function of it, has a docstring."""
    tree = ast.parse(path.read_text())
    if not tree.body:
        return  # an empty __init__.py
    silent = [] if ast.get_docstring(tree) else ["the file itself"]
    for owner in [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))]:
        if owner is not tree and owner.name.startswith("_"):  # type: ignore[union-attr]
            continue
        for node in owner.body:  # type: ignore[attr-defined]
            if (
                isinstance(node, (*FUNCTION, ast.ClassDef))
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
            ):
                silent.append(node.name)
    assert silent == []


def test_the_sidecar_does_not_print() -> None:
    """It logs; its few words to a terminal go to stderr by write."""
    printing = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if path.is_relative_to(REPO / "sidecar")
        and not path.is_relative_to(REPO / "sidecar" / "tools")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert printing == []


def test_nothing_is_left_for_later() -> None:
    """No marker of unfinished work in any source or test."""
    found = [
        name_of(path)
        for path in tracked()
        if path.suffix in (".py", ".toml", ".yaml", ".sh")
        and LEFTOVERS.search(text_of(path))
    ]
    assert found == []


def test_nothing_depends_on_where_it_was_made() -> None:
    """No registry's address and no path of the workshop in any file."""
    found = {
        name_of(path): match.group()
        for path in tracked()
        if (match := ADDRESSES.search(text_of(path)))
    }
    assert found == {}


def mixed_tuples(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameters that are a tuple of different things: several, packed into one."""
    found = []
    for argument in (*function.args.args, *function.args.kwonlyargs):
        kind = argument.annotation
        if not (isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "tuple"):
            continue
        parts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        if len({ast.unparse(part) for part in parts} - {"..."}) > 1:
            found.append(argument.arg)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_parameter_is_several(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    packed = {
        node.name: mixed_tuples(node)
        for node in ast.walk(tree)
        if isinstance(node, FUNCTION) and mixed_tuples(node)
    }
    assert packed == {}
