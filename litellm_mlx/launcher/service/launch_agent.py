"""A LaunchAgent of macOS: launchd.plist(5)."""

import os
import plistlib
from pathlib import Path

from litellm_mlx.launcher.service.program import MARK, Program

LABEL = "dev.litellm-mlx"


class LaunchAgent:
    """Files in `~/Library/LaunchAgents`, commands of launchctl."""

    advice = ""

    def __init__(self, home: Path) -> None:
        self._domain = f"gui/{os.getuid()}"
        self.path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def text(self, program: Program) -> bytes:
        """The property list; it is started anew only where it failed."""
        fields = {
            "Label": LABEL,
            "ProgramArguments": [*program.arguments],
            "WorkingDirectory": str(program.folder),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,
            "ProcessType": "Interactive",
            "ExitTimeOut": program.stop_s,
            "StandardOutPath": str(program.output),
            "StandardErrorPath": str(program.output),
        }
        head, plist, body = plistlib.dumps(fields).partition(b"<plist")
        return head + f"<!-- {MARK} -->\n".encode() + plist + body

    def start(self) -> list[list[str]]:
        """Load it."""
        return [["launchctl", "bootstrap", self._domain, str(self.path)]]

    def stop(self) -> list[list[str]]:
        """Unload it, which ends it."""
        return [["launchctl", "bootout", f"{self._domain}/{LABEL}"]]

    def removed(self) -> list[list[str]]:
        """Nothing is left."""
        return []

    def status(self) -> list[str]:
        """What launchd says of it."""
        return ["launchctl", "print", f"{self._domain}/{LABEL}"]
