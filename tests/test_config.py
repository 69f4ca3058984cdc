"""Settings: the order of sources, the spellings, the ranges."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.config.settings import Config, ServerConfig, load_config
from sidecar.config.sources import ConfigError
from sidecar.config.values import (
    hub_or_folder,
    model,
    physical_memory,
    place,
    places,
    plain,
)


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    return tmp_path / ".env"


def load(
    env_file: Path,
    file: str = "",
    environ: dict[str, str] | None = None,
    flags: dict[str, str] | None = None,
) -> Config:
    env_file.write_text(file)
    return load_config(flags or {}, env_file, environ or {})


def all_settings() -> Iterator[tuple[str, Any]]:
    for section in dataclasses.fields(Config):
        for item in dataclasses.fields(type(section.default)):
            yield section.name, item


def test_nothing_set_gives_the_defaults(env_file: Path) -> None:
    """No file, no environment, no flags."""
    assert load_config({}, env_file, {}) == Config()


def test_later_sources_win(env_file: Path) -> None:
    """Default, .env, environment, flag: each beats the one before."""
    file, environ, flags = "MLX_PORT=1", {"MLX_PORT": "2"}, {"MLX_PORT": "3"}
    assert load(env_file).server.port == 8080
    assert load(env_file, file).server.port == 1
    assert load(env_file, file, environ).server.port == 2
    assert load(env_file, file, environ, flags).server.port == 3


@pytest.mark.parametrize("source", ["file", "environment", "flag"])
def test_a_tilde_is_the_home_folder(
    env_file: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever MODEL_PATH comes from, and in the other paths; a hub id stays."""
    monkeypatch.setenv("HOME", "/home/me")
    given = {"MODEL_PATH": "~/models/x", "CACHE_RULES_FILE": "~/r", "LOG_ROOT": "~/l"}
    file = "".join(f"{k}={v}\n" for k, v in given.items()) if source == "file" else ""
    config = load(
        env_file,
        file,
        given if source == "environment" else {},
        given if source == "flag" else {},
    )
    assert config.model.path == "/home/me/models/x"
    assert (config.cache.rules_file, config.log.root) == ("/home/me/r", "/home/me/l")
    assert load(env_file, "MODEL_PATH=org/name").model.path == "org/name"


@pytest.mark.parametrize("place", ["file", "environment"])
def test_the_file_can_be_made_to_win(env_file: Path, place: str) -> None:
    """ENV_FILE_OVERRIDES=true lets .env beat the environment, and never a flag."""
    switch = "ENV_FILE_OVERRIDES=true\n" if place == "file" else ""
    environ = {"MLX_PORT": "2"}
    if place == "environment":
        environ["ENV_FILE_OVERRIDES"] = "1"
    file = switch + "MLX_PORT=1"
    assert load(env_file, file, environ).server.port == 1
    assert load(env_file, file, environ, {"MLX_PORT": "3"}).server.port == 3


def test_empty_means_default(env_file: Path) -> None:
    """An empty value is as good as none, in either source and either order."""
    assert load(env_file, "MLX_PORT=5", {"MLX_PORT": " "}).server.port == 5
    file = "ENV_FILE_OVERRIDES=1\nMLX_PORT="
    assert load(env_file, file, {"MLX_PORT": "2"}).server.port == 2
    assert load(env_file, "MLX_PORT=", {}, {"MLX_PORT": ""}).server.port == 8080


@pytest.mark.parametrize(
    ("name", "section", "field", "text", "value"),
    [
        ("MLX_SERVER_DEFAULT_MODEL", "model", "path", "org/m", "org/m"),
        ("MLX_SERVER_API_KEY", "server", "api_key", "key-of-8", "key-of-8"),
        ("MLX_SERVER_HOST", "server", "host", "::1", "::1"),
        ("MLX_SERVER_PORT", "server", "port", "9", 9),
        ("DEFAULT_ENABLE_THINKING", "generation", "thinking", "off", False),
        ("MLX_SERVER_BATCH_MAX_BATCH_SIZE", "engine", "batch_max_size", "3", 3),
        ("MLX_SERVER_MAX_CACHE_SIZE_GB", "engine", "max_cache_gb", "2.5", 2.5),
        ("PROMPT_CACHE_MAX_SIZE", "cache", "max_entries", "7", 7),
    ],
)
def test_older_spellings(
    env_file: Path, name: str, section: str, field: str, text: str, value: object
) -> None:
    """Each name of the also column works."""
    config = load(env_file, "", {name: text})
    assert getattr(getattr(config, section), field) == value


def test_every_setting_has_the_general_alias(env_file: Path) -> None:
    """MLX_SERVER_<NAME> is read for each setting: a bad value is complained about."""
    for _, item in all_settings():
        name = f"MLX_SERVER_{item.metadata['env']}"
        if item.metadata["kind"] in (plain, place, places, model, hub_or_folder):
            continue
        with pytest.raises(ConfigError, match=rf"^{name} must be "):
            load(env_file, "", {name: "[nonsense"})


def test_the_first_spelling_wins_within_a_source(env_file: Path) -> None:
    """The proper name beats its older spellings."""
    environ = {"MLX_SERVER_MLX_PORT": "3", "MLX_SERVER_PORT": "2", "MLX_PORT": "1"}
    assert load(env_file, "", environ).server.port == 1
    del environ["MLX_PORT"]
    assert load(env_file, "", environ).server.port == 2
    del environ["MLX_SERVER_PORT"]
    assert load(env_file, "", environ).server.port == 3


