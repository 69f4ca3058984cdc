"""What is served, whether it can answer, and what people do with models by hand."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sidecar.config.sources import ConfigError
from sidecar.core.errors import BadRequest
from sidecar.engine.adapters.adapter_files import AdapterFolder
from sidecar.engine.device_memory import WiredMemory
from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.loading.applied_adapter import own_folder, why_not
from sidecar.engine.loading.checkpoint_details import describe
from sidecar.engine.loading.download_progress import DownloadProgress, DownloadState
from sidecar.engine.process_memory import ProcessMemory
from sidecar.residents.capability_record import CapabilityRecord, CapabilityRecords
from sidecar.residents.catalog import DEFAULT_NAMES
from sidecar.residents.detection import TEXT_KINDS
from sidecar.residents.load_waits import LoadSteps
from sidecar.residents.model_settings import keep_settings
from sidecar.residents.model_state import ModelView, ServedModel
from sidecar.residents.pool import ResidentPool
from sidecar.residents.resident import Resident

logger = logging.getLogger(__name__)

_LONGEST_WATCH_S = 300.0


@dataclass(frozen=True, slots=True)
class Health:
    """
    Of the process. `ok` can answer, whatever single models do; `loading` and
    `downloading` will, `degraded` can with other models than the default one;
    `draining` ends what it has begun; `dead` and `stuck` are to be started again.

    Args:
        wired: what is wired for the GPU; None: nothing ever is on this device.
        reason: why it is degraded.
        failed_tests: of loaded models, those at their load; what failed is not used.
        is_paused: an exclusive training has the server for itself.
    """

    status: str
    models: tuple[ModelView, ...]
    memory_limit_bytes: int
    wired: str | None = None
    reason: str | None = None
    download: DownloadState | None = None
    failed_tests: tuple[str, ...] = ()
    is_paused: bool = False

    @property
    def load(self) -> ModelView | None:
        """The default model while its weights are read."""
        default = self.models[0]
        return default if self.status == "loading" and default.read_bytes else None

    @property
    def is_well(self) -> bool:
        """Whether nobody has to do something about the process."""
        return self.status not in ("dead", "stuck", "draining")

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered now, with one model at least."""
        return self.status in ("ok", "degraded") and not self.is_paused


@dataclass(frozen=True, slots=True)
class Vitals:
    """
    Where the state of the process is read; none of it waits for the GPU.

    Args:
        longest_step_s: a step of the GPU thread that takes longer is none any more.
        is_paused: whether requests are refused while an adapter is trained.
    """

    gpu: GpuThread
    longest_step_s: float
    download: DownloadProgress
    process: ProcessMemory
    wired: WiredMemory
    is_paused: Callable[[], bool]


