"""Speech and transcriptions: parse -> service -> whole, or written as it comes."""

from typing import Any

from sidecar.core.errors import SidecarError
from sidecar.core.events import Usage
from sidecar.dialects.openai_audio import (
    parse_speech,
    parse_transcription,
    transcription,
)
from sidecar.server.form_body import parse_form
from sidecar.server.http_messages import EventStream, Request, Response, json_response
from sidecar.service.audio import AudioService

_TEXT = "text/plain; charset=utf-8"


class AudioRoutes:
    """Endpoints."""

    def __init__(self, audio: AudioService) -> None:
        self._audio = audio

    def transcription(self, request: Request) -> Response:
        """POST /v1/audio/transcriptions."""
        form = parse_form(request.headers.get("content-type", ""), request.body)
        asked = parse_transcription(form.fields, form.files)
        found = self._audio.transcribe(asked, request.is_connected)
        body = transcription(found, asked.form)
        if isinstance(body, str):
            return Response(body.encode(), content_type=_TEXT)
        return json_response(body)

    def speech(self, request: Request) -> Response | EventStream:
        """POST /v1/audio/speech."""
        asked = parse_speech(request.json())
        running = self._audio.speak(asked, request.is_connected)
        if running.is_whole:
            return Response(b"".join(running.parts), content_type=running.content_type)
        return EventStream(
            _AudioEvents(),
            running.parts,
            running.close,
            content_type=running.content_type,
        )


class _AudioEvents:
    """Parts of a file, as they are; there is no way to tell of a fault in one."""

    def started(self, usage: Usage) -> bytes:
        return b""

    def event(self, event: Any) -> bytes:
        return bytes(event)

    def ping(self) -> bytes:
        return b""

    def failed(self, error: SidecarError) -> bytes:
        return b""
