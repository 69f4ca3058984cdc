"""What a benchmark ran on: machine, load, versions."""

import contextlib
import importlib.metadata
import os
import platform
from pathlib import Path

_PACKAGES = (
    "mlx", "mlx-cpu", "mlx-lm", "litellm", "transformers", "tokenizers", "numpy",
)  # fmt: skip


def facts() -> dict[str, str]:
    """For the head of a report."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else "unknown"
