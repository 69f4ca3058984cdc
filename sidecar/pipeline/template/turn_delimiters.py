"""
What a chat template puts around an assistant turn, found by probing it.

A conversation whose last message ends in a mark is rendered with the generation prompt,
and with a turn behind it. What both have in common behind that mark ends the message
before and begins the turn (its header); the rest of the generation prompt (its lead) is
what the model read before it wrote. A turn's own ids are those of the lead and what was
sampled: put behind the header, they continue exactly what the KV of that turn holds.
All this depends on the role of the message before: some templates go on with one turn
behind a tool's result.

A turn with calls is stood for by its calls, with a mark as the last one's argument:
a template may hide the text beside calls, print it elsewhere, or demand calls before
results. What closes the calls behind that mark is replaced along with them.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any, Protocol

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Message, ToolCall
from sidecar.pipeline.template.chat_template import ChatTemplate
from sidecar.pipeline.template.encoder import PromptEncoder

# With a quote, as the marks of real conversations: a template that loses these must
# lose those too.
_EDGE, _TURN = 'zqedge"qz', 'zqturn"qz'
_EDGES, _TURNS = (re.compile(rf'zq{word}\\*"qz') for word in ("edge", "turn"))
_MAX_SETS = 64  # sets of template arguments whose delimiters are kept
_ASK = Message("user", ("zq ask",))
_NEXT = Message("user", ("zq next",))
_CALL = ToolCall("call_zq", "zq_call", "{}")
_CALLING = Message("assistant", (), tool_calls=(_CALL,))
_RESULT = Message("tool", ("zq result",), tool_call_id="call_zq")
_ANSWER = Message("assistant", ("zq answer",))
_FOLLOWING = [_RESULT, _ANSWER, _NEXT]
# By the role of the message before a turn: the conversation up to it.
_BEFORE = {
    "user": (replace(_ASK, parts=(f"zq ask {_EDGE}",)),),
    "tool": (_ASK, _CALLING, replace(_RESULT, parts=(f"zq result {_EDGE}",))),
    "assistant": (_ASK, replace(_ANSWER, parts=(f"zq answer {_EDGE}",))),
}
# The same behind a user's message that a template takes within a tool's result.
_WITHIN_RESULT = "user within tool"
_BEFORE_WITHIN = (_ASK, _CALLING, _RESULT, replace(_ASK, parts=(f"zq ask {_EDGE}",)))
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
        ended: what ends that message. header: how an assistant turn begins.
        lead: the rest of the generation prompt; a turn's ids begin with it.
        gaps: what the template prints between the header and a turn's text.
        call_gaps: between the header and the name of a turn's first call.
    """

    ended: str
    header: str
    lead: str
    gaps: frozenset[str] = field(default=frozenset(), compare=False)
    call_gaps: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True)
class TurnDelimiters:
    """
    The texts around a turn.

    Args:
        starts: by the role of the message before, and where it stands.
        closing: what closes calls behind the last argument; None: calls cannot stay
            in a placeholder, for their end is unknown.
        drops_calls: a placeholder may stand without its turn's calls.
        one_call: it may stand with one at most.
    """

    starts: Mapping[str, Start]
    closing: str | None = None
    drops_calls: bool = False
    one_call: bool = False

    def start_behind(self, roles: Sequence[str], end: int) -> Start | None:
        """
        How a turn begins behind the first messages of these roles.

        Returns:
            None: that is not known.
        """
        before = end
        while before and roles[before - 1] == "user":
            before -= 1
        is_behind_result = 0 < before < end and roles[before - 1] == "tool"
        within = self.starts.get(_WITHIN_RESULT) if is_behind_result else None
        return within or self.starts.get(roles[end - 1] if end else "")

    @property
    def headers(self) -> frozenset[str]:
        """The headers behind which a turn may have been written."""
        return frozenset(start.header for start in self.starts.values())

    def shows(self, num_calls: int) -> bool:
        """Whether the calls of a turn stay in its placeholder."""
        is_one = num_calls == 1 or (num_calls > 1 and not self.one_call)
        return is_one and self.closing is not None


def probe_delimiters(
    renders: Sequence[Render], cuts: TokenCuts, *, joins_results: bool = False
) -> TurnDelimiters | None:
    """
    Find the texts around a turn; None if this template does not show them.

    Args:
        renders: messages, with or without the generation prompt -> text; the first
            under the template arguments in use, others under those of other turns
            that may stand in the same conversation.
        joins_results: what a user says behind a tool's result is said within that.
    """
    places = {**_BEFORE, _WITHIN_RESULT: _BEFORE_WITHIN} if joins_results else _BEFORE
    starts = {
        place: _probe_start(before, renders, cuts) for place, before in places.items()
    }
    found = {role: start for role, start in starts.items() if start is not None}
    if "user" not in found:
        return None
    silent = _probe_silent(renders[0])
    closing = _probe_closing(renders[0], cuts, silent)
    return TurnDelimiters(found, closing, drops_calls=silent is not None)


