"""docs/batches.md: its program does what it says."""

import re
import subprocess
import sys
from pathlib import Path

from tests.batches.conftest import Batches

PAGE = (Path(__file__).parents[2] / "docs" / "batches.md").read_text()


def test_the_program_runs(batches: Batches, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "http://127.0.0.1:8080" in program
    program = program.replace("http://127.0.0.1:8080", batches.app.url)
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert ended.stdout.startswith("completed ")
    assert ended.stdout.count('"custom_id":"note-') == 3
