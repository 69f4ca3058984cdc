"""The device's memory by hand: what is in use, its limits, and what is given back."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import mlx.core as mx

from sidecar.core.errors import BadRequest, ValidationFailed
from sidecar.core.native import AskedLimits
from sidecar.engine.device_memory import WiredMemory
from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.process_memory import ProcessMemory
from sidecar.kv.kv_layers import release_freed_memory


class MemoryControls:
    """
    Asks and changes MLX's limits. Any thread.

    No limit goes beyond MAX_PROCESS_MEMORY, and none outlives the process.
    """

    def __init__(
        self, process: ProcessMemory, wired: WiredMemory, gpu: GpuThread
    ) -> None:
        self._process, self._wired, self._gpu = process, wired, gpu

    def use(self) -> dict[str, int]:
        """Bytes in use, most that ever were, kept for reuse, and the limit."""
        return {
            "active_bytes": mx.get_active_memory(),
            "peak_bytes": mx.get_peak_memory(),
            "cache_bytes": mx.get_cache_memory(),
            "max_process_memory": self._process.limit_bytes,
        }

    def change(self, asked: AskedLimits) -> dict[str, int]:
        """
        Set the limits that are named; what each was before.

        Raises:
            ValidationFailed: one is beyond MAX_PROCESS_MEMORY. BadRequest: nothing is
                ever wired on this device.
        """
        maximum = self._process.limit_bytes
        named = {name: n for name, n in asdict(asked).items() if n is not None}
        for name, num_bytes in named.items():
            if not 0 <= num_bytes <= maximum:
                raise ValidationFailed(
                    f"{name} must be 0..{maximum} bytes (MAX_PROCESS_MEMORY), "
                    f"got {num_bytes}",
                    param=name,
                )
        if "wired_limit" in named and self._wired.description is None:
            raise BadRequest(
                "wired_limit must be left out: nothing is wired on this device",
                param="wired_limit",
            )
        setters: dict[str, Callable[[int], int]] = {
            "cache_limit": mx.set_cache_limit,
            "memory_limit": mx.set_memory_limit,
            "wired_limit": self._wired.change,
        }
        return self._gpu.call(lambda: {n: setters[n](b) for n, b in named.items()})

    def clear(self) -> int:
        """Give what the allocator keeps back to the system; the bytes."""

        def clear() -> int:
            before = mx.get_cache_memory()
            release_freed_memory()
            return before - mx.get_cache_memory()

        return self._gpu.call(clear)

    def reset_peak(self) -> int:
        """Count the peak anew from now on; what it was, in bytes."""

        def reset() -> int:
            before = mx.get_peak_memory()
            mx.reset_peak_memory()
            self._process.sample()
            return before

        return self._gpu.call(reset)

    def device(self) -> dict[str, Any]:
        """What MLX says of the device, and whether it is Metal."""
        facts = self._gpu.call(lambda: dict(mx.device_info()))
        is_metal = mx.metal.is_available()
        return {**facts, "device": str(mx.default_device()), "metal": is_metal}
