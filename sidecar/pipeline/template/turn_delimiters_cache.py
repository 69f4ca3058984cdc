"""Turn delimiters kept by template options, and placeholders for spliced turns."""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sidecar.core.requests import Message
from sidecar.memory.healing_store import Healed
from sidecar.pipeline.template.chat_template import ChatTemplate
from sidecar.pipeline.template.encoder import PromptEncoder
from sidecar.pipeline.template.turn_delimiters import (
    Start,
    TurnDelimiters,
    probe_delimiters,
)
from sidecar.volatile.marked_message import MarkedMessage

# Some templates print a call's id, nine digits, beside its arguments and its result.
_CALL_ID = re.compile(r"[0-9]{9}")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """
    A message that holds a mark where the turn's own ids go.

    Args:
        opening: what the template prints between the message before and the turn.
        gaps: what it may print between that and the mark, or its calls' first name.
        closing: what it prints behind the mark that the turn's ids hold.
        without_calls: it stands without the turn's calls, though these could stay.
    """

    healed: Healed
    opening: str
    gaps: frozenset[str]
    closing: str = ""
    shows_calls: bool = False
    without_calls: "Placeholder | None" = None

    def message(self, turn: Message, mark: str) -> Message:
        """
        The message to render.

        Calls stay where they can: some templates demand them before a tool result.
        """
        bare = replace(turn, parts=(), reasoning=None, tool_calls=())
        if not self.shows_calls:
            return replace(bare, parts=(mark,))
        *others, last = [replace(call, arguments="{}") for call in turn.tool_calls]
        last = replace(last, arguments=json.dumps({"zq": mark}))
        return replace(bare, tool_calls=(*others, last))

    def stands_in(self, before: str, behind: str) -> bool:
        """
        Whether the texts around its mark are those that the frame says.

        All of them: what stands there else is somebody's words, which a template may
        print behind the results of the calls that they were said with.
        """
        openings = [self.opening + gap for gap in self.gaps]
        if not self.shows_calls:
            before_all = _masked(before) in map(_masked, openings)
        else:
            before_all = any(_begins(before, opening) for opening in openings)
        return before_all and _begins(behind, self.closing)


def plan_placeholders(
    marked: Sequence[MarkedMessage],
    healed: Mapping[int, Healed],
    delimiters: TurnDelimiters | None,
) -> dict[int, Placeholder]:
    """
    By message index, for the turns that may be spliced.

    Behind a message whose end is known, and written behind the header that the
    template prints there.
    """
    planned = {}
    for index in sorted(healed) if delimiters is not None else ():
        assert delimiters is not None
        before = marked[index - 1].message.role if index else ""
        start = delimiters.starts.get(before)
        num_calls = len(marked[index].message.tool_calls)
        if start is None or start.header != healed[index].header:
            continue
        bare = Placeholder(healed[index], start.ended + start.header, start.gaps)
        can_be_bare = not num_calls or delimiters.drops_calls
        if delimiters.shows(num_calls):
            planned[index] = replace(
                bare,
                gaps=start.call_gaps,
                closing=delimiters.closing or "",
                shows_calls=True,
                without_calls=bare if can_be_bare else None,
            )
        elif can_be_bare:
            planned[index] = bare
    return planned


def without(
    planned: Mapping[int, Placeholder], failed: set[int]
) -> dict[int, Placeholder]:
    """The others, and the failed ones without their calls where that may do."""
    left = {i: p if i not in failed else p.without_calls for i, p in planned.items()}
    return {index: each for index, each in left.items() if each is not None}


def _begins(text: str, expected: str) -> bool:
    begin = text[: len(expected)]
    return begin == expected or _masked(begin) == _masked(expected)


def _masked(text: str) -> str:
    return _CALL_ID.sub("0" * 9, text)


_MAX_SETS = 64


class TurnDelimitersCache:
    """Frames of one template. Any thread."""

    def __init__(self, template: ChatTemplate, encoder: PromptEncoder) -> None:
        self._template = template
        self._encoder = encoder
        self._known: dict[str, TurnDelimiters | None] = {}
        self._lock = threading.Lock()

    def get(self, kwargs: Mapping[str, Any]) -> TurnDelimiters | None:
        """The frame under these template arguments; None: turns cannot be spliced."""
        key = json.dumps(kwargs, sort_keys=True, default=str)
        with self._lock:
            if key in self._known:
                return self._known[key]
        delimiters = self._probe(kwargs)
        with self._lock:
            if len(self._known) >= _MAX_SETS:
                self._known.clear()
            self._known[key] = delimiters
        return delimiters

    def lead_ids(self, start: Start | None) -> tuple[int, ...]:
        """Ids of what the generation prompt has behind the header."""
        if start is None or not start.lead:
            return ()
        return self._encoder.encode(start.lead, is_start=False).ids

    def header_tokens(self, delimiters: TurnDelimiters | None) -> int:
        """How many added tokens a message header has."""
        if delimiters is None:
            return 1
        header = delimiters.starts["user"].header
        return len(self._encoder.encode(header, is_start=False).chars)

    def _probe(self, kwargs: Mapping[str, Any]) -> TurnDelimiters | None:
        sets = [kwargs]
        if isinstance(kwargs.get("enable_thinking"), bool):
            sets.append({**kwargs, "enable_thinking": not kwargs["enable_thinking"]})
        delimiters = probe_delimiters(
            [self._renderer(each) for each in sets], self._encoder
        )
        if delimiters is None:
            return None
        sound = {role: s for role, s in delimiters.starts.items() if self._is_sound(s)}
        if "user" not in sound:
            return None
        one_call = not self._template.traits.parallel_calls
        return replace(delimiters, starts=sound, one_call=one_call)

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
