"""
What a chat template puts around an assistant turn, found by probing it.

With messages [user, assistant(mark), user], rendered with and without the generation
prompt: G is the generation prompt, H the assistant header (the common beginning of G
and of what stands before the mark), F the end of turn. A turn's own ids, put between
H and F, then continue exactly what the KV of that turn holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Message, ToolCall

_MARK = "\ue000zq-turn\ue001"
_ASK = Message("user", ("zq ask",))
_NEXT = Message("user", ("zq next",))
_CALL = ToolCall("call_zq", "zq_call", "{}")
_RESULT = Message("tool", ("zq result",), tool_call_id="call_zq")
_ANSWER = Message("assistant", ("zq answer",))
_Render = Callable[[Sequence[Message], bool], str]


@dataclass(frozen=True, slots=True)
class Frame:
    """
    The texts around a turn.

    Args:
        generation: G, what the prompt ends with when the model is to speak.
        header: H, how an assistant message begins.
        footer: F, how it ends; may be empty.
        keeps_calls: the turn's calls stay in the placeholder. Not if the template
            then hides its text, or if F is too little to tell where they end.
    """

    generation: str
    header: str
    footer: str
    keeps_calls: bool = True


def probe_frame(render: _Render) -> Frame | None:
    """
    Find G, H and F; None if this template does not show them.

    Args:
        render: messages, with or without the generation prompt -> text.
    """
    try:
        asked = render([_ASK], False)
        prompted = render([_ASK], True)
        turn = Message("assistant", (_MARK,))
        whole = render([_ASK, turn, _NEXT], False)
        next_alone = render([_ASK, turn], False)
    except BadRequest:
        return None
    begin_alike = all(text.startswith(asked) for text in (prompted, whole, next_alone))
    if not begin_alike or whole.count(_MARK) != 1:
        return None
    generation = prompted[len(asked) :]
    before, after = whole[len(asked) :].split(_MARK)
    header = commonprefix([generation, before])
    if not header.strip():
        return None
    ended = next_alone.split(_MARK)[1] if next_alone.count(_MARK) == 1 else ""
    footer = commonprefix([ended, after])
    keeps_calls = _keeps_calls(render, footer)
    if keeps_calls is None:
        return None
    return Frame(generation, header, footer, keeps_calls)


def _keeps_calls(render: _Render, footer: str) -> bool | None:
    """See Frame; None if calls can neither stay nor go."""
    calling = _calling(render, (_CALL,))
    if footer.strip() and calling.count(_MARK) == 1:
        return True
    silent = _calling(render, ()).split(_MARK)
    if len(silent) == 2 and calling.endswith(silent[1]):
        return False
    return True if footer.strip() else None


def _calling(render: _Render, calls: tuple[ToolCall, ...]) -> str:
    turn = Message("assistant", (_MARK,), tool_calls=calls)
    try:
        return render([_ASK, turn, _RESULT, _ANSWER, _NEXT], True)
    except BadRequest:
        return ""
