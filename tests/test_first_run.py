"""The picture of the first run: what a terminal shows, and when."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.write_first_run import (
    OUT,
    Chunk,
    Shown,
    draw,
    lines_of,
    record,
    without_pauses,
)

README = Path(__file__).parents[1] / "README.md"
_TEXT = "{http://www.w3.org/2000/svg}text"
_PRINTS = r"""
import sys, time
print("one", flush=True)
for share in ("10 %", "20 %"):
    sys.stdout.write("\r\x1b[K" + share); sys.stdout.flush(); time.sleep(0.1)
print("\r\x1b[Kdone\n\nstop Ctrl-C", flush=True)
time.sleep(60)
"""


def last_frame(svg: str) -> list[str]:
    """The lines that are seen at the end, or where nothing is played."""
    texts = ElementTree.fromstring(svg).iter(_TEXT)
    seen = [text.text for text in texts if "visibility" not in text.attrib]
    return [line.replace("\u00a0", " ") for line in seen if line]


def test_a_command_is_recorded_until_all_is_up(tmp_path: Path) -> None:
    """And is ended then, as by Ctrl-C."""
    command = [sys.executable, "-c", _PRINTS]
    lines = lines_of(list(record(command, tmp_path, "Ctrl-C")))
    assert [(line.row, line.text) for line in lines] == [
        (0, "one"), (1, "10 %"), (1, "20 %"), (1, "done"), (3, "stop Ctrl-C"),
    ]  # fmt: skip
    assert [line.end is None for line in lines] == [True, False, False, True, True]
    assert last_frame(draw(lines)) == ["one", "done", "stop Ctrl-C"]


def test_a_command_that_ends_is_no_first_run(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match="it ended: no"):
        list(record([sys.executable, "-c", "print('no')"], tmp_path, "Ctrl-C"))


def test_no_pause_is_longer_than_a_second() -> None:
    chunks = [Chunk(0.5, "a"), Chunk(9.0, "b"), Chunk(9.25, "c")]
    assert [chunk.at for chunk in without_pauses(chunks)] == [0.5, 1.5, 1.75]


def test_what_drives_a_page_is_text() -> None:
    svg = draw([Shown(0, "<script>1 & 2</script>", 0.0)])
    assert last_frame(svg) == ["<script>1 & 2</script>"]


def test_the_picture_shows_the_block_of_the_readme() -> None:
    """Line by line, but for what is the machine's own."""
    seen = last_frame(OUT.read_text())
    block = README.read_text().partition("\nReady.\n")[2].partition("```")[0]
    own = ("  agents", "  ...")
    for line in block.splitlines():
        if not line.startswith(own):
            assert line in seen, line
