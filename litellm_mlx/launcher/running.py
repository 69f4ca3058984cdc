"""
Which servers of ours run: by the files with their pids.

A start with `--port` is known by those alone, so that verbs find it.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from litellm_mlx.launcher.ports import PidFile, command_of
from litellm_mlx.launcher.settings import (
    Address,
    LaunchSettings,
    merged_environment,
    verb_settings,
)

_PORTS = ("MLX_PORT", "MLX_SERVER_PORT", "PROXY_PORT")


def found_settings() -> LaunchSettings:
    """
    The settings of a verb, with the ports of the servers that run.

    Where ports are set, or none or several starts are found, those that are set count.

    Raises:
        SettingsError: one is out of its range; who runs the verb says so.
    """
    return at_running_ports(verb_settings())


def at_running_ports(settings: LaunchSettings) -> LaunchSettings:
    """The same settings with the ports of the one start that runs, if none is set."""
    environ = os.environ  # noqa: TID251 - whether a port was set, not what to do
    merged = merged_environment(settings.env_path, environ)
    if any(name in merged for name in _PORTS) or running_launchers(settings):
        return settings
    launchers = running_launchers(settings, on_any_port=True)
    if len(launchers) != 1:
        return settings
    sidecar = _at(settings, "sidecar", settings.sidecar)
    proxy = settings.proxy and _at(settings, "litellm", settings.proxy)
    ports = {"MLX_PORT": str(sidecar.port)}
    if proxy:
        ports["PROXY_PORT"] = str(proxy.port)
    child_env = {**settings.child_env, **ports}
    return replace(settings, sidecar=sidecar, proxy=proxy, child_env=child_env)


def _at(settings: LaunchSettings, name: str, address: Address) -> Address:
    """An address with the port of the server of that name that runs."""
    port = next(running_ports(settings, name), address.port)
    return replace(address, port=port)


def running_ports(settings: LaunchSettings, name: str) -> Iterator[int]:
    """Of all starts whose launcher lives, the ports of their servers of a name."""
    for path in sorted(settings.run_dir.glob(f"{name}-*.pid")):
        port = path.stem.removeprefix(f"{name}-")
        if port.isdecimal() and any(_launchers([path])):
            yield int(port)


def running_launchers(
    settings: LaunchSettings, *, on_any_port: bool = False
) -> list[int]:
    """Pids of launchers that hold the files of the ports that are set, or of any."""
    if on_any_port:
        files = sorted(settings.run_dir.glob("*.pid"))
    else:
        files = [settings.run_dir / f"sidecar-{settings.sidecar.port}.pid"]
        if settings.proxy is not None:
            files.append(settings.run_dir / f"litellm-{settings.proxy.port}.pid")
    return list(dict.fromkeys(_launchers(files)))


def _launchers(files: Iterable[Path]) -> Iterator[int]:
    for path in files:
        if not path.exists():
            continue
        file = PidFile(path)
        pid, is_held = file.launcher(), file.is_locked()
        file.close()
        # A pid may have passed to a stranger since; a lock ends with its holder.
        if pid is not None and is_held and "litellm" in command_of(pid):
            yield pid
