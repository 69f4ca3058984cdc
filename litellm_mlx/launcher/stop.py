"""
`litellm-mlx stop`: stops the servers of this folder, as Ctrl-C in their terminal does.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from litellm_mlx.launcher.ports import command_of
from litellm_mlx.launcher.running import found_settings, running_launchers
from litellm_mlx.launcher.settings import LaunchSettings

_POLL_S, _GRACE_S = 0.1, 15.0


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 stopped, 1 nothing runs or it does not end, 2 bad usage."""
    parser = argparse.ArgumentParser(prog="litellm-mlx stop", description=__doc__)
    parser.parse_args(argv)
    settings = found_settings()
    code = stop_running(settings)
    if code is None:
        sys.stderr.write(
            "litellm-mlx stop: nothing of this project runs; "
            "`doctor` names what an earlier run left\n"
        )
        return 1
    return code


def stop_running(settings: LaunchSettings, *, on_any_port: bool = False) -> int | None:
    """
    Stop what runs; 0, 1 if something does not end, None if nothing runs.

    Args:
        on_any_port: not on those alone that are set.
    """
    pids = running_launchers(settings, on_any_port=on_any_port)
    if not pids:
        return None
    return max(_stopped(pid, settings.drain_timeout_s) for pid in pids)


def _stopped(pid: int, drain_s: float) -> int:
    sys.stdout.write(f"stopping pid {pid}; running answers have {drain_s:g} s to end\n")
    sys.stdout.flush()
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + drain_s + _GRACE_S
    while command_of(pid):
        if time.monotonic() > deadline:
            sys.stderr.write(f"litellm-mlx stop: pid {pid} does not end\n")
            return 1
        time.sleep(_POLL_S)
    return 0
