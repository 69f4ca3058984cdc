"""
The sidecar's event stream as the chunks LiteLLM wants.

LiteLLM drops whatever follows a finish reason, and usage that comes with it, and
then counts tokens itself, wrongly. It drops reasoning text on a finishing chunk. And
where no finish reason came it says "stop". Hence this order, whatever order came in:

    deltas (no finish reason) -> usage -> finish reasons -> over
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import orjson
from litellm.types.utils import ModelResponseStream

from litellm_mlx import errors
from litellm_mlx.sse import EventDecoder
from litellm_mlx.translate import SidecarCall

# A chunk to pass on, an error to raise after those before it, or the end.
Item: TypeAlias = ModelResponseStream | Exception | None


class ChunkParser:
    """
    Turns pieces of one answer into chunks. One object for one stream, no I/O.

    Items come in order; an error or the end is the last one, whatever bytes follow.
    Once `is_over`, the sidecar itself ended the answer: nothing is left to cancel.
    """

    def __init__(self, call: SidecarCall) -> None:
        self.is_over = False
        self._model = call.model
        self._can_take_empty = call.can_take_empty
        self._decoder = EventDecoder()
        self._base: dict[str, Any] = {"id": f"chatcmpl-{call.call_id}"}
        self._open: set[int] = set()  # choices without a finish reason yet
        self._finishes: dict[int, str] = {}
        self._usage: Mapping[str, Any] | None = None

    def feed(self, piece: bytes) -> list[Item]:
        """Take the next bytes and return what they complete, maybe nothing."""
        items: list[Item] = []
        for event in self._decoder.feed(piece):
            items += self._take(event.data)
            if items and not isinstance(items[-1], ModelResponseStream):
                break
        return items

    def end(self) -> list[Item]:
        """Say that no more bytes come; returns what is due then."""
        return self._last_items()

    def _take(self, data: str) -> list[Item]:
        if data.strip() == "[DONE]":
            return self._last_items()
        try:
            frame = orjson.loads(data)
        except ValueError:
            frame = None
        if not isinstance(frame, dict):
            return [errors.malformed(self._model, "an unreadable chunk")]
        if frame.get("error"):
            self.is_over = True
            return [errors.from_delimiters(frame["error"], self._model)]
        return self._take_frame(frame)

    def _take_frame(self, frame: dict[str, Any]) -> list[Item]:
        self._usage = frame.pop("usage", None) or self._usage
        choices = frame.pop("choices", None) or []
        if len(self._base) == 1:
            # Each chunk without an id of its own would get a random one.
            self._base |= {k: v for k, v in frame.items() if v is not None}
        kept = [choice for choice in choices if self._hold_finish(choice)]
        if not kept:
            return []
        return [ModelResponseStream(**{**frame, **self._base}, choices=kept)]

    def _hold_finish(self, choice: dict[str, Any]) -> bool:
        """Take the finish reason off a choice; is anything left to pass on?"""
        if "text" in choice:  # of a text completion, which LiteLLM takes for a chat
            choice["delta"] = {"content": choice.pop("text")}
        index, finish = choice.get("index", 0), choice.pop("finish_reason", None)
        if finish is not None:
            self._finishes[index] = finish
        elif index not in self._finishes:
            self._open.add(index)
        self._open -= self._finishes.keys()
        delta = choice.get("delta") or {}
        if any(delta.values()) or choice.get("logprobs"):
            return True
        # An empty delta without a finish reason keeps the client's connection alive.
        return finish is None and self._can_take_empty

    def _last_items(self) -> list[Item]:
        self.is_over = True
        if self._open or not self._finishes:
            return [errors.unfinished(self._model)]
        items: list[Item] = []
        if self._usage:
            items.append(self._chunk([_choice(0)], usage=self._usage))
        others = sorted(self._finishes.items())
        first, finish = others.pop(0)
        if others:
            # LiteLLM looks at the first choice of a chunk only, and the first finish
            # it sees there ends the stream: the others ride behind an unfinished one.
            riders = [_choice(index, reason) for index, reason in others]
            items.append(self._chunk([_choice(first), *riders]))
        return [*items, self._chunk([_choice(first, finish)]), None]

    def _chunk(
        self, choices: list[dict[str, Any]], **more: object
    ) -> ModelResponseStream:
        return ModelResponseStream(**self._base, choices=choices, **more)


def _choice(index: int, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": {}, "finish_reason": finish_reason}
