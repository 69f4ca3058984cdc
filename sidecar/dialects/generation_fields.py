"""The fields that all chat formats share: sampling, limits, "think" as it is spelt."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sidecar.core.errors import BadRequest, ValidationFailed
from sidecar.core.requests import (
    ClientInfo,
    GenerationOptions,
    SamplingParams,
    Thinking,
    ToolChoice,
)
from sidecar.dialects.fields import Fields, is_direct_stream

_ON = frozenset(
    (
        "true",
        "1",
        "yes",
        "on",
        "enabled",
        "enable",
        "auto",
        "default",
        "adaptive",
        "minimal",
        "low",
        "medium",
        "high",
        "xhigh",
        "max",
    )
)
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
            return Thinking(enabled, path, raw, _effort(body), budget=_budget(body))
    return Thinking(effort=_effort(body), budget=_budget(body))


def with_one_call(choice: ToolChoice, fields: Fields) -> ToolChoice:
    """The same, for at most one call if `parallel_tool_calls` says so."""
    is_single = not fields.boolean("parallel_tool_calls", True)
    return replace(choice, is_single=is_single)


_BUDGETS = (
    "thinking.budget_tokens",
    "x_mlx.thinking.budget_tokens",
    "reasoning.max_tokens",
    "thinking_budget",
    "extra_body.thinking_budget",
)


def _budget(body: dict[str, Any]) -> int | None:
    """Most tokens of thinking, by the first source that says one."""
    for path in _BUDGETS:
        value = _get(body, path)
        if value is None or (value == 0 and not isinstance(value, bool)):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(
                f"{path} must be a whole number of tokens, at least 1", param=path
            )
        return value
    return None


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
    "x_mlx.effort",  # the client's own: sent by the plugin
    "reasoning_effort",
    "reasoning.effort",
    "output_config.effort",
    "thinking.effort",
    "output_config.effort",
)


def _effort(body: dict[str, Any]) -> str | None:
    for path in _EFFORT_FIELDS:
        value = _get(body, path)
        if isinstance(value, dict):
            path, value = f"{path}.effort", value.get("effort")
        word = value.strip().lower() if isinstance(value, str) else ""
        if word in _EFFORTS:
            return word
        if value not in (None, "") and _on_or_off(value) is None:
            path = path.replace("x_mlx.", "reasoning_")
            raise BadRequest(
                f"{path} must be none, minimal, low, medium, high, xhigh or max",
                param=path,
            )
    return None


_MAX_STOPS = 64
_MAX_STOP_CHARS = 1024
_MAX_TOKENS = 1 << 31
_MAX_BIASES = 4096


def read_options(fields: Fields, top_logprobs: int | None) -> GenerationOptions:
    """Sampling, length, stops and number of answers."""
    return GenerationOptions(
        sampling=_sampling(fields),
        max_tokens=_max_tokens(fields),
        stop=_stop(fields),
        n=fields.integer("n", 1, 128) or 1,
        top_logprobs=top_logprobs,
        max_ttft_s=fields.number("mlx_max_ttft_s", 0.001, 86400),
        wants_progress=_wants_progress(fields),
        adapter=_adapter(fields),
        context_len=fields.integer("context_len", -_MAX_TOKENS, _MAX_TOKENS),
    )


def _wants_progress(fields: Fields) -> bool:
    is_wanted = fields.boolean("return_progress", False)
    return is_wanted and is_direct_stream(fields.whole)


def _max_tokens(fields: Fields) -> int | None:
    """-1 is no limit, as in LM Studio: as many as fit."""
    for name in ("max_completion_tokens", "max_tokens"):
        if fields.raw(name) not in (None, -1):
            return fields.integer(name, 1, _MAX_TOKENS)
    return None


def _adapter(fields: Fields) -> str:
    """The name of one adapter; mlx-lm's server takes a path as `adapters`."""
    if fields.raw("adapters"):
        raise BadRequest(
            "adapters must be left out: adapter names one of ADAPTER_DIR",
            param="adapters",
        )
    return fields.text("adapter") or ""


