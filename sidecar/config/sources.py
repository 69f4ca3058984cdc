"""Reads settings from flags, environment and .env: their spellings, and which wins."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from sidecar.config.values import ValueType, boolean

Sources = Sequence[Mapping[str, str]]  # the first one that has a name wins


class ConfigError(Exception):
    """A setting has a value it cannot have; the message names both."""


def setting(
    default: Any, env: str, kind: ValueType, help: str, *also: str, shown: str = ""
) -> Any:
    """
    A field of a section.

    Args:
        env: the variable's name. also: older spellings of it.
        help: what it is, in a sentence; empty: nothing that people set.
        shown: the default in words, where the value does not say it.
    """
    meta = {"env": env, "kind": kind, "help": help, "also": also, "shown": shown}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: default, metadata=meta)
    return field(default=default, metadata=meta)


def spellings(item: Any) -> tuple[str, ...]:
    """All names of a field made by `setting`, the first wins."""
    env = item.metadata["env"]
    return (env, *item.metadata["also"], f"MLX_SERVER_{env}")


def order_sources(
    flags: Mapping[str, str],
    file: Mapping[str, str | None],
    env: Mapping[str, str],
) -> Sources:
    """
    Flags first, then the environment, then the file; ENV_FILE_OVERRIDES swaps these.

    Raises:
        ConfigError: ENV_FILE_OVERRIDES is neither true nor false.
    """
    file, env = _filled(file), _filled(env)
    override = env.get("ENV_FILE_OVERRIDES") or file.get("ENV_FILE_OVERRIDES") or "0"
    file_wins = _read("ENV_FILE_OVERRIDES", override, boolean)
    return (_filled(flags), file, env) if file_wins else (_filled(flags), env, file)


def read_env_file(file: Path) -> dict[str, str | None]:
    """
    The names and values of a `.env` file; one that is not there has none.

    Raises:
        ConfigError: it cannot be read.
    """
    logging.getLogger("dotenv.main").setLevel(logging.ERROR)  # see unread_lines
    try:
        return dotenv_values(file)
    except UnicodeDecodeError as error:
        problem = f"it is not in UTF-8 (byte {error.start}); save it in UTF-8"
    except OSError as error:
        problem = str(error.strerror)
    raise ConfigError(f"{file} cannot be read: {problem}")


def load_section(section: type, sources: Sources) -> Any:
    """
    A section with the values that the sources give.

    Raises:
        ConfigError: a value is out of its range.
    """
    values = {}
    for item in fields(section):
        given = ((n, s[n]) for s in sources for n in spellings(item) if n in s)
        name, text = next(given, ("", None))
        if text is not None:
            values[item.name] = _read(name, text, item.metadata["kind"])
    return section(**values)


def _filled(values: Mapping[str, str | None]) -> dict[str, str]:
    """Without the empty ones: empty means default."""
    return {name: text for name, text in values.items() if text and text.strip()}


def _read(name: str, text: str, kind: ValueType) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be {error}, got {text!r}") from None
