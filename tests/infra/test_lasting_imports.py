"""What is imported at the start, and what is not."""

import subprocess
import sys

_TRIED = """
import gc, sys
from sidecar.infra.lasting_imports import lasting_imports
with lasting_imports():
    import httpx
    assert not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count()
print("rich" in sys.modules, "httpx._main" in sys.modules)
httpx.Client().close()
import httpx._main
print("rich" in sys.modules)
"""


def test_the_command_line_of_httpx_is_left_out_and_can_be_had_later() -> None:
    """It colours a terminal; its libraries take a twentieth of a second."""
    told = subprocess.run(
        [sys.executable, "-c", _TRIED], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["False", "False", "True"]