def read_client(body: dict[str, Any], user_agent: str | None) -> ClientInfo:
    """Who asks: the session id by any of its names, the program."""
    if not isinstance(body.get("metadata") or {}, dict):
        raise BadRequest("metadata must be an object", param="metadata")
    private = body.get("x_mlx")
    private = private if isinstance(private, dict) else {}
    agent = private.get("user_agent") or user_agent
    key = private.get("key")
    parents: dict[str, str] = {}  # each once, with the field of the highest rank
    for field, parent in _named(body, _PARENTS):
        parents.setdefault(parent, field)
    branch_source, branch = next(_named(body, _BRANCHES), (None, None))
    source, session = next(_sessions(body, private), (None, None))
    return ClientInfo(
        session,
        str(agent) if agent else None,
        key if isinstance(key, str) and key else None,
        source,
        tuple(parents)[:_MAX_PARENTS],
        branch,
        tuple(parents.values())[:_MAX_PARENTS],
        branch_source,
        is_key_checked=private.get("key_checked") is True,
    )


_SESSIONS = (
    "session_id",
    "conversation_id",
    "thread_id",
    "chat_id",
    "conversation",
    "session",
)
_PARENTS = (
    "parent_session_id",
    "parent_id",
    "source_session_id",
    "origin_session_id",
)
_BRANCHES = ("branch_id", "branch", "subsession_id", "subagent_id")
_MAX_PARENTS = 8


def _sessions(
    body: dict[str, Any], private: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Fields that name the session and what they say, by rank."""
    yield from _named(body, _SESSIONS)
    value = private.get("session")
    if isinstance(value, str) and value:
        yield "x_mlx.session", value


def _named(body: dict[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Fields and ids under some names, by the rank of their places."""
    places = {"body": body, **{k: body.get(k) for k in ("metadata", "extra_body")}}
    for prefix, place in places.items():
        if not isinstance(place, dict):
            continue
        for name in names:
            value = place.get(name)
            if type(value) in (str, int) and str(value):
                yield f"{prefix}.{name}", str(value)


def _sampling(fields: Fields) -> SamplingParams:
    return SamplingParams(
        temperature=fields.number("temperature", 0, 100),
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.integer("top_k", -1, _MAX_TOKENS),
        min_p=fields.number("min_p", 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 100),
        repetition_context_size=fields.integer(
            "repetition_context_size", 1, _MAX_TOKENS
        ),
        presence_penalty=fields.number("presence_penalty", -100, 100) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -100, 100) or 0.0,
        logit_bias=_logit_bias(fields),
        seed=fields.integer("seed", -(1 << 63), (1 << 64) - 1),
    )


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.object("logit_bias") or {}
    if len(biases) > _MAX_BIASES:
        raise ValidationFailed(
            f"logit_bias must have at most {_MAX_BIASES} entries", param="logit_bias"
        )
    read = Fields(biases, "logit_bias")
    pairs = []
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise BadRequest(
                f"logit_bias keys must be token ids, got {key[:20]!r}",
                param="logit_bias",
            )
        pairs.append((int(key), read.number(key, -100, 100) or 0.0))
    return tuple(pairs)


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    path = fields.path("stop")
    stops = [value] if isinstance(value, str) else fields.items("stop")
    if len(stops) > _MAX_STOPS:
        raise ValidationFailed(
            f"{path} must have at most {_MAX_STOPS} entries", param=path
        )
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise BadRequest(
                f"{path}[{index}] must be a string", param=f"{path}[{index}]"
            )
        if len(stop) > _MAX_STOP_CHARS:
            raise ValidationFailed(
                f"{path}[{index}] must have at most {_MAX_STOP_CHARS} characters",
                param=f"{path}[{index}]",
            )
    return tuple(stop for stop in stops if stop)
