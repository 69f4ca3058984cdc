"""MLX keeps more CUDA graphs than it does by itself; what a user sets, stays."""

import os
import subprocess
import sys
from pathlib import Path

from sidecar.config.names import unknown_names
from sidecar.infra.cuda_graphs import keep_cuda_graphs

# What the command does before anything imports MLX, which reads its variables then.
_SCRIPT = """
import os, sys
import sidecar.__main__ as command

def begun(config, sources):
    print("mlx.core" in sys.modules, os.environ["MLX_CUDA_GRAPH_CACHE_SIZE"])
    return 0

command._run = begun
sys.exit(command.main(["--env-file", os.devnull]))
"""


def test_what_a_user_has_set_stays() -> None:
    environ = {"MLX_CUDA_GRAPH_CACHE_SIZE": "7"}
    keep_cuda_graphs(environ)
    assert environ.pop("MLX_CUDA_GRAPH_CACHE_SIZE") == "7"
    keep_cuda_graphs(environ)
    assert int(environ["MLX_CUDA_GRAPH_CACHE_SIZE"]) > 400
    assert environ["MLX_ENABLE_CACHE_THRASHING_CHECK"] == "0"


def test_the_server_sets_it_before_mlx_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "4000"]


def test_a_user_who_sets_it_is_not_warned(tmp_path: Path) -> None:
    own = dict.fromkeys(("MLX_CUDA_GRAPH_CACHE_SIZE", "MLX_ENABLE_TF32"), "1")
    assert not [*unknown_names(tmp_path / ".env", own | {"PATH": os.defpath})]
