"""The models of this server: names, loading, leases."""

import contextlib
import difflib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from sidecar.core.errors import ModelLoadFailed, ModelNotFound, Unavailable

logger = logging.getLogger(__name__)

_MOST_NAME_CHARS = 200

State = Literal["unloaded", "loading", "loaded", "failed"]


class Loadable(Protocol):
    """What the pool asks of a loaded model."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together."""

    def drain(self) -> None:
        """Take no new work."""

    def close(self) -> int:
        """Give its memory back; the bytes."""


E = TypeVar("E", bound=Loadable)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A served model as clients see it."""

    id: str
    aliases: tuple[str, ...]
    state: State
    max_input_tokens: int | None
    load_error: str | None


class ResidentPool(Generic[E]):
    """
    Loads the default model once and leases it out. Safe from any thread.

    Args:
        model_id: the name clients use; `aliases` work as well, as does no name.
        load: makes the engine; runs on a thread of its own, may take minutes.
        load_wait_s: how long a request waits for a load before it gets 503.
    """

    def __init__(
        self,
        model_id: str,
        aliases: tuple[str, ...],
        load: Callable[[], E],
        load_wait_s: float,
    ) -> None:
        self._id = model_id
        self._aliases = aliases
        self._load = load
        self._load_wait_s = load_wait_s
        self._changed = threading.Condition()
        self._state: State = "unloaded"
        self._engine: E | None = None
        self._error: str | None = None
        self._num_leases = 0
        self._is_draining = False

    def entries(self) -> tuple[ModelEntry, ...]:
        """All served models."""
        with self._changed:
            limit = self._engine.max_context if self._engine else None
            return (
                ModelEntry(self._id, self._aliases, self._state, limit, self._error),
            )

    @property
    def num_leases(self) -> int:
        """Requests that hold an engine."""
        with self._changed:
            return self._num_leases

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new work."""
        return self._is_draining

    def start_loading(self) -> None:
        """Begin to load the default model, unless it is loaded or being loaded."""
        with self._changed:
            if self._state in ("loading", "loaded"):
                return
            self._state, self._error = "loading", None
        threading.Thread(target=self._run_load, name="load", daemon=True).start()

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[E]:
        """
        Hold the engine of a model for the length of a request.

        Raises:
            ModelNotFound: no served model has that name.
            Unavailable: it is still loading after `load_wait_s`.
            ModelLoadFailed: its load failed.
        """
        self._resolve(name)
        engine = self._wait_loaded()
        with self._changed:
            self._num_leases += 1
        try:
            yield engine
        finally:
            with self._changed:
                self._num_leases -= 1

    def peek(self) -> E | None:
        """The loaded engine, without a lease; for a look at numbers."""
        with self._changed:
            return self._engine

    def drain(self) -> None:
        """Take no new work."""
        self._is_draining = True
        engine = self.peek()
        if engine:
            engine.drain()

    def close(self) -> int:
        """Drop the engine; the bytes that came back. Repeatable."""
        with self._changed:
            engine, self._engine, self._state = self._engine, None, "unloaded"
        return engine.close() if engine else 0

    def _run_load(self) -> None:
        engine: E | None = None
        error: str | None = None
        try:
            engine = self._load()
        except Exception as failure:
            # Who asked for it says it in one sentence; where it was is for developers.
            logger.debug("load failed model=%s", self._id, exc_info=True)
            error = str(failure) or type(failure).__name__
        with self._changed:
            self._engine, self._error = engine, error
            self._state = "loaded" if engine else "failed"
            self._changed.notify_all()

    def _wait_loaded(self) -> E:
        with self._changed:
            self._changed.wait_for(
                lambda: self._state in ("loaded", "failed"), self._load_wait_s
            )
            if self._engine is not None:
                return self._engine
            if self._state == "failed":
                raise ModelLoadFailed(self._error or "the model could not be loaded")
        raise Unavailable("the model is still loading", retry_after_s=10)

    def _resolve(self, name: str) -> None:
        names = (self._id, *self._aliases)
        if name in ("", "default") or name in names:
            return
        name = name[:_MOST_NAME_CHARS]  # it is said again, and compared with all
        close = difflib.get_close_matches(name, names, n=10, cutoff=0.3) or list(names)
        raise ModelNotFound(
            f"no model named {name!r} is served; there is: {', '.join(close)}",
            param="model",
        )
