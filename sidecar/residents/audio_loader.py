"""How a model that hears or speaks becomes a resident."""

import functools
import logging
import time
from collections.abc import Callable
from typing import cast

from sidecar.config.settings import Config
from sidecar.core.errors import ModelLoadFailed
from sidecar.engine.audio.audio_model import AudioKind, AudioModel, read_audio_model
from sidecar.engine.audio.hearing import Hearing
from sidecar.engine.audio.speaking import Speaking
from sidecar.engine.gpu_thread import load_thread
from sidecar.engine.loading.checkpoint_files import sizes_fault
from sidecar.engine.loading.model_place import folder_of
from sidecar.residents.audio_resident import (
    AudioResident,
    HearingResident,
    SpeakingResident,
)
from sidecar.residents.detection import missing_library
from sidecar.residents.model_state import ModelSpec, Tell
from sidecar.residents.shared import Shared, not_loaded

logger = logging.getLogger(__name__)


class AudioLoader:
    """Makes residents of models of sound; `load` on any thread but the GPU's."""

    def __init__(self, config: Config, shared: Shared) -> None:
        self._shared = shared
        self._trust = config.model.trust_remote_code

    def load(self, spec: ModelSpec, tell: Tell) -> AudioResident:
        """
        Read a model; its first computation is the first request's.

        Raises:
            ModelLoadFailed: with the reason.
        """
        shared, started, name = self._shared, time.monotonic(), spec.id
        tell("weights_loading")
        folder = folder_of(spec.place)
        if folder is None:
            raise ModelLoadFailed(f"model {name} cannot be loaded: it has no folder")
        fault = missing_library(spec.kind, folder, {}) or sizes_fault(folder)
        if fault:
            raise ModelLoadFailed(f"model {name} cannot be loaded: {fault}")
        kind = cast(AudioKind, spec.kind)
        read = functools.partial(read_audio_model, kind, folder, trust=self._trust)
        try:
            model = AudioModel(load_thread().call(read), shared.gpu)
        except (Exception, SystemExit) as error:
            raise not_loaded(name, folder, error) from error
        shared.gpu.call(shared.process.sample)
        seconds = shared.note_loaded(name, model.num_bytes, started)
        logger.info("loaded model=%s kind=%s seconds=%.1f", name, kind, seconds)
        return _resident(kind, name, model, functools.partial(shared.note_left, name))


def _resident(
    kind: AudioKind, name: str, model: AudioModel, leave: Callable[[], None]
) -> AudioResident:
    if kind == "tts":
        return SpeakingResident(name, model, leave, Speaking(model))
    hearing = Hearing(model)
    return HearingResident(name, model, leave, hearing, hearing.rate())
