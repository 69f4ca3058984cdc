"""
A real sidecar on a tiny model that sees, and mlx-vlm alone beside it.

What mlx-vlm computes of the client's own pictures, all of a prompt in one pass and on
an instance of the model of its own, tells what each answer had to be.
"""

import contextlib
import functools
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
from mlx_vlm.utils import load_model, load_processor, process_inputs

from sidecar.app import App
from sidecar.engine import gpu_scheduler
from sidecar.engine.job import Job
from sidecar.engine.sampling import LogitsProcessor
from testkit.image_talk import Look, pixels_of
from testkit.oracle_rig import SETTINGS, JobTap, LastRows, Rig
from testkit.oracle_script import Script as OracleScript
from testkit.servers import held_gpu, running_sidecar
from testkit.tiny_models import BUILTIN

_PRINTED = {"gemma3": "<start_of_image>"}
_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
_DEADLINE_S = 60.0
_FIRST_ADDED = json.loads((BUILTIN / "config.json").read_text())["eos_token_id"] - 10


def muted(logits: mx.array) -> mx.array:
    """No token that was added: gemma3's output is its embedding, with rows for them."""
    return mx.where(mx.arange(logits.shape[-1]) < _FIRST_ADDED, logits, 0)


class Library:
    """mlx-vlm's model and processor of a folder; computes on the GPU thread."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_model(folder)
        self._processor: Any = load_processor(
            folder, add_detokenizer=False, trust_remote_code=False
        )
        language = self._model.language_model
        self._head = language.lm_head = LastRows(language.lm_head)
        self.given = functools.cache(self._given)

    @property
    def pad(self) -> int:
        """What stands for images in prompts."""
        config = self._model.config
        pad = getattr(config, "image_token_index", None)
        return int(config.image_token_id if pad is None else pad)

    def _given(self, look: Look) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
        """The ids and arrays of a picture."""
        printed = _PRINTED.get(self._model.config.model_type, _QWEN)
        found = dict(process_inputs(self._processor, [printed], [pixels_of(look)]))
        ids = tuple(int(i) for i in np.array(found["input_ids"]).reshape(-1))
        names = [n for n in found if n == "pixel_values" or n.endswith("_thw")]
        return ids, {name: np.array(found[name]) for name in names}

    def logits(self, ids: Sequence[int], looks: Sequence[Look], count: int) -> Any:
        """The last `count` rows of one pass over all ids, no cache from before."""
        row, told = mx.array([ids]), {"mask": mx.ones((1, len(ids)), mx.int32)}
        given = [self.given(look)[1] for look in looks]
        for name in given[0] if given else ():
            told[name] = mx.array(np.concatenate([arrays[name] for arrays in given]))
        found = self._model.get_input_embeddings(
            row, told.pop("pixel_values", None), **told
        ).to_dict()
        found = {name: value for name, value in found.items() if value is not None}
        language, config = self._model.language_model, self._model.config
        if config.model_type == "gemma3" and looks:
            # It takes what pads a batch for nothing; here it is a word as any other.
            words = language.model.embed_tokens(row)
            is_word = (row == config.pad_token_id)[..., None]
            found["inputs_embeds"] = mx.where(is_word, words, found["inputs_embeds"])
        make = getattr(language, "make_cache", None)
        self._head.count = count
        output = language(row, cache=make and make(), **found)
        return np.array(muted(output.logits)[0])


class SeeingRig(Rig):
    """One server that sees; requests may come from several threads."""

    def __init__(self, app: App, jobs: JobTap, folder: Path) -> None:
        self._more = threading.Condition()
        self.num_prepared = 0
        self.num_mixed = 0  # steps of rows with images beside rows without
        super().__init__(app, jobs, folder)
        opened, closed = "<think>\n", "\n</think>\n\n"
        ids = (tuple(self._ids_of(opened)), tuple(self._ids_of(closed)))
        self.script = OracleScript(opened, closed, *ids)
        self.library: Library = app.gpu.call(lambda: Library(folder))

    def _watched_head(self) -> LastRows:
        vision_encoder = self.engine.model.vision_encoder
        assert vision_encoder is not None
        memo, prepare = vision_encoder.memo, self.pipeline.prepare

        def looked(*args: Any) -> Any:
            if self._loop.prefills.current is not None:
                self._spring(self._loop.prefills.current.job, "look")
            return type(memo).get(memo, *args)

        def counted(*args: Any) -> Any:
            try:
                return prepare(*args)
            finally:
                with self._more:
                    self.num_prepared += 1
                    self._more.notify_all()

        memo.get = looked  # type: ignore[method-assign]
        self.pipeline.prepare = counted  # type: ignore[method-assign]
        return LastRows(None)

    @contextlib.contextmanager
    def at_once(self, count: int) -> Iterator[None]:
        """What is posted within begins when `count` prompts are read."""
        with held_gpu(self.app) as go:
            due = self.num_prepared + count
            releaser = threading.Thread(target=self._release, args=(due, go))
            releaser.start()
            yield
            releaser.join(_DEADLINE_S)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """No row decodes while a prompt waits: so all are in one batch."""
        share, gpu_scheduler._DECODE_SHARE = gpu_scheduler._DECODE_SHARE, 0.0
        try:
            yield
        finally:
            gpu_scheduler._DECODE_SHARE = share

    def _release(self, due: int, go: threading.Event) -> None:
        with self._more:
            self._more.wait_for(lambda: self.num_prepared >= due, _DEADLINE_S)
        go.set()

    @property
    def num_retreats(self) -> int:
        """Matches that would have ended within an image."""
        return int(self.store.counters.snapshot()["vlm_retreat"])

    def clear(self) -> None:
        """As people do it."""
        answer = httpx.post(f"{self.app.url}/admin/cache/clear", timeout=60)
        assert answer.status_code == 200, answer.text

    def wanted(
        self, ids: Sequence[int], looks: Sequence[Look], sampled: Sequence[int]
    ) -> np.ndarray:
        """Logits for each sampled token, by mlx-vlm alone."""
        whole = [*ids, *sampled[:-1]]
        found: np.ndarray = self.app.gpu.call(
            lambda: self.library.logits(whole, looks, len(sampled))
        )
        return found

    def on_chunk(self, num_tokens: int) -> None:
        """A prompt's chunk of so many tokens is about to be computed."""
        super().on_chunk(num_tokens)
        if (prefill := self._loop.prefills.current) is not None:
            end, placed = prefill.done + num_tokens, prefill.job.spec.prompt.images
            if any(one.start < end < one.end for one in placed):
                self._spring(prefill.job, "within")

    def _on_row(self, job: Job, choice: int) -> list[LogitsProcessor]:
        def note(_tokens: mx.array, logits: mx.array) -> mx.array:
            seeing = {bool(r.job.spec.prompt.images) for r in self._loop._rows.values()}
            self.num_mixed += len(seeing) == 2
            return muted(logits)

        return [note, *super()._on_row(job, choice)]


@contextlib.contextmanager
def running_seeing_rig(model: Path, **settings: str) -> Iterator[SeeingRig]:
    """A server on a folder of a model that sees (testkit/tiny_vision), with a rig."""
    tap = JobTap()
    named = {"MODEL_PATH": str(model), **SETTINGS, **settings}
    with running_sidecar(named, tap) as app:
        rig = SeeingRig(app, tap, model)
        try:
            yield rig
        finally:
            rig.close()
