"""
The BLAS shim: lets the Linux CPU build of MLX compute at a realistic speed.

Only for measuring; never shipped, never loaded by the sidecar itself.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).with_name("fast_blas.c")


def build_shim(folder: Path) -> Path | None:
    """
    Compile the shim into `folder`, or find it there.

    Returns:
        What to put into LD_PRELOAD; None off Linux and with a CUDA card, where MLX
        does not compute with BLAS.
    Raises:
        FileNotFoundError: no gcc, or numpy is not from a wheel.
    """
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists():
        return None
    openblas = _find_openblas()
    key = hashlib.sha256(str(openblas).encode() + _SOURCE.read_bytes()).hexdigest()
    shim = folder / f"libfast_blas_{key[:12]}.so"
    if not shim.exists():
        part = shim.with_suffix(".part")
        subprocess.run(
            [
                "gcc", "-O2", "-shared", "-fPIC", "-o", str(part), str(_SOURCE),
                str(openblas), f"-Wl,-rpath,{openblas.parent}",
            ],
            check=True,
        )  # fmt: skip
        part.replace(shim)
    return shim


def _find_openblas() -> Path:
    import numpy as np

    libs = Path(np.__file__).parents[1] / "numpy.libs"
    found = sorted(libs.glob("libscipy_openblas64_*.so"))
    if not found:
        raise FileNotFoundError(f"no OpenBLAS in {libs}: numpy is not from a wheel")
    return found[0]
