"""
Makes one model of an adapter and its base, by mlx-lm.

    mlx-sidecar fuse --model FOLDER --adapter-path adapters/NAME --save-path fused
"""

import sys


def main(argv: list[str]) -> int:
    """Exit codes: 0 written, 1 it failed, 2 bad usage."""
    from mlx_lm import fuse

    before, sys.argv = sys.argv, ["mlx-sidecar fuse", *argv]
    try:
        fuse.main()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        sys.stderr.write(f"fuse: {error}\n")
        return 1
    finally:
        sys.argv = before
    return 0
