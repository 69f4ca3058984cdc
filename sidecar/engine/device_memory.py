"""Budgets of the memory that the model lives in: a CUDA card has its own, not RAM."""

import logging
from collections.abc import Callable

import mlx.core as mx

from sidecar.config.device_settings import DeviceConfig
from sidecar.config.settings import EngineConfig
from sidecar.config.values import physical_memory
from sidecar.kv.kv_layers import MUCH_KEPT

logger = logging.getLogger(__name__)

_LEFT_FREE = 8 << 30
_MIN = 4 << 30
_MAX_BUFFERS = 499_000  # of a process on Metal, where the device does not say
_DELAY_STEPS = 8  # on Metal; what omlx found to do (its pull 648)


def device_memory() -> int:
    """Bytes of memory of the device that MLX computes on; unified memory is RAM."""
    return _own_memory() or physical_memory()


def _own_memory() -> int:
    """Bytes that are not RAM: a CUDA card's; 0 where there are none."""
    return int(mx.device_info().get("total_memory", 0))


def process_limit(config: EngineConfig) -> int:
    """MAX_PROCESS_MEMORY in bytes, else the device's memory less 8 GB, at least 4."""
    asked = config.max_process_bytes
    return asked or max(device_memory() - _LEFT_FREE, _MIN)


def buffer_limit() -> int | None:
    """How many buffers the device takes of a process; None: as many as fit."""
    resource_limit = mx.device_info().get("resource_limit")  # Metal only
    if resource_limit:
        return int(resource_limit)
    return _MAX_BUFFERS if mx.metal.is_available() else None


def release_delay(config: DeviceConfig) -> int:
    """RELEASE_DELAY_STEPS, else some on Metal and none elsewhere."""
    if config.release_delay is not None:
        return config.release_delay
    return _DELAY_STEPS if mx.metal.is_available() else 0


def much_kept() -> int:
    """
    Bytes that MLX's allocator may keep behind a prompt: a 32nd of the device's.

    To give them back takes as long as several decode steps (14 to 24 ms on an H200).
    """
    return max(MUCH_KEPT, device_memory() // 32)


def has_memory_of_its_own() -> bool:
    """Whether nobody but the server wants the device's memory: it is not RAM."""
    return _own_memory() > 0


class WiredMemory:
    """
    What macOS keeps wired for the GPU (WIRED_LIMIT). GPU thread only; `description` is
    for any thread.

    By default nothing: while streams come and go, wiring panics the kernel of many Macs
    (mlx issue 3186: three panics in 108 s with it, none in 4.2 hours without).

    Args:
        asked: bytes, or `weights`: as much as the loaded models take.
    """

    def __init__(self, asked: int | str) -> None:
        maximum = mx.device_info().get("max_recommended_working_set_size")
        self._max = int(maximum) if maximum else None  # else nothing can be wired here
        self._asked = asked
        self._weights: dict[str, int] = {}
        self._limit = 0
        if self._max is not None:
            self._set: Callable[[int], int] = _own_setter()
            self._follow()

    @property
    def description(self) -> str | None:
        """In words; None: nothing is ever wired on this device. Any thread."""
        if self._max is None:
            return None
        gigabytes = f"{self._limit / (1 << 30):.1f} GB"
        if self._asked == "weights":
            return f"weights ({gigabytes})"
        return gigabytes if self._limit else "off"

    def note(self, name: str, num_bytes: int) -> None:
        """A model's weights are there, or with 0 bytes gone."""
        self._weights[name] = num_bytes
        if self._max is not None and self._asked == "weights":
            mx.synchronize()  # no step may be under way
            self._follow()

    def change(self, num_bytes: int) -> int:
        """Wire so many bytes from now on, as WIRED_LIMIT does; what was before."""
        before, self._asked = self._limit, num_bytes
        mx.synchronize()
        self._follow()
        return before

    def _follow(self) -> None:
        whole = sum(self._weights.values())
        wanted = whole if isinstance(self._asked, str) else self._asked
        maximum = self._max or 0
        if wanted > maximum:
            logger.warning("WIRED_LIMIT is cut to %d, the most that can be", maximum)
        if (
            min(wanted, maximum) != self._limit
        ):  # where nothing is wired it is not called
            self._limit = min(wanted, maximum)
            self._set(self._limit)


_OWN = "_mlx_set_wired_limit"


def _own_setter() -> Callable[[int], int]:
    """
    MLX's function, which libraries find replaced by one that does nothing.

    Generators of mlx-lm, mlx-vlm and mlx-audio wire the device's whole recommended
    size while they run, and offer no way to ask them not to.
    """
    own: Callable[[int], int] = getattr(mx.set_wired_limit, _OWN, mx.set_wired_limit)

    def unchanged(_limit: int) -> int:
        return 0

    setattr(unchanged, _OWN, own)
    vars(mx)["set_wired_limit"] = unchanged
    return own
