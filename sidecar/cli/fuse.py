"""
Makes one model of an adapter and its base, by mlx-lm.

    mlx-sidecar fuse --model FOLDER --adapter-path adapters/NAME --save-path fused
"""

import sys


def main(argv: list[str]) -> int:
    """Exit codes: 0 written, 1 it failed, 2 bad usage."""
    from sidecar.engine.native.fusion import run_fuse

    try:
        run_fuse(argv)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        sys.stderr.write(f"fuse: {error}\n")
        return 1
    return 0
