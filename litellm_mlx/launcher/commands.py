"""
Starts the sidecar and LiteLLM, keeps both running, stops them together.

Order: ports free? -> sidecar answers -> which models? -> LiteLLM config -> LiteLLM
up, while the sidecar loads -> sidecar up.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from litellm_mlx.file_limit import raise_file_limit
from litellm_mlx.launcher.ports import Claim, PidFile, PortHeld, claim_port
from litellm_mlx.launcher.progress import telling
from litellm_mlx.launcher.proxy_config import ProxyConfigError, other_models
from litellm_mlx.launcher.ready_block import fetch_health, ready_block
from litellm_mlx.launcher.running import found_settings
from litellm_mlx.launcher.servers_log import ServersLog
from litellm_mlx.launcher.services import (
    ProxyPlan,
    SidecarGone,
    fetch_models,
    lists_models,
    loaded_share,
    plan_proxy,
    proxy_service,
    sidecar_service,
    write_proxy_config,
)
from litellm_mlx.launcher.settings import (
    MASTER_KEY,
    Address,
    Flags,
    LaunchSettings,
    SettingsError,
    load_settings,
    settings_folder,
    valid_port,
    valid_sidecar_port,
)
from litellm_mlx.launcher.supervisor import ServiceFailed, StopRequested, Supervisor
from litellm_mlx.launcher.terminal_lines import row
from litellm_mlx.served_models import SidecarModel

_VERBS = {
    "launch": "litellm_mlx.launcher.clients.launch",
    "admin": "litellm_mlx.launcher.admin",
    "doctor": "litellm_mlx.launcher.doctor.main",
    "service": "litellm_mlx.launcher.service.main",
    "stop": "litellm_mlx.launcher.stop",
    "upgrade": "litellm_mlx.launcher.upgrade",
}
# The sidecar's own: they run in a process of their own, by the settings of `.env`.
_OF_SIDECAR = (
    "pull", "recommend", "rm", "list", "ps", "load", "unload", "pin", "unpin", "logs",
    "bench", "probe",
)  # fmt: skip
_STOP_GRACE_S = 5.0  # beyond the time the sidecar itself takes to drain
_STOPPED_EARLY = 130  # by Ctrl-C, before all was up
_REAL_MODEL = "lmstudio-community/GLM-4.7-Flash-MLX-4bit"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `litellm-mlx`; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in (*_VERBS, *_OF_SIDECAR):
        return _run_verb(argv[0], argv[1:])
    try:
        settings = load_settings(parse_flags(argv), Path.cwd())
    except SettingsError as error:
        _complain(str(error))
        return 2
    for line in notices(settings):
        _say(line)
    try:
        return run(settings)
    except (PortHeld, ProxyConfigError, OSError) as error:
        _complain(str(error))
    except ServiceFailed as failure:
        is_explained = failure.tail is None
        tail = f". Its last lines:\n{failure.tail or '(no output)'}"
        _complain(str(failure) if is_explained else f"{failure}{tail}")
    return 1


def _run_verb(name: str, argv: Sequence[str]) -> int:
    try:
        if name in _OF_SIDECAR:
            return _become_tool(name, argv)
        verb: Any = importlib.import_module(_VERBS[name])
        code: int = verb.main(argv)
    except SettingsError as error:
        sys.stderr.write(f"litellm-mlx {name}: {error}\n")
        return 2
    return code


def _become_tool(name: str, argv: Sequence[str]) -> int:
    """Hand a verb of the sidecar's on: this process becomes it."""
    settings = found_settings()
    command = [sys.executable, "-m", "sidecar", name, *argv]
    environ = {**settings.child_env, "LITELLM_MLX_FOLDER": str(settings_folder())}
    return os.execve(sys.executable, command, environ)


def parse_flags(argv: Sequence[str] | None) -> Flags:
    """Read the command line; a bad one ends the process with code 2."""
    parser = argparse.ArgumentParser(
        prog="litellm-mlx",
        description=__doc__,
        epilog=f"Verbs: {', '.join((*_VERBS, *_OF_SIDECAR))}; "
        "`litellm-mlx VERB --help` says more.",
    )
    add = parser.add_argument
    add("--model", help="hub id or folder; default: the built-in model [MODEL_PATH]")
    add("--port", type=_sidecar_port, help="of the sidecar; default 8080 [MLX_PORT]")
    add("--proxy-port", type=_port, help="of LiteLLM; default 4000 [PROXY_PORT]")
    add("--no-proxy", action="store_true", help="start the sidecar alone")
    add("--config", help="your LiteLLM config; default ./litellm_config.yaml")
    add("--verbose", action="store_true", help="show all that the servers write")
    return Flags(**vars(parser.parse_args(argv)))


def notices(settings: LaunchSettings) -> list[str]:
    """The first lines on the terminal: which model, and what it runs on."""
    lines = []
    if settings.model_path is None:
        lines += [
            "No MODEL_PATH is set: serving the small built-in model. A real one:",
            f"  python3 install_and_run.py --model {_REAL_MODEL}",
        ]
    return [*lines, *_name_clash(), f"Platform: {_platform_notice()}"]


