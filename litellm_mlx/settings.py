"""Where the sidecar is, its key and the time limit; read from the environment once."""

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies

from litellm_mlx.direct_routes import exempt
from litellm_mlx.identity import SECRET_NAME

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_MAX_TIMEOUT_S = 86_400


@dataclass(frozen=True, slots=True)
class Settings:
    """
    What the provider needs to reach a sidecar when a deployment does not say.

    Args:
        api_base: URL ending in `/v1`.
        api_key: sent as Bearer, None if the sidecar asks for none.
        request_timeout_s: longest silence of the sidecar, 1..86400.
        origins, hosts: of web pages and of this machine, let in beside its own.
        max_body_bytes: of a request to LiteLLM, as the sidecar limits its own.
        instance_secret: by which the launcher knows its children; see `identity`.
    """

    api_base: str = "http://127.0.0.1:8080/v1"
    api_key: str | None = None
    request_timeout_s: float = 1200.0
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_body_bytes: int = 64 << 20
    instance_secret: str | None = None


def read_settings(environ: Mapping[str, str]) -> Settings:
    """
    Build the settings from environment variables; empty means default.

    Raises:
        ValueError: a value is out of range; the message names the variable.
    """
    host = _first(environ, "MLX_HOST", "MLX_SERVER_HOST") or "127.0.0.1"
    host = _WILDCARDS.get(host, host)
    # 0 lets the sidecar choose; its deployments then name their own api_base.
    port = int(_number(environ, ("MLX_PORT", "MLX_SERVER_PORT"), 8080, (0, 65_535)))
    timeout_s = _number(
        environ, ("PROXY_REQUEST_TIMEOUT_SECONDS",), 1200, (1, _MAX_TIMEOUT_S)
    )
    shown_host = f"[{host}]" if ":" in host else host
    return Settings(
        api_base=f"http://{shown_host}:{port or 8080}/v1",
        api_key=_first(environ, "MLX_API_KEY", "MLX_SERVER_API_KEY"),
        request_timeout_s=timeout_s,
        origins=_origins(environ),
        hosts=tuple(host.lower() for host in _list(environ, "ALLOWED_HOSTS")),
        max_body_bytes=int(_number(environ, ("MAX_BODY_MB",), 64, (1, 4096))) << 20,
        instance_secret=_first(environ, SECRET_NAME),
    )


@functools.cache
def current_settings() -> Settings:
    """The settings of this process, read at the first call."""
    return read_settings(os.environ)  # noqa: TID251 - the one place that reads it


def ask_this_machine_directly() -> None:
    """Keep requests to the sidecar from the proxies that the environment names."""
    host = urlsplit(current_settings().api_base).hostname or "127.0.0.1"
    exempt(os.environ, host, getproxies)  # noqa: TID251 - the one place that changes it


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    every_name = (*names, f"MLX_SERVER_{names[0]}")  # the general alias
    values = (environ.get(name, "").strip() for name in every_name)
    return next((value for value in values if value), None)


def _origins(environ: Mapping[str, str]) -> tuple[str, ...]:
    name = "CORS_ALLOW_ORIGINS"
    found = tuple(origin.lower() for origin in _list(environ, name))
    if not {"null", "*"}.isdisjoint(found):  # any page: a sandboxed frame is null
        raise ValueError(f"{name} must be origins of web pages, no * and no null")
    return found


def _list(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """A comma list, or a JSON list, as the sidecar reads it."""
    text = _first(environ, name) or ""
    try:
        parts = json.loads(text) if text.startswith("[") else text.split(",")
    except ValueError:
        raise ValueError(f"{name} must be a comma list or a JSON list") from None
    return tuple(part.strip() for part in map(str, parts) if part.strip())


def _number(
    environ: Mapping[str, str],
    names: tuple[str, ...],
    default: float,
    limits: tuple[int, int],
) -> float:
    text = _first(environ, *names)
    if text is None:
        return default
    lowest, highest = limits
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not lowest <= value <= highest:  # also false for nan
        raise ValueError(f"{names[0]} must be {lowest}..{highest}, got {text!r}")
    return value
