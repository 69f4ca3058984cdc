"""
`litellm-mlx doctor [--json] [--fix]`: what is wrong, and the one line that mends it.

Looks at the set-up, the machine, the ports, the settings, the models, LiteLLM's config,
the clients and, if a sidecar runs, its self-test and its reuse. Loads no model, changes
nothing; `--fix` does what can harm nothing. Ten seconds at most.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from pathlib import Path

from litellm_mlx.launcher.clients.launch import NotRunning, find_endpoint
from litellm_mlx.launcher.doctor.client_files import check_clients
from litellm_mlx.launcher.doctor.finding import Finding
from litellm_mlx.launcher.doctor.litellm_config import check_litellm
from litellm_mlx.launcher.doctor.machine import check_machine
from litellm_mlx.launcher.doctor.servers import check_ports, check_running
from litellm_mlx.launcher.doctor.set_up import check_set_up
from litellm_mlx.launcher.ready_block import fetch_health
from litellm_mlx.launcher.running import at_running_ports
from litellm_mlx.launcher.settings import (
    PACKAGE_PARENT,
    Flags,
    LaunchSettings,
    SettingsError,
    load_settings,
    settings_folder,
)

_OF_THE_HUB = ("HF_", "HUGGING_FACE_")
_LIMIT_S, _LOOK_S = 9.0, 2.0  # Python takes the tenth second to start


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 nothing is bad, 1 something is, 2 bad usage."""
    parser = argparse.ArgumentParser(
        prog="litellm-mlx doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="as a list of objects")
    parser.add_argument("--fix", action="store_true", help="mend what can harm nothing")
    options = parser.parse_args(argv)
    found = [*examine(settings_folder(), Path.home())]
    if options.fix:
        found = [_fixed(one) if one.fix else one for one in found]
    if options.json:
        rows = [
            {"group": f.group, "state": f.state, "found": f.found, "mend": f.mend}
            for f in found
        ]
        sys.stdout.write(f"{json.dumps(rows)}\n")
    else:
        for one in found:
            sys.stdout.write(f"{one}\n")
    return int(any(one.state == "bad" for one in found))


def examine(folder: Path, home: Path) -> Iterator[Finding]:
    """All findings, in the order of their groups."""
    try:
        settings = at_running_ports(load_settings(Flags(), folder))
    except SettingsError as error:
        yield Finding("settings", "bad", str(error), f"correct it in {folder}/.env")
        return
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("set-up", lambda: check_set_up(settings)),
        ("machine", lambda: check_machine(_limit(settings))),
        ("ports", lambda: check_ports(settings)),
        ("models", lambda: _model_half(folder, settings)),
        ("litellm", lambda: check_litellm(settings)),
        ("clients", lambda: check_clients(settings, home, _context(settings))),
        ("self-test", lambda: check_running(settings)),
    ]
    begun = [(name, _begin(check)) for name, check in checks]
    deadline = time.monotonic() + _LIMIT_S  # of all together
    for name, future in begun:
        try:
            yield from future.result(max(deadline - time.monotonic(), 0.0))
        except Late:
            yield Finding(name, "warn", f"not looked at within {_LIMIT_S:g} s")
        except Exception as error:  # noqa: BLE001 - one check must not hide the others
            yield Finding(name, "warn", f"could not be looked at: {error!r}")


def _begin(check: Callable[[], Iterable[Finding]]) -> Future[list[Finding]]:
    """Begin a check, on a thread that does not keep the command from ending."""
    future: Future[list[Finding]] = Future()

    def run() -> None:
        try:
            future.set_result(list(check()))
        except Exception as error:  # noqa: BLE001 - told as a finding
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _context(settings: LaunchSettings) -> int | None:
    try:
        return find_endpoint(settings, _LOOK_S).context
    except NotRunning:
        return None


def _limit(settings: LaunchSettings) -> int | None:
    return fetch_health(settings, _LOOK_S).limit_bytes


def _model_half(folder: Path, settings: LaunchSettings) -> list[Finding]:
    """The sidecar's own findings: the packages meet over processes only."""
    command = [sys.executable, "-m", "sidecar", "doctor", "--json"]
    own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(PACKAGE_PARENT)}
    # Where the hub and its cache are: its library reads the environment alone.
    merged = settings.child_env.items()
    hub = {name: value for name, value in merged if name.startswith(_OF_THE_HUB)}
    environ = {**os.environ, **hub, **own}  # noqa: TID251 - as the server reads it
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True,
        timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    try:
        return [Finding(**row) for row in json.loads(done.stdout)]
    except (ValueError, TypeError):
        tail = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        found = f"the sidecar cannot be run: {tail[0]}"
        return [Finding("set-up", "bad", found, "python3 install_and_run.py --check")]


def _fixed(one: Finding) -> Finding:
    assert one.fix is not None
    try:
        one.fix()
    except OSError as error:
        return Finding(one.group, one.state, f"{one.found}; {error}", one.mend)
    return Finding(one.group, "ok", f"mended: {one.found}")
