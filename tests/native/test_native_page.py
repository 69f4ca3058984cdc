"""docs/native.md: its request, its program and its commands do what it says."""

import json
import re
import subprocess
import sys
from pathlib import Path

from sidecar.cli.jsonl import Session
from tests.native.conftest import Ask

PAGE = (Path(__file__).parents[2] / "docs" / "native.md").read_text()


def test_the_request_is_answered(ask: Ask) -> None:
    (body,) = re.findall(r"-d '(\{.*?\})'", PAGE, re.DOTALL)
    status, answer = ask("/native/classify", **json.loads(body))
    assert status == 200, answer
    for row in answer["results"]:
        assert row["label"] in (" good", " bad")


def test_the_program_runs(tmp_path: Path) -> None:
    """With the built-in model in place of one of the hub."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    program = re.sub(r'open_model\("[^"]+"\)', "open_model()", program)
    assert "open_model()" in program
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    assert "'generated_tokens': " in ended.stdout
    assert not list(tmp_path.iterdir())  # no logs, no cache beside the program


def test_each_command_is_there() -> None:
    named = set(re.findall(r'"cmd": "(\w+)"', PAGE))
    assert named == {*Session(sys.stdout)._acts, "cancel", "quit"}
