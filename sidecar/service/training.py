"""Trains adapters for requests of `/native/train`: one at a time, beside all else."""

import contextlib
import logging
import math
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sidecar.core.errors import (
    BadRequest,
    Busy,
    NotFound,
    RequestCancelled,
    ServingPaused,
    SidecarError,
    Unavailable,
)
from sidecar.core.native import TrainRequest
from sidecar.engine.adapters.adapter_files import NAME, AdapterFolder
from sidecar.residents.model_state import ServedModel
from sidecar.residents.pool import ResidentPool
from sidecar.residents.resident import Resident, require_text

if TYPE_CHECKING:
    from sidecar.engine.native.lora_training import TrainingStep

logger = logging.getLogger(__name__)

_MAX_KEPT = 64  # trainings that have ended
_MAX_LOSSES = 10_000  # of one, the newest
_HELD = 4  # a turn holds so many times the memory of a prefill: activations
_SLOWER = 3  # than a prefill is what also computes gradients
_MIN_TURN = 64  # tokens
State = Literal["waiting", "running", "done", "cancelled", "failed"]


@dataclass(eq=False)
class Training:
    """
    One adapter's way. Written by its own thread; read by any.

    Args:
        losses: of the newest steps, (number, loss).
    """

    id: str
    request: TrainRequest
    state: State = "waiting"
    error: str | None = None
    losses: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=_MAX_LOSSES)
    )
    num_tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    is_cancelled: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def note(self, step: "TrainingStep", peak_bytes: int) -> None:
        """A step was made."""
        self.losses.append((step.number, round(step.loss, 5)))
        self.num_tokens += step.num_tokens
        self.seconds += step.seconds
        self.peak_bytes = max(self.peak_bytes, peak_bytes)

    def refusal(self) -> SidecarError:
        """What requests are told while it has the server for itself."""
        left_s = self._left_s
        return ServingPaused(
            f"the adapter {self.request.name} is trained, with exclusive: true",
            retry_after_s=30 if left_s is None else math.ceil(left_s) or 1,
        )

    @property
    def _num_done(self) -> int:
        return self.losses[-1][0] if self.losses else 0

    @property
    def _left_s(self) -> float | None:
        """Seconds that it will take still; None: nobody knows."""
        done = self._num_done
        if not done or self.state not in ("waiting", "running"):
            return None
        return self.seconds / done * (self.request.job.iters - done)

    def as_json(self) -> dict[str, Any]:
        """How far it is."""
        losses, job, left_s = list(self.losses), self.request.job, self._left_s
        return {
            "id": self.id,
            "state": self.state,
            "model": self.request.model,
            "adapter": self.request.name,
            "step": self._num_done,
            "iters": job.iters,
            "loss": losses[-1][1] if losses else None,
            "losses": losses,
            "tokens_per_s": (
                round(self.num_tokens / self.seconds, 1) if self.seconds else None
            ),
            "seconds": round(self.seconds, 3),
            "seconds_left": None if left_s is None else round(left_s, 1),
            "peak_bytes": self.peak_bytes,
            "error": self.error,
        }


