"""The many spellings of "think" -> one choice."""

from collections.abc import Iterator
from typing import Any

from sidecar.core.requests import Thinking

_ON = frozenset(
    (
        "true", "1", "yes", "on", "enabled", "enable", "auto", "default", "adaptive",
        "minimal", "low", "medium", "high", "xhigh", "max",
    )
)  # fmt: skip
_OFF = frozenset(["false", "0", "no", "off", "none", "disable", "disabled"])
_EFFORTS = frozenset(["minimal", "low", "medium", "high", "xhigh", "max"])
_KEYS = ("enabled", "effort", "level", "type")
_FIELDS = (
    "enable_thinking",
    "chat_template_kwargs.enable_thinking",
    "thinking",
    "x_mlx.thinking",  # the client's own, where LiteLLM has only a bucket of it
    "reasoning_effort",
    "reasoning",
)


def read_thinking(body: dict[str, Any]) -> Thinking:
    """The first source that says anything, in the order of `_FIELDS`."""
    for source, value in _sources(body):
        path, raw = _leaf(source, value)
        enabled = _on_or_off(raw)
        if enabled is not None:
            return Thinking(enabled, path, raw, _effort(body))
    return Thinking(effort=_effort(body))


def _sources(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for prefix in ("", "metadata.", "extra_body."):
        for name in _FIELDS:
            yield prefix + name, _get(body, prefix + name)


def _get(value: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _leaf(source: str, value: Any) -> tuple[str, Any]:
    """Of an object, the first key that decides; `budget_tokens: 0` means off."""
    if not isinstance(value, dict):
        return source, value
    budget = value.get("budget_tokens")
    if budget == 0 and not isinstance(budget, bool):
        return f"{source}.budget_tokens", False
    for key in _KEYS:
        if _on_or_off(value.get(key)) is not None:
            return f"{source}.{key}", value[key]
    return source, None


def _on_or_off(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.strip().lower()
        return True if word in _ON else False if word in _OFF else None
    return None


_EFFORT_FIELDS = (
    "x_mlx.effort",
    "reasoning_effort",
    "reasoning.effort",
    "thinking.effort",
)


def _effort(body: dict[str, Any]) -> str | None:
    for path in _EFFORT_FIELDS:
        value = _get(body, path)
        if isinstance(value, str) and value.strip().lower() in _EFFORTS:
            return value.strip().lower()
    return None
