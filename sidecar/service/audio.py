"""Speech and transcriptions: lease, compute piece by piece, give back."""

import contextlib
import itertools
import unicodedata
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from sidecar.audio.recording import Recording
from sidecar.audio.sentences import pieces
from sidecar.audio.sound_writer import CONTENT_TYPES, SoundWriter, default_format
from sidecar.core.audio import (
    SoundFormat,
    SpeechRequest,
    Transcript,
    TranscriptionRequest,
    TranscriptPart,
)
from sidecar.core.errors import (
    BadRequest,
    GenerationFailed,
)
from sidecar.engine.audio.speaking import Speaking, Spoken
from sidecar.residents.audio_resident import HearingResident, SpeakingResident
from sidecar.residents.model_state import ServedModel
from sidecar.residents.pool import ResidentPool
from sidecar.service.tasks import ending, meant


class SpeechRun:
    """
    A text that is being spoken, with the model's lease: close it. One thread.

    Args:
        content_type: of the sound file that it becomes.
        is_whole: whether it is short enough, or of a format, to be sent in one.
        parts: bytes of the file, each computed when it is asked for.
    """

    def __init__(
        self,
        content_type: str,
        is_whole: bool,
        parts: Iterator[bytes],
        close: Callable[[], None],
    ) -> None:
        self.content_type = content_type
        self.is_whole = is_whole
        self.parts = parts
        self.close = close


class AudioService:
    """Answers requests for speech and transcriptions. Any thread."""

    def __init__(self, pool: ResidentPool[ServedModel], timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    def _lease(
        self, model: str, kind: str
    ) -> contextlib.AbstractContextManager[ServedModel]:
        name = meant(self._pool, model, kind)
        return self._pool.lease(name, time_left_s=self._timeout_s)

    def transcribe(
        self, request: TranscriptionRequest, is_connected: Callable[[], bool]
    ) -> Transcript:
        """
        Write down what is said in a recording, window by window.

        Raises:
            SidecarError: unknown model, or one of another kind; no sound; too late.
        """
        recording = Recording(request.file)
        with self._lease(request.model, "stt") as model:
            resident = _hearing(model)
            check = ending(self._pool, is_connected, self._timeout_s)
            texts: list[str] = []
            parts: list[TranscriptPart] = []
            language, end_s = request.language or "", 0.0
            for window in recording.windows(resident.rate):
                check()
                heard = resident.hearing.hear(
                    window.samples,
                    request.language,
                    request.prompt,
                    request.temperature,
                )
                start_s, end_s = window.start_s, window.start_s + window.seconds
                texts.append(heard.text)
                language = language or heard.language
                parts += [
                    TranscriptPart(start_s + p.start_s, start_s + p.end_s, p.text)
                    for p in heard.parts
                ] or [TranscriptPart(start_s, end_s, heard.text)]
        return Transcript(joined(texts), tuple(parts), language, end_s)

    def speak(
        self, request: SpeechRequest, is_connected: Callable[[], bool]
    ) -> SpeechRun:
        """
        Begin to speak; the first segment is there when it returns.

        Raises:
            SidecarError: unknown model, or one of another kind; no such voice; late.
        """
        with contextlib.ExitStack() as held:
            leased = held.enter_context(self._lease(request.model, "tts"))
            speaking = _speaking(leased).speaking
            speaking.check(request.speed)
            texts, check = (
                pieces(request.text),
                ending(self._pool, is_connected, self._timeout_s),
            )
            check()
            segments = _segments(speaking, request, texts, check)
            held.callback(segments.close)
            first = next(segments, None)
            if first is None:
                raise GenerationFailed("the model gives no sound for this text")
            form = request.form or default_format(first.rate)
            is_whole = form == "flac" or len(texts) == 1
            all_segments = itertools.chain((first,), segments)
            if is_whole:
                body = _whole(form, list(all_segments))
                return SpeechRun(CONTENT_TYPES[form], True, iter((body,)), lambda: None)
            writer = SoundWriter(form, first.rate)
            written = _written(writer, all_segments)
            return SpeechRun(CONTENT_TYPES[form], False, written, held.pop_all().close)


def joined(texts: Sequence[str]) -> str:
    """Texts of windows as one: with a space where their script has any."""
    whole = ""
    for text in filter(None, map(str.strip, texts)):
        is_wide = whole and unicodedata.east_asian_width(whole[-1]) in "WF"
        whole += text if not whole or is_wide else f" {text}"
    return whole


def _segments(
    speaking: Speaking,
    request: SpeechRequest,
    texts: Sequence[str],
    check: Callable[[], None],
) -> Generator[Spoken, None, None]:
    for text in texts:
        with contextlib.closing(
            speaking.speak(text, request.voice, request.speed)
        ) as spoken:
            while True:
                check()  # before a turn of the GPU is waited for
                if (segment := next(spoken, None)) is None:
                    break
                if segment.samples.size:  # a file of none would say that all is well
                    yield segment


def _written(writer: SoundWriter, segments: Iterator[Spoken]) -> Iterator[bytes]:
    for segment in segments:
        yield writer.add(segment.samples)
    yield writer.end()


def _whole(form: SoundFormat, segments: Sequence[Spoken]) -> bytes:
    writer = SoundWriter(form, segments[0].rate, is_whole=True)
    samples = np.concatenate([segment.samples for segment in segments])
    return writer.add(samples) + writer.end()


def _hearing(model: ServedModel) -> HearingResident:
    if isinstance(model, HearingResident):
        return model
    raise _of_another_kind(model, "/v1/audio/transcriptions")


def _speaking(model: ServedModel) -> SpeakingResident:
    if isinstance(model, SpeakingResident):
        return model
    raise _of_another_kind(model, "/v1/audio/speech")


def _of_another_kind(model: ServedModel, path: str) -> BadRequest:
    return BadRequest(f"{model.name} is no model that answers {path}", param="model")
