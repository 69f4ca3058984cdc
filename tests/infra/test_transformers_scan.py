"""transformers looks through its models once, and finds what it found twice."""

import subprocess
import sys

_SCRIPT = """
import os
from unittest import mock
from sidecar.infra.transformers_scan import scan_once
scan_once(os.environ)
from transformers.utils import import_utils
whole = import_utils.create_import_structure_from_path
with mock.patch("builtins.open", side_effect=AssertionError("a file was read")):
    import transformers.models
file = transformers.models.__file__
found = whole(file)
assert len(found) > 100, len(found)
read = next(cell.cell_contents for cell in whole.__closure__)
read.cache_clear()
assert found == read(file)
print(transformers.AutoTokenizer.__module__)
"""


def test_the_second_look_finds_the_same_and_reads_no_file() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "transformers.models.auto.tokenization_auto\n"
    assert done.stderr == ""  # no advice to install PyTorch
