"""Both servers raise their limit of open files when they start."""

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
SIDECAR, PLUGIN = "sidecar.infra.file_limit", "litellm_mlx.file_limit"
LIMIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
"""
SAY = """
import resource
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(code: str, soft: int, hard: int) -> tuple[int, int]:
    command = [sys.executable, "-c", LIMIT + code + SAY, str(soft), str(hard)]
    said = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=300, check=True
    )
    first, second = said.stdout.split()[-2:]
    return int(first), int(second)


@pytest.mark.parametrize("module", [SIDECAR, PLUGIN])
@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(256, 1024, 1024), (256, 256, 256), (900, 1000, 1000)]
)
def test_the_soft_limit_is_raised(
    module: str, soft: int, hard: int, raised: int
) -> None:
    """To what servers need, as far as the hard limit allows."""
    code = f"from {module} import raise_file_limit; raise_file_limit()"
    assert limits_after(code, soft, hard) == (raised, hard)


def test_a_limit_that_is_higher_stays() -> None:
    """Somebody meant it."""
    code = f"import {SIDECAR} as it; it._WANTED = 100; it.raise_file_limit()"
    assert limits_after(code, 256, 1024) == (256, 1024)


def test_the_plugin_raises_it_when_litellm_loads_it() -> None:
    """Whoever started LiteLLM."""
    code = "import os; os.environ['LITELLM_LOCAL_MODEL_COST_MAP'] = 'True'\n"
    code += "import litellm_mlx.provider"
    assert limits_after(code, 256, 2048) == (2048, 2048)


def test_the_sidecar_raises_it_when_it_starts() -> None:
    """Before a model is loaded: here there is none, and the start ends."""
    code = "from sidecar.__main__ import main; main(['--model', '/nonexistent/model'])"
    assert limits_after(code, 256, 2048) == (2048, 2048)
