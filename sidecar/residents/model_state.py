"""One model of the pool: what is offered, how it stands, what others see of it."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from sidecar.core.errors import SidecarError, Unavailable
from sidecar.output.syntax_settings import SyntaxSettings

LoadState = Literal[
    "unloaded",
    "loading",
    "loaded",
    "unloading",
    "failed",
    "unavailable",
    "incomplete",
    "broken",
]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """
    A model that can be served.

    Args:
        kind: see detection. place: what the loader finds it by.
        size_bytes: of its weights, as far as that is known before a load.
        context_len: most tokens, as far as that is known before a load.
        vector_len: numbers of an embedding, if it gives any.
        syntax: what is set of its output. draft_model, adapter_path: see ModelSettings.
        takes_images: as far as that is known before a load.
        state: other than `unloaded`, why it cannot be loaded is in `fault`.
    """

    id: str
    aliases: tuple[str, ...] = ()
    kind: str = "llm"
    place: str | None = None
    size_bytes: int = 0
    context_len: int | None = None
    vector_len: int | None = None
    pinned: bool = False
    ttl_s: float | None = None
    syntax: SyntaxSettings = field(default_factory=SyntaxSettings)
    draft_model: str | None = None
    adapter_path: str | None = None
    takes_images: bool = False
    state: LoadState = "unloaded"
    fault: str | None = None


def draft_place(spec: ModelSpec, default: str | None) -> str | None:
    """
    Where the model that drafts for one is found; None: it has none.

    Args:
        default: DRAFT_MODEL.
    """
    place = default if spec.draft_model is None else spec.draft_model
    return os.path.expanduser(place) if place else None


@dataclass(frozen=True, slots=True)
class ModelView:
    """
    A served model as people and clients see it.

    Args:
        actual_bytes: of its weights as loaded. idle_s: since its last use.
        step: where its load is. read_bytes: of its weights, while they are read; 0: of
            a kind that does not say. estimated_load_s: None: nothing was measured yet.
    """

    id: str
    aliases: tuple[str, ...]
    kind: str
    state: LoadState
    size_bytes: int
    actual_bytes: int | None
    max_input_tokens: int | None
    vector_len: int | None
    takes_images: bool
    pinned: bool
    ttl_s: float | None
    num_leases: int
    num_loads: int
    idle_s: float | None
    step: str | None
    read_bytes: int | None
    estimated_load_s: float | None
    load_error: str | None

    @property
    def is_usable(self) -> bool:
        """Whether a request for it may be answered."""
        return self.state not in ("unavailable", "incomplete", "broken")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def anew(error: SidecarError) -> SidecarError:
    """The same error, to be raised again: its traceback holds arrays of its frames."""
    same = type(error)(error.message, param=error.param)
    same.retry_after_s = error.retry_after_s
    return same


class ServedModel(Protocol):
    """What the pool and what tells of models ask of a loaded one, of any kind."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def failed_tests(self) -> tuple[str, ...]:
        """Names of the tests at load that it failed."""

    def counters(self) -> dict[str, int]:
        """What it has counted of reuse."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights, measured."""

    @property
    def takes_images(self) -> bool:
        """Whether images may be asked about."""

    def close(self) -> int:
        """Give its weights back; the bytes."""


class Tell(Protocol):
    """Takes the name of a load's step, and the bytes of weights that it has read."""

    def __call__(self, step: str, num_bytes: int = 0) -> None:
        """Note it."""


E = TypeVar("E", bound=ServedModel)


@dataclass(eq=False)
class Waiter:
    """A request that waits for a model; it has its lease from when the load ends."""

    has_lease: bool = False


