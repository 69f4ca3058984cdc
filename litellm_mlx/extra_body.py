"""
A literal `extra_body`: it fills the gaps of a body and replaces nothing in it.

Names that the sidecar looks for in several places stay in it, as they came: the
sidecar alone ranks the places, through the proxy as without it.
"""

from collections.abc import Mapping

Json = Mapping[str, object]

_MAX_STOPS_OF_LITELLM = 4
_KWARGS = "chat_template_kwargs"
_RANKED_KWARG = "enable_thinking"
_RANKED = frozenset(
    (
        "session_id", "conversation_id", "thread_id", "chat_id", "conversation",
        "session", "parent_session_id", "parent_id", "source_session_id",
        "origin_session_id", "branch_id", "branch", "subsession_id", "subagent_id",
        "enable_thinking", "thinking", "reasoning_effort", "reasoning",
    )
)  # fmt: skip


def fill(body: Json, extra: Json) -> dict[str, object]:
    """
    A body with the fields that only its `extra_body` has.

    What is ranked is left under `extra_body`, even if the body says it as well.
    """
    filled = {name: value for name, value in extra.items() if name not in _RANKED}
    ranked = {name: value for name, value in extra.items() if name in _RANKED}
    kwargs = extra.get(_KWARGS)
    if isinstance(kwargs, Mapping) and _RANKED_KWARG in kwargs:
        filled[_KWARGS] = {k: v for k, v in kwargs.items() if k != _RANKED_KWARG}
        ranked[_KWARGS] = {_RANKED_KWARG: kwargs[_RANKED_KWARG]}
    filled = {name: value for name, value in filled.items() if value not in (None, {})}
    left = {"extra_body": ranked} if ranked else {}
    return {**filled, **body, **left}


def with_all_stops(call: Json) -> dict[str, object]:
    """
    A call whose long list of stop strings stands in its `extra_body`.

    LiteLLM cuts a list of them after four, and looks into no `extra_body`.
    """
    stops, extra = call.get("stop"), call.get("extra_body")
    if not isinstance(stops, list) or len(stops) <= _MAX_STOPS_OF_LITELLM:
        return dict(call)
    given = extra if isinstance(extra, Mapping) else {}
    return {**call, "stop": None, "extra_body": {**given, "stop": stops}}