def run(settings: LaunchSettings) -> int:
    """Start both servers and stay until a signal; returns the exit code."""
    _make_run_dir(settings.run_dir)
    raise_file_limit()  # both servers inherit it
    plan = plan_proxy(settings)
    if plan and plan.created_key:
        _say(
            "Others can reach LiteLLM, so a key was made for it: "
            f"{MASTER_KEY} in {settings.env_path}"
        )
    pid_files = _claim_ports(settings)
    supervisor = Supervisor(_say, stop_wait_s=settings.drain_timeout_s + _STOP_GRACE_S)
    _handle_signals(supervisor)
    code = 0
    with supervisor:
        try:
            _start_all(supervisor, settings, plan, pid_files)
            supervisor.watch()
        except StopRequested:
            code = _STOPPED_EARLY
        limit_s = settings.drain_timeout_s
        _say(
            f"stopping; running answers have {limit_s:g} s to end; once more to stop "
            "at once"
        )
    return 1 if supervisor.was_killed else code


def _make_run_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProxyConfigError(
            f"{folder} cannot be made ({error.strerror}); set MLX_CACHE_HOME to a "
            "folder that you can write to"
        ) from None


def _claim_ports(settings: LaunchSettings) -> dict[str, PidFile]:
    wanted: list[tuple[str, Address, str | None]] = [
        ("sidecar", settings.sidecar, None)
    ]
    if settings.proxy:
        wanted.append(("litellm", settings.proxy, str(settings.generated_config)))
    pid_files = {}
    for name, address, own_argument in wanted:
        pid_file = PidFile(settings.run_dir / f"{name}-{address.port}.pid")
        stale = claim_port(Claim(name, address, pid_file, own_argument))
        if stale is not None:
            _say(f"stopped a {name} left over from an earlier run (pid {stale})")
        pid_files[name] = pid_file
    return pid_files


def _start_all(
    supervisor: Supervisor,
    settings: LaunchSettings,
    plan: ProxyPlan | None,
    pid_files: Mapping[str, PidFile],
) -> None:
    model, log = settings.model_path or "the built-in model", _servers_log(settings)
    service = sidecar_service(settings, pid_files["sidecar"])
    sidecar = supervisor.begin(log.keeping(service))
    loads = row("sidecar", f"loads {model}")
    with telling(
        _say, loads, lambda: None if sidecar.is_up else loaded_share(sidecar.answer)
    ):
        supervisor.wait(lambda: lists_models(sidecar.answer, settings))
        if plan:
            write_proxy_config(settings, plan, _listed_by(supervisor, settings))
            with telling(_say, row("LiteLLM", "starts")):
                proxy = proxy_service(settings, plan, pid_files["litellm"])
                supervisor.start(log.keeping(proxy))
        supervisor.wait(lambda: sidecar.is_up)
    models = _listed_by(supervisor, settings)
    needs_key = plan.needs_key if plan else settings.api_key is not None
    health = fetch_health(settings)
    others = other_models(plan.user_config) if plan else []
    _say(
        ready_block(settings, models, needs_key=needs_key, health=health, others=others)
    )


def _listed_by(
    supervisor: Supervisor, settings: LaunchSettings
) -> tuple[SidecarModel, ...]:
    """What the sidecar serves; if it ends instead, the supervisor says why."""
    found: list[tuple[SidecarModel, ...]] = []

    def is_listed() -> bool:
        with contextlib.suppress(SidecarGone):
            found.append(fetch_models(settings))
        return bool(found)

    supervisor.wait(is_listed)
    return found[0]


def _servers_log(settings: LaunchSettings) -> ServersLog:
    try:
        return ServersLog(settings.servers_log)
    except OSError as error:
        where = settings.servers_log
        raise ProxyConfigError(f"{where} cannot be written: {error.strerror}") from None


def _handle_signals(supervisor: Supervisor) -> None:
    signal.signal(signal.SIGINT, supervisor.request_stop)
    # install_and_run.py kept it back until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, supervisor.request_stop)
    # Under nohup a hang-up is ignored, and stays so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, supervisor.request_stop)


def _name_clash() -> list[str]:
    """Say that a package index's `sidecar`, which is not ours, has its import name."""
    try:
        importlib.metadata.version("sidecar")
    except importlib.metadata.PackageNotFoundError:
        return []
    return [
        "Another package called `sidecar` is installed here, and takes the import name "
        "of this project's server: remove it (pip uninstall sidecar) and install again."
    ]


def _platform_notice() -> str:
    system, machine = platform.system(), platform.machine()
    if (system, machine) == ("Darwin", "arm64"):
        return "macOS arm64, MLX on Metal"
    names = {dist.name.lower() for dist in importlib.metadata.distributions()}
    if any(name.startswith("mlx-cuda") for name in names):
        return f"{system} {machine}, MLX on CUDA"
    return f"{system} {machine}, MLX on the CPU: slow (with an NVIDIA card: --cuda)"


def _port(text: str) -> int:
    return _checked(valid_port, text)


def _sidecar_port(text: str) -> int:
    return _checked(valid_sidecar_port, text)


def _checked(valid: Callable[[str], int], text: str) -> int:
    try:
        return valid(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}") from None


def _say(text: str) -> None:
    # Several threads speak, so a line is one write. A terminal that went away must
    # stop nobody: a service whose output is not read would block.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"litellm-mlx: {text}", file=sys.stderr, flush=True)