@dataclass(frozen=True, slots=True)
class _EdgeTexts:
    """
    Texts behind the edge of a message: what ends it, and what may begin there.

    Args:
        openings: up to a turn's text. calling: up to the name of its call, if shown.
    """

    ended: str
    lead: str
    openings: tuple[str, ...]
    calling: tuple[str, ...] = ()

    def beginning_at(self, ended: str) -> "_EdgeTexts":
        """The same with less of it taken for the end of the message."""
        rest = self.ended[len(ended) :]
        openings = tuple(rest + opening for opening in self.openings)
        calling = tuple(rest + opening for opening in self.calling)
        return _EdgeTexts(ended, rest + self.lead, openings, calling)


def _probe_start(
    before: Sequence[Message], renders: Sequence[Render], cuts: TokenCuts
) -> Start | None:
    shown = [_show_start(before, render, cuts) for render in renders]
    first = shown[0]
    if first is None:
        return None
    known = [each for each in shown if each is not None]
    # Some templates print the role's header with the message before.
    alike = [
        each.beginning_at(_common([k.ended for k in known], cuts)) for each in known
    ]
    for group in (known, alike, [first]):
        own = group[0]
        header = _common(
            [o for each in group for o in (each.lead, *each.openings)], cuts
        )
        if header:
            break
    if not (own.ended + header).strip():
        return None
    return Start(
        own.ended,
        header,
        own.lead[len(header) :],
        _behind(header, [o for each in group for o in each.openings]),
        _behind(header, [o for each in group for o in each.calling]),
    )


def _behind(header: str, openings: Sequence[str]) -> frozenset[str]:
    return frozenset(o[len(header) :] for o in openings if o.startswith(header))


def _show_start(
    before: Sequence[Message], render: Render, cuts: TokenCuts
) -> _EdgeTexts | None:
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
    return _EdgeTexts(
        ended, prompted[len(ended) :], openings, _before_call(render, before, ended)
    )


def _before_call(
    render: Render, before: Sequence[Message], ended: str
) -> tuple[str, ...]:
    """What stands up to a call's name: in the last turn, and in one before it."""
    calling = replace(_CALLING, tool_calls=(_marked_call(),))
    found = []
    for following in ([_RESULT], _FOLLOWING):
        text = _behind_edge(render, [*before, calling, *following], False) or ""
        if text.startswith(ended) and _TURNS.search(text):
            found.append(text[len(ended) :].partition(_CALL.name)[0])
    return tuple(found)


def _marked_call() -> ToolCall:
    return replace(_CALL, arguments=json.dumps({"zq": _TURN}))


def _behind_edge(
    render: Render, messages: Sequence[Message], prompt: bool
) -> str | None:
    pieces = _EDGES.split(_rendered(render, messages, prompt))
    return pieces[1] if len(pieces) == 2 else None


def _common(texts: Sequence[str], cuts: TokenCuts) -> str:
    """The common beginning, cut back to where all its tokens are whole."""
    common = commonprefix(list(texts))
    ends = [cuts.before_token(text, len(common)) for text in texts]
    return common[: min(ends)]


def _probe_closing(render: Render, cuts: TokenCuts, silent: str | None) -> str | None:
    """
    What stands between the last argument of a turn's calls and the turn's end.

    It ends where a stop token stands, or where a tool's result and a user's message
    begin to differ, each with a token of its own.

    Args:
        silent: what follows the turn if its calls are not shown, if that may be: the
            same must follow its calls.
    """
    calling = replace(_CALLING, tool_calls=(_marked_call(),))
    behind = []
    for following in (_FOLLOWING, [_NEXT]):
        text = _rendered(render, [_ASK, calling, *following], False)
        behind += _TURNS.split(text)[1:]
    if not 0 < len(behind) <= 2:
        return None
    stop = cuts.find_stop(commonprefix(behind))
    if stop < 0:
        stop = len(_common(behind, cuts))
        if len(behind) < 2 or not all(cuts.begins_token(t, stop) for t in behind):
            return None
    return behind[0][:stop] if silent in (None, behind[0][stop:]) else None


def _probe_silent(render: Render) -> str | None:
    """What follows a turn whose calls are not shown, if it is what follows them."""
    turn = Message("assistant", (_TURN,))
    silent = _TURNS.split(_rendered(render, [_ASK, turn, *_FOLLOWING], False))
    with_calls = replace(turn, tool_calls=(_CALL,))
    calling = _rendered(render, [_ASK, with_calls, *_FOLLOWING], False)
    if len(silent) != 2 or _RESULT.text not in silent[1]:
        return None
    return silent[1] if calling.endswith(silent[1]) else None


def _rendered(render: Render, messages: Sequence[Message], prompt: bool) -> str:
    try:
        return render(messages, prompt)
    except BadRequest:
        return ""


class TurnDelimitersCache:
    """The delimiters of one template, kept by its arguments. Any thread."""

    def __init__(self, template: ChatTemplate, encoder: PromptEncoder) -> None:
        self._template = template
        self._encoder = encoder
        self._known: dict[str, TurnDelimiters | None] = {}
        self._lock = threading.Lock()

    def get(self, kwargs: Mapping[str, Any]) -> TurnDelimiters | None:
        """The delimiters under these arguments; None: turns cannot be spliced."""
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
        traits = self._template.traits
        delimiters = probe_delimiters(
            [self._renderer(each) for each in sets],
            self._encoder,
            joins_results=not traits.user_after_tool,
        )
        if delimiters is None:
            return None
        sound = {role: s for role, s in delimiters.starts.items() if self._is_sound(s)}
        if "user" not in sound:
            return None
        one_call = not traits.parallel_calls
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