@dataclass(eq=False)
class ModelState(Generic[E]):
    """
    How a model stands; under the pool's lock.

    Args:
        is_wanted: its load is waited for. is_leaving: it goes once nobody uses it.
        freed_bytes: what its last unload gave back.
        is_offered: whether its files are still there.
        folder: that it was loaded from, if its place is one.
    """

    spec: ModelSpec
    state: LoadState = "unloaded"
    resident: E | None = None
    pinned: bool = field(init=False)
    ttl_s: float | None = field(init=False)
    num_leases: int = 0
    num_loads: int = 0
    last_access: float = 0.0
    is_wanted: bool = False
    wanted_at: float = 0.0
    is_leaving: bool = False
    freed_bytes: int = 0
    is_available: bool = True
    folder: Path | None = None
    waiters: set[Waiter] = field(default_factory=set)
    step: str | None = None
    read_bytes: int = 0
    failure: SidecarError | None = None
    num_failures: int = 0
    failed_at: float = -math.inf

    def __post_init__(self) -> None:
        self.state = self.spec.state
        self.pinned, self.ttl_s = self.spec.pinned, self.spec.ttl_s

    def update_spec(self, spec: ModelSpec) -> None:
        """It was found again, maybe whole by now, or broken."""
        is_settled = self.state not in ("loading", "unloading")
        if self.spec.state != spec.state and self.resident is None and is_settled:
            self.state, self.failure = spec.state, None
        if not self.is_available:
            self.is_available, self.is_leaving = True, False
        self.spec = spec

    @property
    def is_ready(self) -> bool:
        """Whether it can be leased now."""
        return self.state == "loaded" and not self.is_leaving

    @property
    def is_deleted(self) -> bool:
        """Whether it is loaded, and the folder that it came from is not there."""
        is_loaded = self.resident is not None and self.folder is not None
        return is_loaded and not os.path.isdir(self.folder or "")

    @property
    def is_idle(self) -> bool:
        """Whether it may leave: loaded, not pinned, in nobody's use."""
        return self.state == "loaded" and not self.pinned and not self.num_leases

    @property
    def held_bytes(self) -> int:
        """Bytes its weights take now."""
        return self.resident.num_bytes if self.resident is not None else 0

    def loaded(self, resident: E, now: float) -> None:
        """It is there."""
        self.resident, self.state, self.step = resident, "loaded", None
        place = Path(self.spec.place) if self.spec.place else None
        self.folder = place.resolve() if place and place.is_dir() else None
        self.num_loads += 1
        self.failure, self.last_access = None, now
        self.is_leaving = False
        self.is_leaving = not self.is_available
        self._serve_waiters()

    def stays(self) -> None:
        """It was to leave, and does not: it is still in use."""
        self.is_leaving = False
        if self.is_ready:
            self._serve_waiters()

    def _serve_waiters(self) -> None:
        """At once, else it could be the next load's victim before they wake."""
        self.num_leases += len(self.waiters)
        for waiter in self.waiters:
            waiter.has_lease = True
        self.waiters.clear()

    def failed(self, failure: SidecarError, now: float) -> None:
        """It is not there, and why."""
        self.state, self.failure, self.step = "failed", anew(failure), None
        self.num_failures += 1
        # What had no room may have it at the next request.
        self.failed_at = -math.inf if isinstance(failure, Unavailable) else now

    def unloaded(self, freed_bytes: int) -> None:
        """It is gone."""
        self.resident, self.state = None, "unloaded"
        self.is_leaving, self.freed_bytes = False, freed_bytes

    def seen(self, now: float, load_s: float | None) -> ModelView:
        """For people and clients."""
        resident, spec = self.resident, self.spec
        return ModelView(
            id=spec.id,
            aliases=spec.aliases,
            kind=spec.kind,
            state=self.state,
            size_bytes=spec.size_bytes,
            actual_bytes=resident.num_bytes if resident else None,
            max_input_tokens=resident.max_context if resident else spec.context_len,
            vector_len=spec.vector_len,
            takes_images=(resident or spec).takes_images,
            pinned=self.pinned,
            ttl_s=self.ttl_s,
            num_leases=self.num_leases,
            num_loads=self.num_loads,
            idle_s=now - self.last_access if resident else None,
            step=self.step,
            read_bytes=self.read_bytes if self.state == "loading" else None,
            estimated_load_s=None if resident else load_s,
            load_error=self.failure.message if self.failure else spec.fault,
        )
