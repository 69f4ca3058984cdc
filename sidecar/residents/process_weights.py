"""The memory that weights are in, as the pool asks about it: of the process, by MLX."""

import contextlib
from collections.abc import Callable, Iterator

import mlx.core as mx

from sidecar.core.errors import InsufficientMemory
from sidecar.core.format_bytes import format_bytes
from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.loading.checkpoint_files import (
    MemoryLimit,
    memory_limit,
)
from sidecar.engine.process_memory import Admission, ProcessMemory
from sidecar.kv.eviction import KVBudget

_PRESSED_AT = 0.95


class ProcessWeights:
    """
    Weights among all else that the process holds. Any thread.

    Args:
        limit_bytes: MAX_MODEL_MEMORY; None: what the process may take.
    """

    def __init__(
        self,
        process: ProcessMemory,
        admission: Admission,
        stored: KVBudget,
        gpu: GpuThread,
        limit_bytes: int | None,
    ) -> None:
        self._process = process
        self._admission = admission
        self._stored = stored
        self._gpu = gpu
        self._limit_bytes = limit_bytes

    @property
    def limit(self) -> MemoryLimit:
        """What all weights together may take."""
        limit = memory_limit(self._process.limit_bytes, self._limit_bytes)
        assert limit is not None
        return limit

    def unaccounted(self, num_bytes: int) -> int:
        """Bytes in use beside stored KV and so many of weights."""
        return mx.get_active_memory() - self._stored.num_bytes - num_bytes

    def is_pressed(self) -> bool:
        """Whether the process is so near its limit that an idle model has to go."""
        return mx.get_active_memory() > _PRESSED_AT * self._process.limit_bytes

    @contextlib.contextmanager
    def loading(self, num_bytes: int) -> Iterator[Callable[[], None]]:
        """
        Reserve a load's bytes until they are there; stored KV makes room for them.

        Raises:
            InsufficientMemory: what runs now takes too much.
        """
        reserved = self._admission.reserved.total
        with self._admission.loading(num_bytes) as arrived:
            needed = num_bytes + reserved
            if not self._gpu.call(lambda: self._process.relieve(needed)):
                raise InsufficientMemory(
                    f"a model of {format_bytes(num_bytes)} does not fit beside "
                    "what runs",
                    retry_after_s=10,
                )
            yield arrived
