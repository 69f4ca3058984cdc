"""The sidecar's models as entries of LiteLLM's model list."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

_COSTS = (
    "input_cost_per_token",
    "output_cost_per_token",
    "cache_creation_input_token_cost",
    "cache_read_input_token_cost",
)
# LiteLLM sends the bodies of these on as they are: the sidecar speaks both, and what
# is not translated is not lost.
NATIVE_ROUTES: Mapping[str, Any] = {
    "supported_endpoints": ["/v1/messages", "/v1/responses"],
    "cache_control_ttl": True,
}
# LiteLLM shuts a model out, for everybody, after one answer of 401, 404, 408 or 429.
# The sidecar refuses at once, and what it refused one is nothing to the others.
NEVER_SHUT_OUT: Mapping[str, Any] = {"cooldown_time": 0}
# Where LiteLLM has no hook for a provider of our own it speaks to the sidecar as to an
# OpenAI server.
_PLAIN_PROVIDERS = {
    "embedding": ("hosted_vllm", "embedding"),
    "reranker": ("hosted_vllm", "rerank"),
    "tts": ("openai", "audio_speech"),
    "stt": ("openai", "audio_transcription"),
}
NET = "mlx/*"
OURS = "mlx-"


class NoModelList(ValueError):
    """What the sidecar said is no list of models."""


@dataclass(frozen=True, slots=True)
class SidecarModel:
    """One model of the sidecar and the names it answers to."""

    id: str
    aliases: tuple[str, ...]
    kind: str
    max_input_tokens: int | None
    supports_function_calling: bool
    supports_reasoning: bool
    supports_vision: bool = False


@dataclass(frozen=True, slots=True)
class Upstream:
    """How LiteLLM reaches the sidecar, and how long it may be silent."""

    api_base: str
    timeout_s: float
    keepalive_s: float = 15.0
    has_key: bool = False


def parse_models(body: object) -> tuple[SidecarModel, ...]:
    """
    Read the body of the sidecar's `GET /v1/models`.

    Raises:
        NoModelList: it is none.
    """
    data = body.get("data") if isinstance(body, dict) else None
    if not isinstance(data, list):
        raise NoModelList("the sidecar's model list has no `data`")
    return tuple(_parse_model(item) for item in data)


def _parse_model(item: object) -> SidecarModel:
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        raise NoModelList(f"the sidecar lists a model without an id: {item!r}")
    max_input = item.get("max_input_tokens")
    return SidecarModel(
        id=item["id"],
        aliases=tuple(str(alias) for alias in item.get("aliases") or ()),
        kind=str(item.get("kind") or "llm"),
        max_input_tokens=max_input if isinstance(max_input, int) else None,
        supports_function_calling=bool(item.get("supports_function_calling")),
        supports_reasoning=bool(item.get("supports_reasoning")),
        supports_vision=bool(item.get("supports_vision")),
    )


def entries(
    models: Sequence[SidecarModel], upstream: Upstream
) -> Iterator[dict[str, Any]]:
    """One for each name of each model; a name that two have is the first one's."""
    seen = set()
    for model in models:
        for name in (model.id, *model.aliases):
            if name not in seen:
                seen.add(name)
                entry = _entry(name, model, upstream)
                entry["model_info"]["id"] = own_id(upstream.api_base, name)
                yield entry


def is_taken(name: str, others: Collection[object]) -> bool:
    """Whether a name is the user's own, or one that a pattern of the user's means."""
    patterns = [str(o) for o in others if "*" in str(o) and o != NET]
    return name in others or any(fnmatchcase(name, one) for one in patterns)


def own_id(base: str, name: str) -> str:
    """The id of an entry that is ours, wherever it was made."""
    return OURS + hashlib.sha256(f"{base} {name}".encode()).hexdigest()[:16]


def net(upstream: Upstream) -> dict[str, Any]:
    """Whatever the sidecar learns to serve later, and its other spellings."""
    return {
        "model_name": NET,
        "litellm_params": _params(NET, upstream),
        "model_info": {**NATIVE_ROUTES, **NEVER_SHUT_OUT},
    }


def _entry(name: str, model: SidecarModel, upstream: Upstream) -> dict[str, Any]:
    plain = _PLAIN_PROVIDERS.get(model.kind)
    if plain is None:
        params = _params(f"mlx/{model.id}", upstream)
        return {
            "model_name": name, "litellm_params": params, "model_info": _info(model),
        }  # fmt: skip
    provider, mode = plain
    params = _params(f"{provider}/{model.id}", upstream)
    # A client of OpenAI's does not ask without one.
    params["api_key"] = "os.environ/MLX_API_KEY" if upstream.has_key else "none"
    costs = dict.fromkeys(_COSTS, 0)
    info = {"mode": mode, **costs, **NEVER_SHUT_OUT}
    return {"model_name": name, "litellm_params": params, "model_info": info}


def _params(model: str, upstream: Upstream) -> dict[str, Any]:
    return {
        "model": model,
        "api_base": upstream.api_base,
        "timeout": upstream.timeout_s,
    }


def _info(model: SidecarModel) -> dict[str, Any]:
    info: dict[str, Any] = {"mode": "chat"}
    if model.max_input_tokens is not None:
        info["max_input_tokens"] = model.max_input_tokens
    # All four: LiteLLM warns of "custom pricing" where the cache costs are missing.
    info |= dict.fromkeys(_COSTS, 0)
    info["supports_function_calling"] = model.supports_function_calling
    info["supports_reasoning"] = model.supports_reasoning
    if model.supports_vision:
        info["supports_vision"] = True
    return info | dict(NATIVE_ROUTES) | dict(NEVER_SHUT_OUT)
