"""
Settings that act while the server runs: read again, saved, and put into effect.

A change is one swap of a frozen configuration: a request keeps the one that it began
with. Where one value is out of its range nothing changes. What shapes a loaded model,
addresses, secrets and folders wait for the next start, and this is said.
"""

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.config.setting_sources import (
    SAVED,
    SettingRow,
    SettingSources,
    is_of_launcher,
)
from sidecar.config.settings import SECTIONS, Config
from sidecar.config.sources import ConfigError
from sidecar.core.errors import BadRequest, Unavailable
from sidecar.kv.disk.durable_files import replace_private

logger = logging.getLogger(__name__)

NOW, RESTART = "now", "at the next start"


@dataclass(frozen=True, slots=True)
class Part:
    """
    Settings that act at once.

    Args:
        names: theirs. act: puts a configuration's values into effect.
    """

    names: tuple[str, ...]
    act: Callable[[Config], None]


@dataclass(frozen=True, slots=True)
class Changed:
    """
    A setting that is another one now.

    Args:
        acts: when. shadowed_by: who says another value, which wins; None: nobody.
    """

    name: str
    old: Any
    new: Any
    acts: str
    shadowed_by: str | None = None


class LiveSettings:
    """
    All settings of a running server. Any thread.

    Args:
        config: as it is in effect. sources: None: it cannot be read again.
        parts: what acts at once.
    """

    def __init__(
        self, config: Config, sources: SettingSources | None, parts: Sequence[Part]
    ) -> None:
        self._config = config if sources is None else sources.config()
        self._sources, self._parts = sources, tuple(parts)
        self._lock = threading.Lock()

    def add(self, part: Part) -> None:
        """Have more settings act at once."""
        with self._lock:
            self._parts = (*self._parts, part)

    @property
    def _live(self) -> set[str]:
        return {name for part in self._parts for name in part.names}

    def rows(self) -> list[dict[str, Any]]:
        """Each setting: value, default, range, who said it, when a change acts."""
        sources = self._require_sources()
        with self._lock:
            config = self._config
        try:
            found = list(sources.rows(config))
        except ConfigError as error:
            raise Unavailable(str(error)) from None
        return [self._row(row) for row in found]

    def change(self, changes: Mapping[str, Any]) -> list[Changed]:
        """
        Save values and have them act; `None` takes back what was saved.

        Raises:
            BadRequest: one is unknown, not live, or out of its range; nothing changes.
        """
        sources = self._require_sources()
        for name in changes:
            self._check_name(name)
        with self._lock:
            try:
                saved = sources.saved()
            except ConfigError as error:
                raise Unavailable(str(error)) from None
            for name, value in changes.items():
                if value is None:
                    saved.pop(name, None)
                else:
                    saved[name] = _as_text(name, value)
            try:
                config = sources.config(saved)
                _check_each(sources, changes)
            except ConfigError as error:
                param = next((n for n in changes if n in str(error)), None)
                raise BadRequest(str(error), param=param) from None
            try:
                sources.saved_file.parent.mkdir(parents=True, exist_ok=True)
                data = json.dumps(saved, indent=1).encode()
                replace_private(sources.saved_file, data)
            except OSError as error:
                raise Unavailable(f"settings.json cannot be written: {error}") from None
            found = self._put(config)
            hidden = {one.name: one for one in self._shadowed(sources, changes)}
            return [*(one for one in found if one.name not in hidden), *hidden.values()]

    def reload(self) -> list[Changed]:
        """
        Read the files again.

        Raises:
            BadRequest: a value is out of its range; nothing changes.
        """
        sources = self._require_sources()
        with self._lock:
            try:
                config = sources.config()
            except ConfigError as error:
                raise BadRequest(str(error)) from None
            return self._put(config)

    def _put(self, config: Config) -> list[Changed]:
        """Have what is live act; what has changed."""
        changed = list(_differences(self._config, config, self._live))
        names = {one.name for one in changed if one.acts == NOW}
        self._config = _with_live(self._config, config, self._live)
        for part in self._parts:
            if names.intersection(part.names):
                part.act(self._config)
        for one in changed:
            logger.info("setting %s changed, acts=%s", one.name, one.acts)
        return changed

    def _shadowed(
        self, sources: SettingSources, changes: Mapping[str, Any]
    ) -> list[Changed]:
        """What was saved and has no effect, as somebody else says another value."""
        rows = {row.name: row for row in sources.rows(self._config)}
        return [
            Changed(name, rows[name].value, value, NOW, rows[name].origin)
            for name, value in changes.items()
            if value is not None and rows[name].origin != SAVED
        ]

    def _row(self, row: SettingRow) -> dict[str, Any]:
        acts = NOW if row.name in self._live else RESTART
        if is_of_launcher(row.name):
            acts = f"{RESTART} of LiteLLM"
        return {**dataclasses.asdict(row), "acts": acts}

    def _check_name(self, name: str) -> None:
        if name in self._live:
            return
        known = {f.metadata["env"] for s in SECTIONS for f in dataclasses.fields(s)}
        if name in known:
            message = f"{name} acts at the next start: set it in .env"
        else:
            message = f"{name[:64]} is no setting"
        raise BadRequest(message, param=name[:64])

    def _require_sources(self) -> SettingSources:
        if self._sources is None:
            raise Unavailable("the settings of this server were given by a program")
        return self._sources


def _as_text(name: str, value: Any) -> str:
    """As it would stand in `.env`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, str)) and str(value).strip():
        return str(value)
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    raise BadRequest(f"{name} must be a value, or null to take it back", param=name)


def _check_each(sources: SettingSources, changes: Mapping[str, Any]) -> None:
    """Whether each is in its range, though another source may hide it."""
    for name, value in changes.items():
        if value is not None:
            sources.check(name, _as_text(name, value))


def _differences(old: Config, new: Config, live: set[str]) -> Iterable[Changed]:
    for section in dataclasses.fields(Config):
        before, after = getattr(old, section.name), getattr(new, section.name)
        for item in dataclasses.fields(before):
            if not item.metadata["help"]:
                continue
            name = item.metadata["env"]
            values = getattr(before, item.name), getattr(after, item.name)
            if values[0] == values[1]:
                continue
            is_secret = name in ("MLX_API_KEY", "ADMIN_TOKEN")
            before_shown, now_shown = ("set", "changed") if is_secret else values
            acts = NOW if name in live else RESTART
            yield Changed(name, before_shown, now_shown, acts)


def _with_live(old: Config, new: Config, live: set[str]) -> Config:
    """The old one, with the live values of the new one."""
    sections = {}
    for section in dataclasses.fields(Config):
        before, after = getattr(old, section.name), getattr(new, section.name)
        taken = {
            item.name: getattr(after, item.name)
            for item in dataclasses.fields(before)
            if item.metadata["env"] in live
        }
        sections[section.name] = dataclasses.replace(before, **taken)
    return Config(**sections)
