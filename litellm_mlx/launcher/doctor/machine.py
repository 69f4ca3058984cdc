"""What of the machine slows a model or ends it: memory, swap, power."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from litellm_mlx.launcher.doctor.finding import Finding

# Runs a command; what it prints, or None where there is none.
Run = Callable[[tuple[str, ...]], str | None]

_GROUP = "machine"
_GB, _MIB = 1e9, 1 << 20
_LOOK_S = 3.0
_MUCH_SWAP_GB = 4.0
_LITTLE = 0.05  # of the memory that is available
_MEMINFO = Path("/proc/meminfo")
_SWAP_USED = re.compile(r"used = ([\d.]+)M")
_CLOSE = "close what takes memory, or choose a smaller model"
# kern.memorystatus_vm_pressure_level of macOS
_PRESSURES = {"2": "warning", "4": "critical"}


def run(command: tuple[str, ...]) -> str | None:
    """What a command of the system prints; None: there is none, or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "LC_ALL": "C"},  # noqa: TID251 - numbers as they are read
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def check_machine(
    limit_bytes: int | None,
    run: Run = run,
    meminfo: Path = _MEMINFO,
    *,
    is_mac: bool = platform.system() == "Darwin",
) -> Iterator[Finding]:
    """
    Findings of this machine.

    Args:
        limit_bytes: what a running sidecar may take; None: none runs.
        meminfo: where Linux tells of its memory.
    """
    found = list(_of_mac(limit_bytes, run) if is_mac else _of_linux(meminfo))
    yield from found
    if not found:
        yield Finding(_GROUP, "ok", "memory, swap and power are in order")


def _of_mac(limit_bytes: int | None, run: Run) -> Iterator[Finding]:
    level = (_value(run, "kern.memorystatus_vm_pressure_level") or "").strip()
    if level in _PRESSURES:
        found = f"macOS says that memory pressure is {_PRESSURES[level]}"
        yield Finding(_GROUP, "warn", found, _CLOSE)
    swap = _SWAP_USED.search(_value(run, "vm.swapusage") or "")
    used_gb = float(swap[1]) * _MIB / _GB if swap else 0.0
    if used_gb > _MUCH_SWAP_GB:
        yield Finding(_GROUP, "warn", f"{used_gb:.1f} GB lie in swap", _CLOSE)
    yield from _wired(limit_bytes, _whole(_value(run, "iogpu.wired_limit_mb")))
    power = _power(run(("pmset", "-g")) or "")
    # Where there is a High Power Mode as well, it is one setting of three.
    if "1" in (power.get("lowpowermode"), power.get("powermode")):
        found = "Low Power Mode is on: the GPU runs at a part of its speed"
        yield Finding(_GROUP, "warn", found, "sudo pmset -a lowpowermode 0")


def _wired(limit_bytes: int | None, wired_mb: int) -> Iterator[Finding]:
    """The GPU may keep no more than this wired; 0: what macOS chooses."""
    wired = wired_mb * _MIB
    if limit_bytes is None or not 0 < wired < limit_bytes:
        return
    needed_mb = -(-limit_bytes // _MIB)
    found = (
        f"iogpu.wired_limit_mb={wired_mb} gives the GPU {wired / _GB:.1f} GB, and the "
        f"sidecar may take {limit_bytes / _GB:.1f} GB"
    )
    mend = f"set MAX_PROCESS_MEMORY={wired_mb}MB in .env, or sudo sysctl "
    yield Finding(_GROUP, "warn", found, f"{mend}iogpu.wired_limit_mb={needed_mb}")


def _of_linux(meminfo: Path) -> Iterator[Finding]:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return
    known = {name: _whole(rest) for name, _, rest in (x.partition(":") for x in lines)}
    total, available = known.get("MemTotal", 0), known.get("MemAvailable", 0)
    if available < _LITTLE * total:
        found = f"{available * 1024 / _GB:.1f} GB of memory are available"
        yield Finding(_GROUP, "warn", found, _CLOSE)


def _value(run: Run, name: str) -> str | None:
    return run(("sysctl", "-n", name))


def _whole(text: str | None) -> int:
    words = (text or "").split()
    return int(words[0]) if words and words[0].isdecimal() else 0


def _power(text: str) -> Mapping[str, str]:
    """`pmset -g`: a name and a value a line."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 1}
