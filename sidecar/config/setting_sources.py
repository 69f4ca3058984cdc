"""
Where settings come from, kept so that they can be read again while the server runs.

Lowest first: the default, what was saved over HTTP (`settings.json` in the cache home),
`.env`, the process environment as it was at the start, flags.
"""

import dataclasses
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar.config.disk_settings import DiskConfig
from sidecar.config.settings import SECTIONS, Config, LauncherConfig, config_of
from sidecar.config.sources import (
    ConfigError,
    load_section,
    order_sources,
    read_env_file,
    spellings,
)

DEFAULT, SAVED = "default", "settings.json"
_FROM_FILE = "MLX_ENV_FILE_NAMES"  # from the launcher
_MAX_BYTES = 1 << 20
_SECRETS = ("MLX_API_KEY", "ADMIN_TOKEN", "LITELLM_MASTER_KEY", "MLX_INSTANCE_SECRET")


@dataclass(frozen=True, slots=True)
class SettingRow:
    """
    A setting as people see it.

    Args:
        value, default: as JSON has them; of a secret, whether there is one.
        takes: its range in words. origin: who said the value.
        saved: what was saved over HTTP and is hidden by the origin; None: nothing is.
    """

    name: str
    value: Any
    default: Any
    takes: str
    help: str
    origin: str
    saved: str | None = None


class SettingSources:
    """
    Reads all settings, as often as wanted.

    Args:
        flags: variable name -> text, from the command line.
        env_file: the `.env` file; it need not exist.
        environ: the process environment.
    """

    def __init__(
        self, flags: Mapping[str, str], env_file: Path, environ: Mapping[str, str]
    ) -> None:
        self._flags, self._env_file = dict(flags), env_file
        # The launcher put what the file says there, too.
        of_file = environ.get(_FROM_FILE, "").split(",")
        self._environ = {n: t for n, t in environ.items() if n not in of_file}
        disk: DiskConfig = load_section(DiskConfig, self._ordered())
        self._saved_file = disk.home / "settings.json"

    def config(self, saved: Mapping[str, str] | None = None) -> Config:
        """
        All settings, as the files say them now.

        Args:
            saved: in place of what was saved.
        Raises:
            ConfigError: a value is out of its range, or a file cannot be read.
        """
        return config_of([values for _, values in self._named(saved)])

    def rows(self, config: Config) -> Iterator[SettingRow]:
        """All that people set, with the values that a configuration has."""
        named = dict(self._named(None))
        own = {f.type: getattr(config, f.name) for f in dataclasses.fields(Config)}
        for section in SECTIONS:
            values = own.get(section) or load_section(section, [*named.values()])
            for item in dataclasses.fields(section):
                if item.metadata["help"]:
                    yield _row(item, values, section(), named)

    def saved(self) -> dict[str, str]:
        """
        What was saved over HTTP.

        Raises:
            ConfigError: the file cannot be used.
        """
        file = self.saved_file
        try:
            body = json.loads(_read(file))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        if not isinstance(body, dict):
            raise ConfigError(f"{file} must hold an object")
        return {str(name): str(value) for name, value in body.items()}

    def check(self, name: str, text: str) -> None:
        """
        Look whether a setting may have a value, whatever other sources say.

        Raises:
            ConfigError: it is out of its range.
        """
        config_of([{name: text}])

    @property
    def saved_file(self) -> Path:
        """Where that stands, as of the start."""
        return self._saved_file

    def _ordered(self) -> list[Mapping[str, str]]:
        return [
            *order_sources(self._flags, read_env_file(self._env_file), self._environ)
        ]

    def _named(
        self, saved: Mapping[str, str] | None
    ) -> list[tuple[str, Mapping[str, str]]]:
        """All sources by name, the one that wins first."""
        flags, second, third = self._ordered()
        is_env_first = second == {n: t for n, t in self._environ.items() if t.strip()}
        names = ("environment", ".env") if is_env_first else (".env", "environment")
        kept = self.saved() if saved is None else saved
        return [("flag", flags), (names[0], second), (names[1], third), (SAVED, kept)]


def _row(
    item: Any, values: Any, defaults: Any, named: Mapping[str, Mapping[str, str]]
) -> SettingRow:
    """
    A field of a section.

    Args:
        named: all sources, the one that wins first.
    """
    meta = item.metadata
    name, known = meta["env"], spellings(item)
    saying = (label for label, said in named.items() if any(n in said for n in known))
    origin = next(saying, DEFAULT)
    return SettingRow(
        name,
        _shown(name, getattr(values, item.name)),
        meta["shown"] or _shown(name, getattr(defaults, item.name)),
        meta["kind"].range,
        meta["help"],
        origin,
        named[SAVED].get(name) if origin != SAVED else None,
    )


def _read(file: Path) -> bytes:
    """A file's bytes; a pipe, which would never end, is none."""
    number = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as stream:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(f"{file.name} is no file")
        return stream.read(_MAX_BYTES)


def _shown(name: str, value: Any) -> Any:
    if name in _SECRETS:
        return "set" if value else None
    return list(value) if isinstance(value, tuple) else value


def is_of_launcher(name: str) -> bool:
    """Whether LiteLLM or its launcher reads a setting, and not the sidecar."""
    return name in {f.metadata["env"] for f in dataclasses.fields(LauncherConfig)}
