"""The two services the launcher runs: how each is started, and what it needs first."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from litellm_mlx import handlers_folder
from litellm_mlx.identity import SECRET_NAME, is_proven, secret_of
from litellm_mlx.json_objects import as_object, json_object
from litellm_mlx.launcher.child import Service
from litellm_mlx.launcher.ports import PROXY_MODULE, PidFile
from litellm_mlx.launcher.proxy_config import (
    ProxyConfigError,
    build_config,
    has_master_key,
    read_user_config,
    write_config,
)
from litellm_mlx.launcher.settings import MASTER_KEY, LaunchSettings, create_master_key
from litellm_mlx.launcher.terminal_lines import litellm_lines, sidecar_lines
from litellm_mlx.served_models import SidecarModel, Upstream, parse_models

_SIDECAR_DEADLINE_S = 600.0  # a large model from a slow disk
_PROXY_DEADLINE_S = 600.0  # 64 s were seen with cold files, 216 on a busy machine
_GB = 1e9
_HOPELESS = ("dead", "stuck")  # what no waiting mends
_MAY_ANSWER = ("loaded", "loading", "unloaded")
# A body of megabytes is gone with its request. glibc learns from it to keep the next
# one's memory, and each thread's, for good: mallopt(3). Fixed bounds do not learn.
# The sidecar, whose arrays come and go all the time, sets its own.
_GLIBC_RETURNS_MEMORY = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}
# -P: like LiteLLM's own command it finds no module in the folder that it starts in.
PROXY_COMMAND = (sys.executable, "-P", "-m", PROXY_MODULE)


@dataclass(frozen=True, slots=True)
class ProxyPlan:
    """How LiteLLM is to run; made before anything is started."""

    user_config: Mapping[str, Any]
    env: Mapping[str, str]
    needs_key: bool
    created_key: bool


def sidecar_service(settings: LaunchSettings, pid_file: PidFile) -> Service:
    """How the sidecar is started; it is healthy once it has a model that answers."""
    address, secret = settings.sidecar, secret_of(settings.instance_secret, "sidecar")
    command = [sys.executable, "-m", "sidecar"]
    command += ["--host", address.host, "--port", str(address.port)]
    if settings.model_flag:
        command += ["--model", settings.model_flag]
    return Service(
        name="sidecar",
        command=tuple(command),
        env={**settings.child_env, SECRET_NAME: secret},
        health_url=f"{address.url}/health",
        is_healthy=lambda answer: _says_ok(answer) and is_proven(secret, answer),
        start_deadline_s=_SIDECAR_DEADLINE_S,
        is_stuck=lambda answer: _status(answer) in _HOPELESS,
        is_fetching=lambda answer: _status(answer) == "downloading",
        fault_prefix="mlx-sidecar: error: ",
        on_pid=pid_file.write,
        shown=None if settings.is_verbose else sidecar_lines,
    )


def lists_models(answer: httpx.Response | None, settings: LaunchSettings) -> bool:
    """Whether a sidecar that starts knows its models: it loads one, or has it."""
    secret = secret_of(settings.instance_secret, "sidecar")
    return (
        answer is not None
        and _status(answer) in ("loading", "ok", "degraded")
        and is_proven(secret, answer)
    )


def loaded_share(answer: httpx.Response | None) -> str:
    """How much of a model's weights is there, in GB; "": it does not say."""
    load = as_object(answer and _body(answer).get("load"))
    done, total = load.get("done_bytes"), load.get("total_bytes")
    if not isinstance(done, int) or not isinstance(total, int) or not total:
        return ""
    return f"{done / _GB:.1f} of {total / _GB:.1f} GB"


def plan_proxy(settings: LaunchSettings) -> ProxyPlan | None:
    """
    Read the user's LiteLLM config and settle the master key; None without a proxy.

    Adds a random key to `.env` if others can reach the proxy and none is set.

    Raises:
        ConfigError: LiteLLM is not installed, or the config cannot be read.
    """
    if settings.proxy is None:
        return None
    if importlib.util.find_spec("litellm") is None:
        raise ProxyConfigError("LiteLLM is not installed: run install_and_run.py")
    env = dict(settings.child_env)
    user = read_user_config(settings.config_path, required=settings.config_required)
    must_create = not settings.proxy.is_loopback and not has_master_key(user, env)
    if must_create:
        env[MASTER_KEY] = create_master_key(settings.env_path)
    return ProxyPlan(user, env, has_master_key(user, env), must_create)


class SidecarGone(ProxyConfigError):
    """The sidecar is not there, or not any more."""


def fetch_models(settings: LaunchSettings) -> tuple[SidecarModel, ...]:
    """
    Ask the running sidecar what it serves.

    Raises:
        SidecarGone: it may have ended. ProxyConfigError: it says something else.
    """
    key = settings.api_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(trust_env=False, timeout=30.0, headers=headers) as client:
            answer = client.get(f"{settings.sidecar.url}/v1/models")
        return parse_models(answer.raise_for_status().json())
    except (httpx.HTTPError, ValueError) as error:
        is_gone = isinstance(error, httpx.TransportError)
        kind = SidecarGone if is_gone else ProxyConfigError
        raise kind(f"the sidecar did not list its models: {error}") from None


def write_proxy_config(
    settings: LaunchSettings, plan: ProxyPlan, models: Sequence[SidecarModel]
) -> None:
    """Write the config LiteLLM will be started with."""
    url = f"{settings.sidecar.url}/v1"
    upstream = Upstream(
        url, settings.request_timeout_s, settings.keepalive_s,
        has_key=settings.api_key is not None,
    )  # fmt: skip
    config = build_config(
        plan.user_config, models, upstream, permit_no_key=not plan.needs_key
    )
    write_config(settings.generated_config, config)


def proxy_service(
    settings: LaunchSettings, plan: ProxyPlan, pid_file: PidFile
) -> Service:
    """How LiteLLM is started, with the generated config."""
    proxy, secret = settings.proxy, secret_of(settings.instance_secret, "litellm")
    assert proxy is not None
    command = [*PROXY_COMMAND, "--config", str(settings.generated_config)]
    command += ["--host", proxy.host, "--port", str(proxy.port), "--num_workers", "1"]
    return Service(
        name="litellm",
        command=tuple(command),
        env={
            **(_GLIBC_RETURNS_MEMORY if sys.platform == "linux" else {}),
            **plan.env,
            SECRET_NAME: secret,
            handlers_folder.NAME: str(settings.config_path.resolve().parent),
        },
        # /health would send a real chat to every model.
        health_url=f"{proxy.url}/health/liveliness",
        # The gate before LiteLLM answers for it: so this says that it is in place.
        is_healthy=lambda answer: answer.is_success and is_proven(secret, answer),
        start_deadline_s=_PROXY_DEADLINE_S,
        is_stuck=lambda answer: False,  # it never says so; one that hangs is silent
        min_wait_s=settings.proxy_startup_wait_s,
        on_pid=pid_file.write,
        shown=None if settings.is_verbose else litellm_lines,
    )


def _says_ok(answer: httpx.Response) -> bool:
    """Ready, or without its default model but with others."""
    if answer.status_code != 200:
        return False
    if _status(answer) != "degraded":
        return _status(answer) == "ok"
    return any(one.get("state") in _MAY_ANSWER for one in answer.json()["models"])


def _status(answer: httpx.Response) -> object:
    return _body(answer).get("status")


def _body(answer: httpx.Response) -> Mapping[str, object]:
    return json_object(answer.content)
