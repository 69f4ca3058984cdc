"""Settings of the device that MLX computes on, and of its driver."""

from dataclasses import dataclass

from sidecar.config.sources import setting
from sidecar.config.values import integer, wired

# fmt: off


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The GPU's driver (of Macs; elsewhere nothing is wired)"""

    wired_limit: int | str = setting(0, "WIRED_LIMIT", wired,
        "What macOS keeps wired for the GPU. `weights`: as much as the loaded models "
        "take. On many Macs wiring panics the kernel: docs/troubleshooting.md.",
        shown="off")
    release_delay: int | None = setting(
        None, "RELEASE_DELAY_STEPS", integer(0, 1024),
        "Decode steps for which the arrays of an ended request are still held. 0: "
        "they go at once.", shown="8 on a Mac, else 0")
