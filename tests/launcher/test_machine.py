"""
What `doctor` says of a machine, by what its commands print.

The lines are those of macOS 15; only a Mac can confirm that they are as they are there.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from litellm_mlx.launcher.doctor.finding import Finding
from litellm_mlx.launcher.doctor.machine import check_machine, run

PMSET = """System-wide power settings:
Currently in use:
 standby              1
 sleep                1 (sleep prevented by powerd)
 lowpowermode         {low}
"""
SOUND = {
    "kern.memorystatus_vm_pressure_level": "1\n",
    "vm.swapusage": "total = 2048.00M  used = 811.25M  free = 1236.75M  (encrypted)\n",
    "iogpu.wired_limit_mb": "0\n",
    "pmset": PMSET.format(low=0),
}
LIMIT = 40 << 30


def of_mac(printed: Mapping[str, str], limit: int | None = LIMIT) -> list[Finding]:
    def printing(command: tuple[str, ...]) -> str | None:
        return printed.get("pmset" if command[0] == "pmset" else command[-1])

    return list(check_machine(limit, printing, is_mac=True))


def test_a_sound_mac_has_no_warning() -> None:
    (found,) = of_mac(SOUND)
    assert (found.state, found.mend) == ("ok", "")


@pytest.mark.parametrize(
    ("name", "printed", "words", "mend"),
    [
        ("kern.memorystatus_vm_pressure_level", "2\n", "pressure is warning", "close"),
        ("kern.memorystatus_vm_pressure_level", "4\n", "pressure is critical", "close"),
        (
            "vm.swapusage",
            "total = 9216.00M  used = 8192.50M  free = 1023.50M",
            "8.6 GB lie in swap",
            "close",
        ),
        (
            "iogpu.wired_limit_mb",
            "20480\n",
            "gives the GPU 21.5 GB, and the sidecar may take 42.9 GB",
            "MAX_PROCESS_MEMORY=20480MB in .env, or sudo sysctl "
            "iogpu.wired_limit_mb=40960",
        ),
        ("pmset", PMSET.format(low=1), "Low Power Mode is on", "pmset -a lowpowermode"),
    ],
)
def test_each_fault_of_a_mac(name: str, printed: str, words: str, mend: str) -> None:
    (found,) = of_mac({**SOUND, name: printed})
    assert found.state == "warn"
    assert words in found.found
    assert mend in found.mend


def test_a_wired_limit_is_enough_without_a_server() -> None:
    printed = {**SOUND, "iogpu.wired_limit_mb": "20480\n"}
    assert [found.state for found in of_mac(printed, None)] == ["ok"]
    assert [found.state for found in of_mac(printed, 19 << 30)] == ["ok"]


@pytest.mark.parametrize("odd", ["", "what?\n", "used = M", "-1\n"])
def test_odd_words_are_no_findings(odd: str) -> None:
    assert [found.state for found in of_mac(dict.fromkeys(SOUND, odd))] == ["ok"]
    assert [found.state for found in of_mac({})] == ["ok"]


@pytest.mark.parametrize(("available", "state"), [(2_000_000, "ok"), (700_000, "warn")])
def test_linux_says_what_is_available(
    available: int, state: str, tmp_path: Path
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 24000000 kB\nMemAvailable: {available} kB\n")
    (found,) = check_machine(None, meminfo=meminfo, is_mac=False)
    assert found.state == state


def test_a_command_that_is_not_there_or_fails_says_nothing() -> None:
    assert run(("no-such-command-here",)) is None
    assert run(("false",)) is None
    assert run(("echo", "1")) == "1\n"
