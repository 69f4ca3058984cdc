"""Which adapters of a model are in its bank, and who uses them."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from sidecar.core.errors import BadRequest, InsufficientMemory
from sidecar.engine.adapters.adapter_bank import read_pairs
from sidecar.engine.adapters.adapter_files import AdapterFiles
from sidecar.engine.adapters.banked_linear import Pair
from sidecar.engine.gpu_thread import GpuThread, load_thread
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.process_memory import ProcessMemory

logger = logging.getLogger(__name__)

_MAX_IDLE = 32  # adapters that stay in the bank although nobody uses them
_TRIED = ((5, 6, 7), (5, 6, 7))  # ids that a fresh adapter is tried on, beside none


@dataclass(eq=False)
class _Loaded:
    """An adapter in the bank; `num_users` requests are read with it."""

    row: int
    num_users: int = 0
    last_use: float = 0.0


class AdapterLeases:
    """
    Leases adapters of one model to requests; loads and unloads them. Any thread.

    Args:
        process: whose memory they are counted against.
        rows_in_use: those that prompts and answers in hand are read with; asked on the
            GPU thread. One whose client has left may run for another step.
    """

    def __init__(
        self,
        model: LoadedModel,
        gpu: GpuThread,
        process: ProcessMemory,
        rows_in_use: Callable[[], set[int]],
    ) -> None:
        self._model, self._gpu, self._process = model, gpu, process
        self._rows_in_use = rows_in_use
        self._lock = threading.Lock()
        self._loaded: dict[str, _Loaded] = {}  # by digest

    @contextlib.contextmanager
    def leased(self, adapter: AdapterFiles) -> Iterator[int]:
        """
        The row of the bank that holds an adapter, for as long as it is used.

        Raises:
            BadRequest: it does not fit this model. InsufficientMemory.
        """
        # Read before the lock is taken: a disk that hangs must not hold others.
        pairs = None if self._has(adapter) else self._read(adapter)
        with self._lock:
            loaded = self._loaded.get(adapter.digest)
            if loaded is None:
                loaded = self._load(adapter, pairs or self._read(adapter))
            loaded.num_users += 1
        try:
            yield loaded.row
        finally:
            with self._lock:
                loaded.num_users -= 1
                loaded.last_use = time.monotonic()
                self._drop_idle(_MAX_IDLE)
                is_unused = not any(one.num_users for one in self._loaded.values())
            if is_unused:
                self._gpu.post(self._model.adapters.forget_picked)

    def let_go_idle(self) -> int:
        """
        Take those that nobody uses out of the bank; how many they were.

        On the GPU thread: while another thread loads one, which waits for this one,
        none leaves.
        """
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            return self._drop_idle(0)
        finally:
            self._lock.release()

    @property
    def num_loaded(self) -> int:
        """Adapters in the bank."""
        with self._lock:
            return len(self._loaded)

    def _has(self, adapter: AdapterFiles) -> bool:
        with self._lock:
            return adapter.digest in self._loaded

    def _read(self, adapter: AdapterFiles) -> dict[str, Pair]:
        self._require(adapter, adapter.num_bytes)
        data = adapter.read()
        try:
            return load_thread().call(lambda: read_pairs(data))
        except Exception as error:  # noqa: BLE001 - whatever a reader raises
            why = str(error)
        raise self._unfit(adapter, why)  # not within: it would keep what was read

    def _unfit(self, adapter: AdapterFiles, why: str) -> BadRequest:
        why = why[:300]
        logger.warning("adapter %s is not served: %s", adapter.name, why)
        return BadRequest(
            f"adapter {adapter.name} does not fit {self._model.name}: {why}",
            param="adapter",
        )

    def _require(self, adapter: AdapterFiles, num_bytes: int) -> None:
        """
        Have so many bytes free for an adapter.

        Raises:
            InsufficientMemory: they are not, though all that is idle has left.
        """
        process = self._process
        if num_bytes <= process.free_bytes:
            return
        process.count_anew(self._gpu)
        if num_bytes > process.free_bytes:
            raise InsufficientMemory(
                f"adapter {adapter.name} needs {num_bytes >> 20} MiB, and "
                f"{process.free_bytes >> 20} are left",
                param="adapter",
                retry_after_s=5,
            )

    def _load(self, adapter: AdapterFiles, pairs: dict[str, Pair]) -> _Loaded:
        bank = self._model.adapters
        if bank.growth(adapter, pairs) > self._process.free_bytes:
            self._drop_idle(0)
        self._require(adapter, bank.growth(adapter, pairs))
        try:
            row = self._gpu.call(lambda: self._put(adapter, pairs))
        except Exception as error:  # noqa: BLE001 - whatever an architecture raises
            why = str(error)
        else:
            found = self._loaded[adapter.digest] = _Loaded(row)
            logger.info("adapter loaded name=%s row=%d", adapter.name, row)
            return found
        raise self._unfit(adapter, why)  # not within: it would keep the matrices

    def _put(self, adapter: AdapterFiles, pairs: dict[str, Pair]) -> int:
        """Load it; see that it gives numbers, and a row beside it what it did."""
        model, bank = self._model, self._model.adapters
        row = bank.load(model.model, adapter, pairs)
        try:
            both = model.forward(mx.array(_TRIED), model.new_cache(), None, (row, 0))
            alone = model.forward(mx.array(_TRIED), model.new_cache())
            step = model.forward(
                mx.array(_TRIED)[:, :1], model.new_cache(), None, (row, 0)
            )
            apart = mx.abs(both[1] - alone[1]).max()
            is_same = apart <= 1e-2 * mx.abs(alone[1]).max()
            numbers = mx.isfinite(both[0]).all() & mx.isfinite(step[0]).all()
            if not bool(numbers.item()):
                raise ValueError("the model gives no numbers with it")
            if not bool(is_same.item()):
                raise ValueError("a row without it is read otherwise beside it")
        except BaseException:
            bank.unload(model.model, row)
            raise
        return row

    def _drop_idle(self, maximum: int) -> int:
        """Unload the idle ones that were used last longest ago, but for so many."""
        idle = [(d, one) for d, one in self._loaded.items() if not one.num_users]
        idle.sort(key=lambda pair: pair[1].last_use)
        spare = idle[: max(0, len(idle) - maximum)]
        gone = [digest for digest, one in spare if self._unload(one.row)]
        for digest in gone:
            del self._loaded[digest]
        return len(gone)

    def _unload(self, row: int) -> bool:
        """Take an adapter out of the bank, unless something is read with it still."""

        def unload() -> bool:
            is_used = row in self._rows_in_use()
            if not is_used:
                self._model.adapters.unload(self._model.model, row)
            return not is_used

        return self._gpu.call(unload)
