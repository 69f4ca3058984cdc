"""
The first run in a terminal as an animated picture: docs/first-run.svg.

    python -m tools.write_first_run [--out FILE]

Clones this repository into an empty folder and runs the README's first command there,
in a terminal of 80 columns, until both servers are up. What is drawn is what was
printed, and when; pauses are cut to a second, and folders of this machine are `~`.
Ports 8080 and 4000 have to be free.
"""

import argparse
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

REPO = Path(__file__).parents[1]
OUT = REPO / "docs" / "first-run.svg"

_COMMAND = "python3 install_and_run.py"
_LAST_LINE = "Ctrl-C"  # of the block that says that all is up
_LIMIT_S, _STOP_S = 900.0, 60.0
_MAX_PAUSE_S = 1.0
_LINE_PX, _CHAR_PX, _EDGE_PX = 18, 8.4, 14
_COLUMNS = 80
# What a line is made anew with, and colours; nothing else is printed.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CLEAR = "\x1b[K"


@dataclass(frozen=True, slots=True)
class Chunk:
    """What was printed at once. at: seconds from the start."""

    at: float
    text: str


@dataclass(slots=True)
class Shown:
    """What a line showed, from when until when; None: until the end."""

    row: int
    text: str
    begin: float
    end: float | None = None


def record(command: Sequence[str], folder: Path, last: str) -> Iterator[Chunk]:
    """
    What a command prints in a terminal, until it prints `last` and a line's end.

    Raises:
        TimeoutError: it did not within 15 minutes. ChildProcessError: it ended before.
    """
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(_COLUMNS), "NO_COLOR": "1"}
    process = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    started, seen = time.monotonic(), ""
    try:
        while not (last in seen and seen.endswith("\n")):
            if time.monotonic() - started > _LIMIT_S:
                raise TimeoutError(f"no {last!r}: {seen[-500:]}")
            if not select.select([ours], [], [], 1.0)[0]:
                continue
            text = _read(ours)
            if not text:
                raise ChildProcessError(f"it ended: {seen[-500:]}")
            seen += text
            yield Chunk(time.monotonic() - started, text)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(_STOP_S)
        os.close(ours)


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 1 << 16).decode(errors="replace")
    except OSError:  # of Linux, where nobody holds the other end
        return ""


def without_pauses(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same with no pause longer than a second."""
    found, at, before = list[Chunk](), 0.0, 0.0
    for chunk in chunks:
        at += min(chunk.at - before, _MAX_PAUSE_S)
        before = chunk.at
        found.append(Chunk(at, chunk.text))
    return found


def lines_of(chunks: Sequence[Chunk]) -> list[Shown]:
    """Each line's texts, as a terminal shows them: CR and erasing make one anew."""
    found, row, text = list[Shown](), 0, ""
    for chunk in chunks:
        for part in re.split(r"(\r\n|\n|\r)", chunk.text):
            if part in ("\r\n", "\n"):
                _show(found, row, text, chunk.at)
                row, text = row + 1, ""
            elif part == "\r":
                _show(found, row, text, chunk.at)
                text = ""
            else:
                kept = "" if _CLEAR in part else text
                text = kept + _CONTROL.sub("", part.rpartition(_CLEAR)[2])
        _show(found, row, text, chunk.at)
    return [shown for shown in found if shown.text.strip()]


def _show(found: list[Shown], row: int, text: str, at: float) -> None:
    """Have a line show a text from now on; the empty one leaves it as it is."""
    last = next((s for s in reversed(found) if s.row == row and s.end is None), None)
    if not text or (last and last.text == text):
        return
    if last:
        last.end = at
    found.append(Shown(row, text, at))


def draw(lines: Sequence[Shown]) -> str:
    """
    An SVG of so many lines that plays once, by SMIL.

    Where that is not played, what was last shown is seen.
    """
    height = (max(shown.row for shown in lines) + 2) * _LINE_PX + 2 * _EDGE_PX
    width = _COLUMNS * _CHAR_PX + 2 * _EDGE_PX
    texts = [_text(shown) for shown in lines]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} '
            f'{height}" role="img" aria-label="The first run in a terminal">',
            f'<rect width="{width:.0f}" height="{height}" rx="6" fill="#0d1117"/>',
            '<g font-family="ui-monospace,Menlo,Consolas,monospace" font-size="14" '
            'fill="#c9d1d9">',
            *texts,
            "</g>",
            "</svg>",
            "",
        ]
    )


def _text(shown: Shown) -> str:
    y = _EDGE_PX + (shown.row + 1) * _LINE_PX
    begin = f"{shown.begin:.2f}s"
    if shown.end is None:
        plays = (
            f'<set attributeName="visibility" to="hidden" begin="0s" end="{begin}"/>'
        )
        start = ""
    else:
        end = f"{shown.end:.2f}s"
        plays = (
            f'<set attributeName="visibility" to="visible" begin="{begin}" '
            f'end="{end}"/>'
        )
        start = ' visibility="hidden"'
    text = escape(shown.text[:_COLUMNS]).replace(" ", "\u00a0")  # else they are joined
    return f'<text x="{_EDGE_PX}" y="{y}"{start}>{text}{plays}</text>'


def main(argv: list[str]) -> int:
    """Exit code 0; the picture is written."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.write_first_run", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args(argv).out
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "litellm-mlx"
        subprocess.run(["git", "clone", "-q", str(REPO), str(folder)], check=True)
        printed = [*record(_COMMAND.split(), folder, _LAST_LINE)]
    own = re.compile(f"{re.escape(root)}|{re.escape(str(Path.home()))}")
    chunks = [Chunk(0.0, f"$ {_COMMAND}\r\n")]
    chunks += [Chunk(chunk.at, own.sub("~", chunk.text)) for chunk in printed]
    out.write_text(draw(lines_of(without_pauses(chunks))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
