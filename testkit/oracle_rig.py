"""
A real sidecar with eyes: what each request's model read, reused, and computed.

The model, the store's `restore` and the pipeline's `prepare` of the running server are
wrapped; nothing is replaced. Traps cancel or fail a request at an exact place.
"""

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from sidecar.app import App
from sidecar.core.prompt import ModelIds
from sidecar.engine.job import Job
from sidecar.engine.sampling import LogitsProcessor
from sidecar.infra.logs import request_id as request_id_var
from sidecar.kv.eviction import Limits
from sidecar.pipeline.prepare import PreparedPrompt
from testkit.oracle_script import Script, script_of
from testkit.real_templates import BY_NAME, Family, write_tokenizer
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model

BUDGET = 24 << 20  # of told conversations some dozens fit
SETTINGS = {
    "PREFILL_STEP_SIZE": "48",  # prompts take several chunks
    "PROMPT_CACHE_MAX_BYTES": str(BUDGET),
    "SNAPSHOT_BOUNDARY_MIN_GAP_TOKENS": "32",
    "CACHE_PIN_MIN_GAIN": "16",
    "CACHE_SELFTEST": "off",
}

_SETTLE_S = 60.0


@dataclass
class Seen:
    """
    A request from inside.

    Args:
        cached_len: what the engine restored. logits: of each step, by choice.
        forced: what was sampled at a step instead of the likeliest token.
    """

    prompt: PreparedPrompt
    cached_len: int = 0
    forced: dict[int, int] = field(default_factory=dict)
    logits: dict[int, list[mx.array]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trap:
    """At the `nth` chunk or step of a request: `cancel` it, or `fail` the step."""

    where: str
    nth: int
    action: str


class _Spy:
    """The model, telling the rig of every forward pass."""

    def __init__(self, model: Any, rig: "Rig") -> None:
        self._model = model
        self._rig = rig

    def __call__(self, ids: mx.array, cache: Any = None, **told: Any) -> mx.array:
        if ids.shape[1] > 1:
            self._rig.on_chunk(ids.shape[1])
        return self._model(ids, cache=cache, **told)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class LastRows:
    """An output layer that can be told to leave out all but the last rows."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.count = 0

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.layer(hidden[:, -self.count :])


class Rig:
    """One server; requests may come from several threads."""

    def __init__(
        self, app: App, jobs: "JobTap", folder: Path, family: Family | None = None
    ) -> None:
        self.app = app
        self.family = family
        with app.pool.lease("") as served:
            self.engine, self.pipeline = served.engine, served.pipeline
        self.store, self.model = self.engine.store, self.engine.model.model
        self._chat = app.listener.routes._services.chat
        self._loop: Any = self.engine._loop
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._by_request: dict[str, Seen] = {}
        self._by_ids: dict[int, Seen] = {}
        self._traps: dict[str, Trap] = {}
        self._counts: dict[str, int] = {}
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.script: Script | None = script_of(family, self._ids_of)
        self._http = httpx.Client(base_url=app.url, timeout=60)
        jobs.on_row = self._on_row
        self._wrap()

    def _wrap(self) -> None:
        prepare, restore = self.pipeline.prepare, self.store.restore

        def prepared(*args: Any) -> PreparedPrompt:
            prompt = prepare(*args)
            with self._lock:
                seen = Seen(prompt, forced=self._forced(prompt))
                self._by_request[request_id_var.get()] = seen
                self._by_ids[id(prompt.model_ids)] = seen
            return prompt

        def restored(ids: ModelIds, *more: Any) -> Any:
            result = restore(ids, *more)
            with self._lock:
                self._by_ids[id(ids)].cached_len = result.cached_len
            return result

        self.pipeline.prepare = prepared  # type: ignore[method-assign]
        self.store.restore = restored  # type: ignore[method-assign]
        self._head = self._watched_head()
        # The loaded model is frozen for everybody else.
        object.__setattr__(self.engine.model, "model", _Spy(self.model, self))

    def _watched_head(self) -> "LastRows":
        owner = getattr(self.model, "language_model", self.model)
        owner.lm_head = LastRows(owner.lm_head)
        return owner.lm_head

    # Requests

    def post(
        self,
        body: dict[str, Any],
        trap: Trap | None = None,
        path: str = "/v1/chat/completions",
    ) -> tuple[httpx.Response, Seen | None]:
        """Send a chat request; what came, and what was seen of it inside."""
        request_id = f"r{next(self._numbers)}"
        if trap:
            self._traps[request_id] = trap
        response = self._http.post(
            path, json=body, headers={"X-Request-ID": request_id}
        )
        with self._lock:
            self._traps.pop(request_id, None)
            self._counts.pop(request_id, None)
            seen = self._by_request.pop(request_id, None)
            if seen:
                del self._by_ids[id(seen.prompt.model_ids)]
        return response, seen

    def settle(self) -> None:
        """
        Wait until nothing runs: a cancelled request is given back later.

        And until it is known what its answer left: until then it hides what looks so.
        """
        marks, has_work = self.pipeline.memory.healing.tombstones, self._loop.has_work
        _wait_until(lambda: not (self.app.gpu.call(has_work) or marks._answering))

    def forget(self) -> None:
        """Start anew: no KV, no memory of any prompt."""
        self.settle()
        self.pipeline.memory.forget()
        # Its marks outlive what is forgotten; the next sequence is of another process.
        self.pipeline.memory.healing.tombstones.clear()

    def limit(self, max_bytes: int, max_leaves: int = 24) -> None:
        """Another budget for the store, from the next request's end on."""
        self.store.budget.limits = Limits(max_bytes, max_leaves)

    def text(self, ids: ModelIds | list[int]) -> str:
        """Text of ids, nothing left out or cleaned up."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _ids_of(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _forced(self, prompt: PreparedPrompt) -> dict[int, int]:
        return {} if self.script is None else self.script.forced(prompt)

    def sampled(self, seen: Seen, logits: np.ndarray) -> list[int]:
        """The tokens of an answer: the likeliest, but where they were forced."""
        likeliest = np.argmax(logits, axis=-1)
        return [seen.forced.get(step, int(i)) for step, i in enumerate(likeliest)]

    def oracle(self, prompt: ModelIds, sampled: list[int]) -> np.ndarray:
        """Logits for each sampled token: one pass over all ids, no cache at all."""
        whole = [*prompt, *sampled][: len(prompt) + len(sampled) - 1]

        def compute() -> np.ndarray:
            self._head.count = len(sampled)
            try:
                return np.array(self.model(mx.array([whole]))[0])
            finally:
                self._head.count = 0

        return self.app.gpu.call(compute)

    def logits(self, seen: Seen, choice: int, count: int) -> np.ndarray:
        """Those that the server sampled from; the engine is one step ahead."""
        steps = seen.logits[choice][:count]
        return self.app.gpu.call(lambda: np.array(mx.concatenate(steps, axis=0)))

    def problems(self) -> list[str]:
        """What is wrong with the store."""
        return self.app.gpu.call(self.store.check_integrity)

    # Inside; GPU thread

    def _on_row(self, job: Job, choice: int) -> list[LogitsProcessor]:
        seen = self._by_ids.get(id(job.spec.model_ids))
        if seen is None:
            return []
        steps = seen.logits.setdefault(choice, [])

        before: list[int] = []  # tokens that are known at its first place

        def take(tokens: mx.array, logits: mx.array) -> mx.array:
            before[:] = before or [len(tokens)]
            del steps[len(tokens) - before[0] :]  # of a draft that was not said
            forced = seen.forced.get(len(steps))
            steps.append(logits)
            if choice == 0:
                self._spring(job, "step")
            if forced is None:
                return logits
            return mx.where(mx.arange(logits.shape[-1]) == forced, 0.0, -mx.inf)[None]

        return [take]

    def on_chunk(self, num_tokens: int) -> None:
        """A prompt's chunk of so many tokens is about to be computed."""
        if self._loop.prefills.current is not None:
            self._spring(self._loop.prefills.current.job, "chunk")

    def _spring(self, job: Job, where: str) -> None:
        found = [
            (name, trap)
            for name, trap in list(self._traps.items())
            if name in self._by_request
            and self._by_request[name].prompt.model_ids is job.spec.model_ids
        ]
        for name, trap in found:
            if trap.where != where:
                continue
            self._counts[name] = self._counts.get(name, 0) + 1
            if self._counts[name] != trap.nth:
                continue
            if trap.action == "fail":
                raise RuntimeError("planted failure")
            self._cancel(name, job)

    def _cancel(self, name: str, job: Job) -> None:
        """End a request behind the tokens that there are, and before any other."""
        known = self._chat._running  # it may have begun before it stands there
        _wait_until(lambda: (None, name) in known)
        running = tuple(known[(None, name)])
        job.hand_over()
        _wait_until(lambda: not job._events.qsize())
        self._chat.cancel(name, None)
        job.cancel()
        _wait_until(lambda: all(run._receipt for run in running))

    def close(self) -> None:
        """Close the client."""
        self._http.close()


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SETTLE_S
    while not is_so():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.001)


class JobTap:
    """The seam of the engine, given to the server before there is a rig."""

    def __init__(self) -> None:
        self.on_row: Callable[[Job, int], list[LogitsProcessor]] = lambda *_: []

    def __call__(self, job: Job, choice: int) -> list[LogitsProcessor]:
        return self.on_row(job, choice)


@contextlib.contextmanager
def running_rig(
    folder: Path, kind: str, family: str = "", **settings: str
) -> Iterator[Rig]:
    """
    A server on a tiny model of a kind, with a rig.

    Args:
        family: whose tokenizer and chat template it has; empty: the built-in model's.
    """
    row = BY_NAME[family] if family else None
    write = functools.partial(write_tokenizer, family=row) if row else None
    out = folder / f"small-{kind}-{family or 'builtin'}"
    model = make_model(out, kind, hidden=32, write_tokenizer=write)
    tap = JobTap()
    with running_sidecar(
        {"MODEL_PATH": str(model), **SETTINGS, **settings}, tap
    ) as app:
        rig = Rig(app, tap, model, row)
        try:
            yield rig
        finally:
            rig.close()