class TrainingService:
    """
    Begins trainings, tells how they stand, ends them. Any thread.

    Args:
        stall_s: how long a turn of one may take, if it is not a single row.
    """

    def __init__(
        self,
        pool: ResidentPool[ServedModel],
        adapters: AdapterFolder,
        stall_s: float,
    ) -> None:
        self._pool, self._adapters, self._stall_s = pool, adapters, stall_s
        self._lock = threading.Lock()
        self._trainings: dict[str, Training] = {}

    def begin(self, request: TrainRequest) -> Training:
        """
        Begin to train an adapter, on a thread of its own.

        Raises:
            BadRequest: there is no folder for it, or its name is taken. Busy: another
                one is trained. SidecarError: the model is unknown.
        """
        folder = self._free_folder(request.name)
        self._pool.entry(request.model)
        training = Training(f"train-{secrets.token_hex(8)}", request)
        with self._lock:
            if any(not one.ended.is_set() for one in self._trainings.values()):
                raise Busy("an adapter is being trained", retry_after_s=30)
            while len(self._trainings) >= _MAX_KEPT:
                del self._trainings[next(iter(self._trainings))]
            self._trainings[training.id] = training
        threading.Thread(
            target=self._run, args=[training, folder], name="training", daemon=True
        ).start()
        return training

    def find(self, training_id: str) -> Training:
        """
        A training by its id.

        Raises:
            NotFound: there is none.
        """
        with self._lock:
            found = self._trainings.get(training_id)
        if found is None:
            raise NotFound(f"no training has the id {training_id[:64]!r}")
        return found

    def all(self) -> list[Training]:
        """All that are known, the newest last."""
        with self._lock:
            return list(self._trainings.values())

    def cancel(self, training_id: str) -> Training:
        """End a training before its next step; nothing of it is kept."""
        training = self.find(training_id)
        training.is_cancelled = True
        return training

    def _free_folder(self, name: str) -> Path:
        if self._adapters.root is None:
            raise BadRequest("adapters have no folder: set ADAPTER_DIR", param="name")
        if not NAME.fullmatch(name):
            raise BadRequest(
                "name must be 1..100 letters, digits, dots, dashes or underlines",
                param="name",
            )
        if (folder := self._adapters.root / name).exists():
            raise BadRequest(f"name {name} is taken", param="name")
        return folder

    def _run(self, training: Training, folder: Path) -> None:
        draft = folder.with_name(f".{folder.name}.{training.id}")
        for left in folder.parent.glob(f".{folder.name}.train-*"):  # of a kill
            shutil.rmtree(left, ignore_errors=True)
        try:
            with self._pool.lease(training.request.model) as leased:
                self._train(training, require_text(leased), draft)
            draft.rename(folder)
            training.state = "done"
        except RequestCancelled:
            training.state = "cancelled"
        except SidecarError as error:
            training.state, training.error = "failed", error.message
        except OSError as error:
            logger.warning("an adapter could not be written: %s", error)
            why = f"the adapter cannot be written: {error.strerror}"
            training.state, training.error = "failed", why
        except Exception as error:
            logger.exception("a training failed")
            why = str(error).replace(str(folder.parent), "ADAPTER_DIR")[:300]
            training.state, training.error = "failed", why or type(error).__name__
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(draft)
            training.ended.set()

    def _train(self, training: Training, resident: Resident, draft: Path) -> None:
        # Not before: few servers train, and mlx_lm.tuner takes 30 ms to import.
        from sidecar.engine.native.lora_training import (
            LoraTraining,
            read_examples,
            write_adapter,
        )

        engine, request, job = (
            resident.engine,
            training.request,
            training.request.job,
        )
        if applied := engine.model.applied:
            raise BadRequest(
                f"{resident.name} is read with {applied}, which is part of it: an "
                "adapter that is trained on both could not be served",
                param="model",
            )
        check = self._checking(training)
        examples = read_examples(request.rows, engine.model.tokenizer, job, check)
        _require_rows(max(max(ids) for ids, _ in examples), engine.model.vocab_size)
        longest = max(len(ids) for ids, _ in examples)
        training.state = "running"

        def report(step: "TrainingStep") -> None:
            training.note(step, engine.guard.process.peak_bytes)

        fitting = int(self._stall_s / (_SLOWER * max(engine.token_s, 1e-9)))
        turn_tokens = max(_MIN_TURN, fitting)
        training_steps = LoraTraining(engine.model, job, turn_tokens)
        steps = training_steps.steps(examples, report, check)
        at_once = min(job.batch_size * longest, max(turn_tokens, longest))
        held = min(_HELD * at_once, engine.max_context - 1)
        paused_by = training.refusal if job.exclusive else None
        weights = engine.run_beside(
            steps, held, is_for_idle=True, paused_by=paused_by, check=check
        )
        engine.run_on_gpu(lambda: write_adapter(draft, weights, engine.model, job))

    def _checking(self, training: Training) -> Callable[[], None]:
        def check() -> None:
            if training.is_cancelled:
                raise RequestCancelled("the training was cancelled")
            if self._pool.is_stopped or self._pool.is_draining:
                raise Unavailable("the server is going down")

        return check


def _require_rows(largest_id: int, vocab_size: int) -> None:
    if largest_id >= vocab_size:
        raise BadRequest(
            f"data has a token beyond 0..{vocab_size - 1}: the model has no row for it",
            param="data",
        )
