"""
The LiteLLM config: the user's own file plus the models the sidecar serves.

The user's file is read and never written. Its `mlx/` entries are replaced by one
entry per served model and alias; every other entry and setting stays as it is.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from litellm_mlx.launcher.whole_files import replace_file
from litellm_mlx.served_models import SidecarModel, Upstream, entries, is_taken, net

HANDLER = {"provider": "mlx", "custom_handler": "litellm_mlx.provider.mlx_llm"}
# Of chat streams, and of /v1/messages.
_PINGS = ("sse_keepalive_ping_interval_seconds", "anthropic_sse_ping_interval_seconds")
_SECTIONS = {
    "model_list": list, "litellm_settings": dict, "general_settings": dict,
    "router_settings": dict,
}  # fmt: skip
PERMIT_NO_KEY = "dangerously_permit_weak_or_unset_master_key"


class ProxyConfigError(Exception):
    """A LiteLLM config that cannot be used."""


def read_user_config(path: Path, *, required: bool) -> dict[str, Any]:
    """
    Read the user's LiteLLM config; a missing one is empty unless required.

    `include` entries come back absolute, as the result is used in another folder.
    """
    if not path.exists() and not required:
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProxyConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise ProxyConfigError(
            f"{path} must hold a mapping, got {type(config).__name__}"
        )
    for name, kind in _SECTIONS.items():
        if not isinstance(config.get(name), (kind, NoneType)):
            words = "a list" if kind is list else "a mapping"
            raise ProxyConfigError(f"{path}: {name} must be {words}")
    if isinstance(config.get("include"), list):
        folder = path.resolve().parent
        config["include"] = [str(folder / str(item)) for item in config["include"]]
    return config


def build_config(
    user: Mapping[str, Any],
    models: Sequence[SidecarModel],
    upstream: Upstream,
    *,
    permit_no_key: bool,
) -> dict[str, Any]:
    """
    Join the user's config and the served models. Does not modify `user`.

    Args:
        permit_no_key: let LiteLLM run without a master key; for loopback only.
    """
    listed = user.get("model_list") or []
    kept = [entry for entry in listed if not _is_mlx(entry)]
    # A name the user gave to a model of his own stays his: two entries of one name
    # would share the requests, and some would leave the machine.
    taken = {entry.get("model_name") for entry in kept if isinstance(entry, dict)}
    served = {
        entry["model_name"]: entry
        for entry in (*entries(models, upstream), net(upstream))
        if not is_taken(entry["model_name"], taken)
    }
    for entry in filter(_is_mlx, listed):
        _add_wishes(served, entry)
    # A retry would only queue behind the request it repeats, and keeps a proxy that is
    # to stop waiting; for models elsewhere LiteLLM's own default stays.
    retries = {} if kept else {"num_retries": 0}
    return {
        **user,
        "router_settings": {**retries, **(user.get("router_settings") or {})},
        "model_list": [*served.values(), *kept],
        "litellm_settings": _litellm_settings(
            user.get("litellm_settings") or {}, upstream
        ),
        "general_settings": _general_settings(
            user.get("general_settings") or {}, permit_no_key
        ),
    }


def other_models(user: Mapping[str, Any]) -> list[str]:
    """Names of the user's own models, which the sidecar does not serve."""
    entries = user.get("model_list") or []
    own = (entry for entry in entries if isinstance(entry, dict))
    return [str(entry.get("model_name")) for entry in own if not _is_mlx(entry)]


def has_master_key(user: Mapping[str, Any], env: Mapping[str, str]) -> bool:
    """True if LiteLLM will find a master key, in the config or the environment."""
    key = (user.get("general_settings") or {}).get("master_key")
    if isinstance(key, str) and key.startswith("os.environ/"):
        key = env.get(key.removeprefix("os.environ/"))
    return bool(key or env.get("LITELLM_MASTER_KEY"))


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write the config in one step, readable by this user only (it may hold keys)."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    head = "# Generated at each start by litellm-mlx; edits are lost.\n"
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    replace_file(path, (head + text).encode(), 0o600)


def _is_mlx(entry: object) -> bool:
    params = entry.get("litellm_params") if isinstance(entry, dict) else None
    return isinstance(params, dict) and str(params.get("model")).startswith("mlx/")


def _add_wishes(served: dict[str, dict[str, Any]], own: Mapping[str, Any]) -> None:
    """
    Put what an `mlx/` entry of the user's asks for into the generated one.

    One under a name of its own becomes a further entry for the same served model;
    one for a model that is not served is left out.
    """
    params = dict(own["litellm_params"])
    asked = str(params.pop("model"))
    base = served.get(asked.removeprefix("mlx/")) or served.get(asked)
    if base is None:
        return
    for ours in ("api_base", "timeout"):
        params.pop(ours, None)
    entry = served.get(own.get("model_name") or "", base)
    merged = {
        **entry,
        "model_name": own.get("model_name") or entry["model_name"],
        "litellm_params": {**entry["litellm_params"], **params},
    }
    generated = {k: v for k, v in entry.get("model_info", {}).items() if k != "id"}
    if info := {**generated, **(own.get("model_info") or {})}:
        merged["model_info"] = info
    # One that asks for nothing more stays ours: it follows what the sidecar says.
    if merged != {**entry, "model_info": generated}:
        served[merged["model_name"]] = merged


def _litellm_settings(user: Mapping[str, Any], upstream: Upstream) -> dict[str, Any]:
    others = [
        item
        for item in user.get("custom_provider_map") or []
        if not isinstance(item, dict) or item.get("provider") != "mlx"
    ]
    # Silence makes clients give up: the proxy pings while a long prompt is computed.
    pings = dict.fromkeys(_PINGS, upstream.keepalive_s)
    # First: what comes with it finds the user's own handlers.
    first = {"custom_provider_map": [HANDLER, *others]}
    return {**first, **pings, **user, **first}


def _general_settings(user: Mapping[str, Any], permit_no_key: bool) -> dict[str, Any]:
    # Without cancel_on_disconnect a closed non-stream request runs to its end.
    settings = {"cancel_on_disconnect": True, **user}
    settings.pop(PERMIT_NO_KEY, None)
    return {**settings, PERMIT_NO_KEY: True} if permit_no_key else settings
