"""
What a chat template puts around an assistant turn, found by probing it.

A conversation is rendered whose last message ends in a mark, with the generation prompt
and with a turn behind it. What the two have in common behind that mark ends the message
before (E) and begins the turn (H); the rest of the generation prompt (G) is what the
model read before it wrote. A turn's own ids are G and what was sampled: put behind E + H
they continue exactly what the KV of that turn holds. E, H and G depend on the role of
the message before: some templates go on with one turn behind a tool's result.

A turn with calls is stood for by its calls, with a mark as the last one's argument:
a template may hide the text beside calls, print it elsewhere, or demand calls before
results. What closes the calls behind that mark is replaced along with them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Protocol

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Message, ToolCall

# With a quote, as the marks of real conversations: a template that loses these must
# lose those too.
_EDGE, _TURN = 'zqedge"qz', 'zqturn"qz'
_EDGES, _TURNS = (re.compile(rf'zq{word}\\*"qz') for word in ("edge", "turn"))
_ASK = Message("user", ("zq ask",))
_NEXT = Message("user", ("zq next",))
_CALL = ToolCall("call_zq", "zq_call", "{}")
_CALLING = Message("assistant", (), tool_calls=(_CALL,))
_RESULT = Message("tool", ("zq result",), tool_call_id="call_zq")
_ANSWER = Message("assistant", ("zq answer",))
# By the role of the message before a turn: the conversation up to it.
_BEFORE = {
    "user": (replace(_ASK, parts=(f"zq ask {_EDGE}",)),),
    "tool": (_ASK, _CALLING, replace(_RESULT, parts=(f"zq result {_EDGE}",))),
    "assistant": (_ASK, replace(_ANSWER, parts=(f"zq answer {_EDGE}",))),
}
Render = Callable[[Sequence[Message], bool], str]


class TokenCuts(Protocol):
    """What the tokenizer knows of places in a text."""

    def before_token(self, text: str, at: int) -> int:
        """The last place up to `at` that is inside no added token."""

    def find_stop(self, text: str) -> int:
        """Where the first token that ends a turn begins; -1: there is none."""

    def begins_token(self, text: str, at: int) -> bool:
        """Whether an added token begins there."""


@dataclass(frozen=True, slots=True)
class Start:
    """
    How a turn begins behind a message of one role.

    Args:
        ended: E, what ends that message. header: H, how an assistant turn begins.
        lead: the rest of the generation prompt; a turn's ids begin with it.
    """

    ended: str
    header: str
    lead: str


@dataclass(frozen=True, slots=True)
class Frame:
    """
    The texts around a turn.

    Args:
        starts: by the role of the message before.
        closing: what closes calls behind the last argument; None: calls cannot stay
            in a placeholder, for their end cannot be told.
        drops_calls: a placeholder may stand without its turn's calls.
        one_call: it may stand with one at most.
    """

    starts: Mapping[str, Start]
    closing: str | None = None
    drops_calls: bool = False
    one_call: bool = False

    @property
    def headers(self) -> frozenset[str]:
        """The headers behind which a turn may have been written."""
        return frozenset(start.header for start in self.starts.values())

    def shows(self, num_calls: int) -> bool:
        """Whether the calls of a turn stay in its placeholder."""
        is_one = num_calls == 1 or (num_calls > 1 and not self.one_call)
        return is_one and self.closing is not None


def probe_frame(renders: Sequence[Render], cuts: TokenCuts) -> Frame | None:
    """
    Find the texts around a turn; None if this template does not show them.

    Args:
        renders: messages, with or without the generation prompt -> text; the first
            under the template arguments in use, others under those of other turns
            that may stand in the same conversation.
    """
    starts = {role: _probe_start(role, renders, cuts) for role in _BEFORE}
    found = {role: start for role, start in starts.items() if start is not None}
    if "user" not in found:
        return None
    closing = _probe_closing(renders[0], cuts)
    return Frame(found, closing, drops_calls=_drops_calls(renders[0]))


@dataclass(frozen=True, slots=True)
class _Shown:
    """Texts behind the edge of a message: what ends it, and what may begin there."""

    ended: str
    lead: str
    openings: tuple[str, ...]


def _probe_start(
    role: str, renders: Sequence[Render], cuts: TokenCuts
) -> Start | None:
    shown = [_show_start(_BEFORE[role], render, cuts) for render in renders]
    first = shown[0]
    if first is None:
        return None
    own = [first.lead, *first.openings]
    others = [o for each in shown[1:] if each for o in (each.lead, *each.openings)]
    header = _common([*own, *others], cuts) or _common(own, cuts)
    if not (first.ended + header).strip():
        return None
    return Start(first.ended, header, first.lead[len(header) :])


def _show_start(
    before: Sequence[Message], render: Render, cuts: TokenCuts
) -> _Shown | None:
    prompted = _behind_edge(render, before, True)
    asked = _behind_edge(render, before, False)
    if asked is None or prompted is None:
        return None
    marked = Message("assistant", (_TURN,))
    calling = replace(_CALLING, tool_calls=(_marked_call(),))
    behind = [
        _TURNS.split(_behind_edge(render, [*before, *turns], False) or "")
        for turns in ([marked, _NEXT], [marked], [calling, _RESULT])
    ]
    texts = [pieces[0] for pieces in behind if len(pieces) == 2]
    if not texts:
        return None
    ended = _common([asked, prompted, *texts], cuts)
    openings = tuple(text[len(ended) :] for text in texts)
    return _Shown(ended, prompted[len(ended) :], openings)


def _marked_call() -> ToolCall:
    return replace(_CALL, arguments=json.dumps({"zq": _TURN}))


def _behind_edge(
    render: Render, messages: Sequence[Message], prompt: bool
) -> str | None:
    try:
        text = render(messages, prompt)
    except BadRequest:
        return None
    pieces = _EDGES.split(text)
    return pieces[1] if len(pieces) == 2 else None


def _common(texts: Sequence[str], cuts: TokenCuts) -> str:
    """The common beginning, cut back to where all its tokens are whole."""
    common = commonprefix(list(texts))
    ends = [cuts.before_token(text, len(common)) for text in texts]
    return common[: min(ends)]


def _probe_closing(render: Render, cuts: TokenCuts) -> str | None:
    """
    What stands between the last argument of a turn's calls and the turn's end.

    It ends where a stop token stands, or where a tool's result and a user's message
    begin to differ, each with a token of its own.
    """
    calling = replace(_CALLING, tool_calls=(_marked_call(),))
    behind = []
    for following in (_RESULT, _NEXT):
        try:
            pieces = _TURNS.split(render([_ASK, calling, following], False))
        except BadRequest:
            continue
        if len(pieces) == 2:
            behind.append(pieces[1])
    if not behind:
        return None
    stop = cuts.find_stop(commonprefix(behind))
    if stop >= 0:
        return behind[0][:stop]
    common = _common(behind, cuts)
    is_end = all(cuts.begins_token(text, len(common)) for text in behind)
    return common if len(behind) == 2 and is_end else None


def _drops_calls(render: Render) -> bool:
    """Whether what follows a turn is the same when its calls are not shown."""
    silent = _TURNS.split(_with_result(render, ()))
    calling = _with_result(render, (_CALL,))
    return len(silent) == 2 and bool(calling) and calling.endswith(silent[1])


def _with_result(render: Render, calls: tuple[ToolCall, ...]) -> str:
    turn = Message("assistant", (_TURN,), tool_calls=calls)
    try:
        return render([_ASK, turn, _RESULT, _ANSWER, _NEXT], True)
    except BadRequest:
        return ""
