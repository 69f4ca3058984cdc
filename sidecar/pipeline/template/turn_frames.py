"""What stands around a turn, per set of template arguments, probed once."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sidecar.core.requests import Message
from sidecar.pipeline.template.chat_template import ChatTemplate
from sidecar.pipeline.template.encoder import PromptEncoder
from sidecar.pipeline.template.turn_markers import Frame, Start, probe_frame

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
        frame = self._probe(kwargs)
        with self._lock:
            if len(self._known) >= _MOST_SETS:
                self._known.clear()
            self._known[key] = frame
        return frame

    def lead_ids(self, start: Start | None) -> tuple[int, ...]:
        """Ids of what the generation prompt has behind the header."""
        if start is None or not start.lead:
            return ()
        return self._encoder.encode(start.lead, is_start=False).ids

    def header_tokens(self, frame: Frame | None) -> int:
        """How many added tokens a message header has."""
        if frame is None:
            return 1
        header = frame.starts["user"].header
        return len(self._encoder.encode(header, is_start=False).chars)

    def _probe(self, kwargs: Mapping[str, Any]) -> Frame | None:
        sets = [kwargs]
        if isinstance(kwargs.get("enable_thinking"), bool):
            sets.append({**kwargs, "enable_thinking": not kwargs["enable_thinking"]})
        frame = probe_frame([self._renderer(each) for each in sets], self._encoder)
        if frame is None:
            return None
        sound = {role: s for role, s in frame.starts.items() if self._is_sound(s)}
        if "user" not in sound:
            return None
        one_call = not self._template.traits.parallel_calls
        return replace(frame, starts=sound, one_call=one_call)

    def _renderer(
        self, kwargs: Mapping[str, Any]
    ) -> Callable[[Sequence[Message], bool], str]:
        return lambda messages, prompt: self._template.render(
            messages, (), kwargs, add_generation_prompt=prompt, is_probe=True
        )

    def _is_sound(self, start: Start) -> bool:
        """Whether header and lead, encoded apart, give the ids of both together."""

        def ids(text: str) -> tuple[int, ...]:
            return self._encoder.encode(text, is_start=False).ids

        opening = "zq" + start.ended + start.header
        return ids(opening + start.lead) == (*ids(opening), *self.lead_ids(start))
