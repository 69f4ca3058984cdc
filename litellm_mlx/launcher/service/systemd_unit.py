"""A user's unit of systemd: systemd.service(5)."""

from pathlib import Path

from litellm_mlx.launcher.service.program import MARK, Program

NAME = "litellm-mlx.service"
_RELOAD = ["systemctl", "--user", "daemon-reload"]


class SystemdUnit:
    """
    A file among the user's units, commands of systemctl.

    Args:
        config_home: XDG_CONFIG_HOME, or `~/.config`.
    """

    advice = "To have it run while you are not logged in: loginctl enable-linger"

    def __init__(self, config_home: Path) -> None:
        self.path = config_home / "systemd" / "user" / NAME

    def text(self, program: Program) -> bytes:
        """The unit; where it failed it is started anew, five times in 5 minutes."""
        executable, *rest = map(_quoted, program.arguments)
        command = " ".join([executable, *(word.replace("$", "$$") for word in rest)])
        lines = [
            f"# {MARK}",
            "[Unit]",
            "Description=litellm-mlx: local MLX models behind LiteLLM",
            "StartLimitIntervalSec=300",
            "StartLimitBurst=5",
            "",
            "[Service]",
            f"ExecStart={command}",
            f"WorkingDirectory={_escaped(str(program.folder))}",
            "Restart=on-failure",
            "RestartSec=10",
            f"TimeoutStopSec={program.stop_s}",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
        return "\n".join(lines).encode()

    def start(self) -> list[list[str]]:
        """Read the file, then start it; one that runs is started anew."""
        enable = ["systemctl", "--user", "enable", NAME]
        return [_RELOAD, enable, ["systemctl", "--user", "restart", NAME]]

    def stop(self) -> list[list[str]]:
        """Stop it, and start it at no login."""
        return [["systemctl", "--user", "disable", "--now", NAME]]

    def removed(self) -> list[list[str]]:
        """Let systemd forget the file."""
        return [_RELOAD]

    def status(self) -> list[str]:
        """What systemd says of it."""
        return ["systemctl", "--user", "--no-pager", "status", NAME]


def _quoted(argument: str) -> str:
    text = _escaped(argument).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