def test_a_later_source_wins_under_any_spelling(env_file: Path) -> None:
    """The environment beats .env even if it uses an older name."""
    assert load(env_file, "MLX_PORT=1", {"MLX_SERVER_PORT": "2"}).server.port == 2


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_words_for_yes(env_file: Path, text: str) -> None:
    """Booleans in any case."""
    assert load(env_file, "", {"TRUST_REMOTE_CODE": text}).model.trust_remote_code


@pytest.mark.parametrize("text", ["0", "false", "No", " OFF "])
def test_words_for_no(env_file: Path, text: str) -> None:
    """Booleans in any case."""
    assert not load(env_file, "", {"METRICS_ENABLED": text}).server.metrics_enabled


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 1 << 30),
        ("64GB", 64 << 30),
        ("8GiB", 8 << 30),
        ("64 gb", 64 << 30),
        ("1.5MB", 3 << 19),
        ("2KB", 2048),
        ("1TB", 1 << 40),
        ("0", 0),
        ("50%", physical_memory() // 2),
    ],
)
def test_sizes(env_file: Path, text: str, size: int) -> None:
    """Bytes, units of 1024, and shares of the memory."""
    got = load(env_file, "", {"PROMPT_CACHE_MAX_BYTES": text}).cache.max_bytes
    assert got == size


def test_lists(env_file: Path) -> None:
    """A comma list or JSON."""
    for text in ("a.b, c ,", '["a.b", "c"]'):
        config = load(env_file, "", {"ALLOWED_HOSTS": text})
        assert config.server.allowed_hosts == ("a.b", "c")


def test_names_of_hosts_are_those_that_browsers_send(env_file: Path) -> None:
    """In lower case."""
    named = {"ALLOWED_HOSTS": "A.Example", "CORS_ALLOW_ORIGINS": "HTTP://A.example:1"}
    server = load(env_file, "", named).server
    assert server.allowed_hosts == ("a.example",)
    assert server.cors_allow_origins == ("http://a.example:1",)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("MLX_PORT", "65536", "a whole number 0..65535"),
        ("MLX_PORT", "80.5", "a whole number 0..65535"),
        ("MLX_PORT", "http", "a whole number 0..65535"),
        ("KEEPALIVE_SECONDS", "0", "a number 0.1..3600"),
        ("KEEPALIVE_SECONDS", "nan", "a number 0.1..3600"),
        ("DEFAULT_TOP_P", "1.1", "a number 0..1"),
        ("METRICS_ENABLED", "maybe", "true or false"),
        ("ENV_FILE_OVERRIDES", "maybe", "true or false"),
        ("LOG_LEVEL", "LOUD", "one of DEBUG, INFO, WARNING, ERROR"),
        ("MODEL_FAMILY", "llama", "one of qwen3, glm4, generic"),
        ("PROMPT_CACHE_MAX_BYTES", "8 bananas", "bytes, a size such as 64GB"),
        ("PROMPT_CACHE_MAX_BYTES", "-1", "bytes, a size such as 64GB"),
        ("PROMPT_CACHE_MAX_BYTES", "inf%", "bytes, a size such as 64GB"),
        ("PROMPT_CACHE_MAX_BYTES", "200%", "bytes, a size such as 64GB"),
        ("PROMPT_CACHE_MAX_BYTES", "1e999GB", "bytes, a size such as 64GB"),
        ("AVAILABLE_MODELS", "[1", "a comma list or a JSON list of strings"),
        ("AVAILABLE_MODELS", "[1]", "a comma list or a JSON list of strings"),
        ("ALLOWED_HOSTS", "*", "host names without a port, no *"),
        ("ALLOWED_HOSTS", "[1]", "host names without a port, no *"),
        ("ALLOWED_HOSTS", "a b", "host names without a port, no *"),
        ("ALLOWED_HOSTS", "chat.example:80", "host names without a port, no *"),
        ("CORS_ALLOW_ORIGINS", "*", "origins such as https://chat.example"),
        ("CORS_ALLOW_ORIGINS", "null", "origins such as https://chat.example, no *"),
        ("CORS_ALLOW_ORIGINS", "http://é.example", "origins such as https"),
        ("ALLOWED_HOSTS", "-1", "host names without a port, no *"),
        ("ALLOWED_HOSTS", "a" * 254, "host names without a port, no *"),
        ("MAX_PROCESS_MEMORY", "5", "1MB or more"),
        ("CORS_ALLOW_ORIGINS", "chat.example", "origins such as https://chat.example"),
        ("CORS_ALLOW_ORIGINS", "https://a/", "origins such as https://chat.example"),
    ],
)
def test_a_bad_value_names_variable_and_range(
    env_file: Path, name: str, text: str, wanted: str
) -> None:
    """The start stops with the name as it was written, the range and the value."""
    with pytest.raises(ConfigError) as caught:
        load(env_file, "", {name: text})
    message = str(caught.value)
    assert message.startswith(f"{name} must be {wanted}")
    assert message.endswith(f"got {text!r}")


def test_every_numeric_default_is_in_its_own_range(env_file: Path) -> None:
    """A default that is written out in .env is taken."""
    for section, item in all_settings():
        default = getattr(getattr(Config(), section), item.name)
        if isinstance(default, (int, float, str)):
            config = load(env_file, f"{item.metadata['env']}={default}")
            assert getattr(getattr(config, section), item.name) == default


def test_sections_are_frozen() -> None:
    """Nobody changes settings after the start."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerConfig().port = 1  # type: ignore[misc]
