"""Speech and transcriptions as OpenAI has them."""

import re
from collections.abc import Mapping
from typing import Any, get_args

from sidecar.core.audio import (
    MAX_CHARACTERS,
    SoundFormat,
    SpeechRequest,
    TextFormat,
    Transcript,
    TranscriptionRequest,
)
from sidecar.core.errors import BadRequest, ValidationFailed
from sidecar.dialects.fields import Fields

_MAX_PROMPT = 4096
# A library takes it for a file's name, too: no path fits this.
_VOICE = re.compile(r"\w[\w ,+-]{0,63}")
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z _-]{1,39}")
_SOUND_FORMATS: tuple[SoundFormat, ...] = get_args(SoundFormat)
_TEXT_FORMATS: tuple[TextFormat, ...] = get_args(TextFormat)


def parse_speech(body: Any) -> SpeechRequest:
    """
    Check a body.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    text = fields.required_text("input")
    if len(text) > MAX_CHARACTERS or not text.strip():
        raise BadRequest(
            f"input must have 1..{MAX_CHARACTERS} characters that are not all blank, "
            f"got {len(text)}",
            param="input",
        )
    voice = fields.text("voice") or None
    if voice is not None and not _VOICE.fullmatch(voice):
        raise BadRequest(
            "voice must be 1..64 letters, digits, spaces and _ - + , "
            f"got {voice[:64]!r}",
            param="voice",
        )
    asked = fields.text("response_format") or None
    form = next((f for f in _SOUND_FORMATS if f == asked), None)
    if form is None and asked is not None:
        raise _not_one_of("response_format", _SOUND_FORMATS, asked)
    if fields.text("stream_format") == "sse":
        raise BadRequest(
            "stream_format must be audio, got 'sse'", param="stream_format"
        )
    speed = fields.number("speed", 0.25, 4.0)
    return SpeechRequest(fields.text("model") or "", text, voice, form, speed)


def parse_transcription(
    fields: Mapping[str, str], files: Mapping[str, bytes]
) -> TranscriptionRequest:
    """
    Check a form.

    Args:
        fields, files: its parts by name.
    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    if "file" not in files:
        raise BadRequest(
            "file must be a sound file, sent as a part of the form", param="file"
        )
    asked = fields.get("response_format") or "json"
    form = next((f for f in _TEXT_FORMATS if f == asked), None)
    if form is None:
        raise _not_one_of("response_format", _TEXT_FORMATS, asked)
    if fields.get("stream", "").lower() in ("true", "1"):
        raise BadRequest("stream must be false: the text comes whole", param="stream")
    language = fields.get("language") or None
    if language is not None and not _LANGUAGE.fullmatch(language):
        raise BadRequest(
            f"language must be a code or a name such as en, got {language[:40]!r}",
            param="language",
        )
    prompt = fields.get("prompt") or None
    if prompt is not None and len(prompt) > _MAX_PROMPT:
        raise BadRequest(
            f"prompt must have at most {_MAX_PROMPT} characters, got {len(prompt)}",
            param="prompt",
        )
    return TranscriptionRequest(
        fields.get("model", ""),
        files["file"],
        form,
        language,
        prompt,
        _temperature(fields.get("temperature") or None),
    )


def transcription(found: Transcript, form: TextFormat) -> dict[str, Any] | str:
    """The body of an answer: an object, or the bare text."""
    if form == "text":
        return f"{found.text}\n"
    if form == "json":
        return {"text": found.text}
    segments = [
        {"id": index, "start": part.start_s, "end": part.end_s, "text": part.text}
        for index, part in enumerate(found.parts)
    ]
    return {
        "task": "transcribe",
        "language": found.language,
        "duration": found.duration_s,
        "text": found.text,
        "segments": segments,
    }


def _temperature(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:  # NaN as well
        raise ValidationFailed(
            f"temperature must be 0..1, got {text[:40]!r}", param="temperature"
        )
    return value


def _not_one_of(name: str, known: tuple[str, ...], got: str) -> BadRequest:
    return BadRequest(
        f"{name} must be {' or '.join(known)}, got {got[:40]!r}", param=name
    )
