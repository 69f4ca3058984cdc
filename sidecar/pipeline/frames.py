"""What stands around a turn, per set of template arguments, probed once."""

import json
import threading
from collections.abc import Mapping
from typing import Any

from sidecar.pipeline.encoding import PromptEncoder
from sidecar.pipeline.splicing import Frame, probe_frame
from sidecar.pipeline.template import ChatTemplate

_MOST_SETS = 64


class FrameCache:
    """Frames of one template. Any thread."""

    def __init__(self, template: ChatTemplate, encoder: PromptEncoder) -> None:
        self._template = template
        self._encoder = encoder
        self._known: dict[str, Frame | None] = {}
        self._lock = threading.Lock()

    def get(self, kwargs: Mapping[str, Any]) -> Frame | None:
        """The frame under these template arguments; None: turns cannot be spliced."""
        key = json.dumps(kwargs, sort_keys=True, default=str)
        with self._lock:
            if key in self._known:
                return self._known[key]
        frame = probe_frame(
            lambda messages, prompt: self._template.render(
                messages, (), kwargs, add_generation_prompt=prompt
            )
        )
        if frame is not None and not self._is_sound(frame):
            frame = None
        with self._lock:
            if len(self._known) >= _MOST_SETS:
                self._known.clear()
            self._known[key] = frame
        return frame

    def lead_ids(self, frame: Frame | None) -> tuple[int, ...]:
        """Ids of what the generation prompt has behind the header (G - H)."""
        if frame is None:
            return ()
        lead = frame.generation[len(frame.header) :]
        return self._encoder.encode(lead, is_start=False).ids if lead else ()

    def header_tokens(self, frame: Frame | None) -> int:
        """How many added tokens a message header has."""
        if frame is None:
            return 1
        return len(self._encoder.encode(frame.header, is_start=False).chars)

    def _is_sound(self, frame: Frame) -> bool:
        """Whether header and lead, encoded apart, give the ids of both together."""

        def ids(text: str) -> tuple[int, ...]:
            return self._encoder.encode(text, is_start=False).ids

        whole = ids("zq\n" + frame.generation)
        return whole == (*ids("zq\n" + frame.header), *self.lead_ids(frame))