class ModelService:
    """
    Lists models, reports health, loads and unloads by hand. Any thread.

    Args:
        draft_fault: why a model of a place cannot draft for another one.
    """

    def __init__(
        self,
        pool: ResidentPool[ServedModel],
        vitals: Vitals,
        settings_file: Path,
        capabilities: CapabilityRecords,
        adapters: AdapterFolder,
        draft_fault: Callable[[str], str | None],
    ) -> None:
        self._capabilities = capabilities
        self._draft_fault = draft_fault
        self._adapters = adapters
        self._pool = pool
        self._vitals = vitals
        self._settings_file = settings_file
        self._settings_lock = threading.Lock()

    def entries(self) -> tuple[ModelView, ...]:
        """The models that requests may name; looked for anew, if it was long ago."""
        self._pool.rescan(at_once=False)
        return tuple(entry for entry in self._pool.entries() if entry.is_usable)

    def details(self, model_id: str) -> dict[str, Any] | None:
        """What the files of a loaded text model say of it; None: it is not loaded."""
        for resident in self._pool.loaded():
            is_meant = model_id in (resident.name, f"openai/{resident.name}")
            if is_meant and isinstance(resident, Resident):
                return describe(resident.engine.model)
        return None

    def adapters(self) -> dict[str, list[str]]:
        """
        Names of adapters by the id of the model that each was trained on.

        One that does not say is the default model's.
        """
        entries = self._pool.entries()
        found: dict[str, list[str]] = {}
        for name, base in self._adapters.bases().items():
            names = {base, Path(base).name} if base else set(DEFAULT_NAMES)
            for entry in entries:
                own = {entry.id, entry.id.removeprefix("openai/"), *entry.aliases}
                if entry.kind in TEXT_KINDS and names & own:
                    found.setdefault(entry.id, []).append(name)
                    break
        return found

    def all_entries(self) -> tuple[ModelView, ...]:
        """Those as well that cannot be loaded, and why."""
        return self._pool.entries()

    def capabilities(self, model_id: str) -> CapabilityRecord | None:
        """What a model was found to be able to do; None: it was not probed."""
        return self._capabilities.find(model_id)

    def health(self) -> Health:
        """The state of the whole server; cheap, and never waits for the GPU."""
        vitals, entries = self._vitals, self._pool.entries()
        default = entries[0]
        found = Health(
            "ok",
            entries,
            vitals.process.limit_bytes,
            vitals.wired.description,
            failed_tests=self._failed_tests(),
            is_paused=vitals.is_paused(),
        )
        if not vitals.gpu.is_alive:
            return replace(found, status="dead")
        if vitals.gpu.step_s > vitals.longest_step_s:
            return replace(found, status="stuck")
        if self._pool.is_draining:
            return replace(found, status="draining")
        if default.state == "failed" or not default.is_usable:
            return replace(found, status="degraded", reason=default.load_error)
        if default.num_loads:
            return found  # one that left since comes back when it is asked for
        download = vitals.download.state
        status = "downloading" if download else "loading"
        return replace(found, status=status, download=download)

    def rescan(self) -> tuple[ModelView, ...]:
        """Look for models anew."""
        self._pool.rescan(at_once=True)
        return self._pool.entries()

    def load(self, name: str, *, pin: bool) -> ModelView:
        """
        Load a model and wait for it.

        Raises:
            SidecarError: there is none, or no room, or it cannot be loaded.
        """
        return self._pool.load(name, pin=pin)

    def unload(self, name: str, *, force: bool) -> int:
        """
        Let a model go; the bytes that came back.

        Raises:
            ModelPinned, ModelBusy: not without `force`.
        """
        return self._pool.unload(name, force=force)

    def change(self, name: str, changes: Mapping[str, Any]) -> str | None:
        """
        Set what is given, by the names of the settings file, and keep it there.

        Returns:
            Why it holds for this run alone; None: it outlives it.

        Raises:
            BadRequest: an adapter or a draft model could not be used; nothing is set.
        """
        entry = self._pool.entry(name)
        _check_adapter(changes.get("adapter_path"))
        self._check_draft(changes.get("draft_model"))
        if (pinned := changes.get("pinned")) is not None:
            self._pool.set_pinned(name, pinned=pinned)
        if (ttl_s := changes.get("ttl_seconds")) is not None:
            self._pool.set_ttl(name, ttl_s)
        # Its own name first: as `openai/NAME` it goes while it is the default one.
        own = entry.id.removeprefix("openai/")
        names = [n for n in (own, entry.id, *entry.aliases) if n not in DEFAULT_NAMES]
        try:
            with self._settings_lock:
                keep_settings(self._settings_file, names, changes)
        except (OSError, ConfigError) as error:
            logger.warning("what was set for %s is not kept: %s", entry.id, error)
            return f"the file of settings cannot be written: {error}"
        self._pool.rescan(at_once=True)  # a load from now on is by what was set
        self._pool.try_again(name)
        return None

    def _check_draft(self, place: str | None) -> None:
        """As for an adapter; what it takes to know its tokens is left to the load."""
        if place and (why := self._draft_fault(place)):
            raise BadRequest(f"draft_model cannot be used: {why}", param="draft_model")

    def progress(self, name: str) -> LoadSteps:
        """Steps of a model's load, until `ready`, or `error` with the reason."""
        return self._pool.watch_load(name, _LONGEST_WATCH_S)

    def memory(self) -> dict[str, Any]:
        """Bytes of the process by what they are for, buffers, and what is wired."""
        process = self._vitals.process
        residents = self._pool.loaded()
        return {
            "limit": process.limit_bytes,
            "active": process.active_bytes,
            "peak": process.peak_bytes,
            "weights": sum(resident.num_bytes for resident in residents),
            "stored_kv": process.stored_bytes,
            "buffers": process.live_buffers,
            "buffers_limit": process.limit_buffers,
            "wired": self._vitals.wired.description,
        }

    def _failed_tests(self) -> tuple[str, ...]:
        residents = self._pool.loaded()
        return tuple(
            test if len(residents) == 1 else f"{resident.name}: {test}"
            for resident in residents
            for test in resident.failed_tests
        )


def _check_adapter(path: str | None) -> None:
    """Refuse now what the model's next load would fail on."""
    if path and (why := why_not(own_folder(path))):
        raise BadRequest(f"adapter_path cannot be used: {why}", param="adapter_path")
