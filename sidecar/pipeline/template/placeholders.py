"""Placeholders: messages whose mark is replaced by a turn's own ids."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sidecar.core.requests import Message
from sidecar.memory.known_turns import Healed
from sidecar.pipeline.template.turn_delimiters import TurnDelimiters
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
        Whether the texts around its mark are those that stand around the turn.

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
    roles = [item.message.role for item in marked]
    for index in sorted(healed) if delimiters is not None else ():
        assert delimiters is not None
        start = delimiters.start_behind(roles, index)
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
