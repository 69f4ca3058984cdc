"""Budgets of the memory that the model lives in: a CUDA card has its own, not RAM."""

import mlx.core as mx

from sidecar.config.settings import EngineConfig
from sidecar.config.values import physical_memory

_LEFT_FREE = 8 << 30
_LEAST = 4 << 30


def device_memory() -> int:
    """Bytes of memory of the device that MLX computes on; unified memory is RAM."""
    own = mx.device_info().get("total_memory")  # CUDA only
    return int(own) if own else physical_memory()


def process_limit(config: EngineConfig) -> int:
    """MAX_PROCESS_MEMORY in bytes, else the device's memory less 8 GB, at least 4."""
    asked = config.max_process_bytes
    return asked or max(device_memory() - _LEFT_FREE, _LEAST)
