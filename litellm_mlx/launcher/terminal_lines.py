"""
What of the servers' output a person sees: what is done for them, and what is wrong.

All of it stands in the log of the servers. Here the sidecar's log becomes a line for a
load, one for the self-test and two for each request; warnings and errors stay, a
traceback as its last line.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from litellm_mlx.launcher.chatter import without_chatter

Lines = Callable[[Iterable[str]], Iterator[str]]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOGGED = re.compile(r"(\d\d:\d\d:\d\d) ([A-Z]+) (\S+) \[[^\]]*\] (.*)")
_LOADED = re.compile(r"loaded model=(.*) bytes=(\d+) seconds=([\d.]+)")
_TESTS = re.compile(r"selftest goes on between requests: ([^;]*);")
_TESTED = re.compile(r"tested reuse path=(\S+) outcome=(\S+)")
_FOR_PEOPLE = "mlx-sidecar: "
_ADDRESS = re.compile(r"http://\S+ model=")
# uvicorn's lines, and what LiteLLM serves.
_OF_A_START = re.compile(r"^INFO: +|LiteLLM: Proxy initialized with|^ {4}\S+$")
_INDENT = "    "
_GB = 1e9


def row(title: str, text: str) -> str:
    """A line of the start: what, and how it stands."""
    return f"{title:10} {text}"


def prefixed(name: str) -> Lines:
    """All lines, each with its server's name: `--verbose`."""

    def shown(lines: Iterable[str]) -> Iterator[str]:
        return (f"{name} | {line}" for line in lines)

    return shown


def sidecar_lines(lines: Iterable[str]) -> Iterator[str]:
    """Of the sidecar's output."""
    reader = _SidecarReader()
    for line in lines:
        yield from reader.read(line)


class _SidecarReader:
    """Reads the sidecar's output, line by line."""

    def __init__(self) -> None:
        self._num_tests = self._num_passed = 0

    def read(self, line: str) -> Iterator[str]:
        """What is shown of a line: nothing, or one."""
        plain = _COLOURS.sub("", line)
        logged = _LOGGED.fullmatch(plain)
        if plain.startswith(_FOR_PEOPLE):
            yield from _for_people(plain.removeprefix(_FOR_PEOPLE))
        elif logged is None:
            if not plain.startswith(_INDENT):  # not a part of a traceback
                yield f"sidecar | {line}"
        elif logged[2] != "INFO":
            yield f"sidecar | {logged[1]} {logged[2]} {logged[4]}"
        elif logged[4].startswith(("request started", "request ended")):
            yield f"{logged[1]} {line[line.index('request ') :]}"
        else:
            yield from self._of_a_load(logged[4])

    def _of_a_load(self, text: str) -> Iterator[str]:
        if found := _LOADED.match(text):
            size = int(found[2]) / _GB
            yield row("load", f"{found[1]}, {size:.1f} GB in {found[3]} s")
        elif found := _TESTS.match(text):
            self._num_tests, self._num_passed = len(found[1].split(",")), 0
        elif found := _TESTED.match(text):
            self._num_passed += found[2] == "ok"
            if self._num_passed == self._num_tests:
                count = f"{self._num_passed} of {self._num_tests}"
                yield row("self-test", f"{count} ways of reuse are right")


def _for_people(text: str) -> Iterator[str]:
    """What is said to a person: a download, a warning."""
    if _ADDRESS.match(text):
        return
    if text.startswith("downloading "):
        yield row("download", text.removeprefix("downloading "))
    else:
        yield f"sidecar | {text}"


def litellm_lines(lines: Iterable[str]) -> Iterator[str]:
    """Of LiteLLM's output."""
    is_trace = False
    for line in without_chatter(lines):
        plain = _COLOURS.sub("", line)
        if plain.startswith(("During handling of", "The above exception was")):
            continue
        if plain.startswith("Traceback (most recent call last)"):
            is_trace = True
        elif is_trace and (not plain.strip() or plain.startswith(" ")):
            continue
        else:
            is_trace = False
            if plain.strip() and not _OF_A_START.search(plain):
                yield f"litellm | {line}"
