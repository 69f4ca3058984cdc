"""One set of names: in `.env.example`, in the three readers, in warnings."""

import ast
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litellm_mlx.launcher.settings import (
    Address,
    Flags,
    LaunchSettings,
    SettingsError,
    load_settings,
)
from litellm_mlx.settings import Settings, read_settings
from sidecar.config.names import known_names, unknown_names
from sidecar.config.reasons import FILE_REASONS, REASONS
from sidecar.config.settings import Config, LauncherConfig, load_config
from sidecar.config.sources import spellings
from tools import write_settings

REPO = Path(__file__).parents[1]
EXAMPLE = (REPO / ".env.example").read_text()
PAGE = (REPO / "docs" / "settings.md").read_text()
SETTINGS = {
    item.metadata["env"]: (section.name, item)
    for section in dataclasses.fields(Config)
    for item in dataclasses.fields(type(section.default))
}


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    return tmp_path / ".env"


# The example.


def lines_of_example() -> dict[str, str]:
    found = re.findall(r"^# ([A-Z][A-Z0-9_]+)=(.*)$", EXAMPLE, re.MULTILINE)
    assert len(found) == len(dict(found)), "a name stands there twice"
    return dict(found)


def test_the_example_is_complete() -> None:
    """Each setting of the sidecar, the launcher and the plugin, and nothing else."""
    shown = set(lines_of_example()) - {"ANTHROPIC_API_KEY"}
    elsewhere = {item.metadata["env"] for item in dataclasses.fields(LauncherConfig)}
    # From the launcher at each start.
    between_ourselves = {"MLX_INSTANCE_SECRET", "MLX_ENV_FILE_NAMES"}
    assert shown == {*SETTINGS, *elsewhere} - between_ourselves


def test_example_and_page_are_made_from_the_table() -> None:
    """Run `python -m tools.write_settings` after a change."""
    assert write_settings.env_example() == EXAMPLE
    assert write_settings.settings_page() == PAGE


def test_the_launcher_takes_what_the_table_says(tmp_path: Path) -> None:
    """Its own settings have the table's defaults and ranges."""
    fields = {item.metadata["env"]: item for item in dataclasses.fields(LauncherConfig)}
    shown = load_settings(Flags(), tmp_path, {})
    assert shown.proxy == Address(fields["PROXY_HOST"].default, 4000)
    assert fields["PROXY_PORT"].default == 4000
    assert shown.proxy_startup_wait_s == fields["PROXY_STARTUP_WAIT_SECONDS"].default
    assert shown.request_timeout_s == fields["PROXY_REQUEST_TIMEOUT_SECONDS"].default
    for name, item in fields.items():
        kind = item.metadata["kind"].range
        if not kind.startswith(("a number", "a whole")):
            continue
        low, high = (float(end) for end in kind.rpartition(" ")[2].split(".."))
        for text in (f"{low:g}", f"{high:g}"):
            load_settings(Flags(), tmp_path, {name: text})
        for text in (f"{low - 1:g}", f"{high + 1:g}"):
            with pytest.raises(SettingsError, match=rf"^{name} must be "):
                load_settings(Flags(), tmp_path, {name: text})


def test_the_example_shows_the_defaults(env_file: Path) -> None:
    """Taking all comments away changes nothing."""
    written = lines_of_example()
    env_file.write_text("".join(f"{n}={text}\n" for n, text in written.items()))
    assert load_config({}, env_file, {}) == Config()
    shown = load_settings(Flags(), env_file.parent, {})
    env_file.unlink()
    silent = load_settings(Flags(), env_file.parent, {})
    hidden = {"child_env": {}}
    assert dataclasses.replace(shown, **hidden) == dataclasses.replace(silent, **hidden)
    without = [n for n, text in written.items() if not text and n in SETTINGS]
    # 0 of bytes is written in a word: off.
    assert all(SETTINGS[name][1].default in (None, (), 0) for name in without)


# The three readers.

LAUNCHER: dict[str, Callable[[LaunchSettings], object]] = {
    "MODEL_PATH": lambda s: s.model_path,
    "MLX_HOST": lambda s: s.sidecar.host,
    "MLX_PORT": lambda s: s.sidecar.port,
    "MLX_API_KEY": lambda s: s.api_key,
    "KEEPALIVE_SECONDS": lambda s: s.keepalive_s,
    "DRAIN_TIMEOUT_SECONDS": lambda s: s.drain_timeout_s,
    "ENABLE_REQUEST_LOGGING": lambda s: s.logs.is_on,
    "LOG_CONTENT": lambda s: s.logs.with_content,
    "LOG_ROOT": lambda s: s.logs.root.name,
}
PLUGIN: dict[str, Callable[[Settings], object]] = {
    "MLX_HOST": lambda s: s.api_base,
    "MLX_PORT": lambda s: s.api_base,
    "MLX_API_KEY": lambda s: s.api_key,
}
VALUES: dict[str, str] = {
    "MODEL_PATH": "org/model", "MLX_HOST": "127.0.0.9", "MLX_PORT": "1234",
    "MLX_API_KEY": "a-key-of-ours", "KEEPALIVE_SECONDS": "7",
    "DRAIN_TIMEOUT_SECONDS": "8", "ENABLE_REQUEST_LOGGING": "no", "LOG_CONTENT": "off",
    "LOG_ROOT": "elsewhere",
}  # fmt: skip


def aliases(shared: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, one) for name in shared for one in spellings(SETTINGS[name][1])]


@pytest.mark.parametrize(("name", "spelling"), aliases(LAUNCHER))
def test_the_launcher_reads_what_the_sidecar_reads(
    tmp_path: Path, name: str, spelling: str
) -> None:
    """Under each spelling, from the environment and from the file; same default."""
    section, item = SETTINGS[name]
    read = LAUNCHER[name]
    config = load_config({}, tmp_path / ".env", {spelling: VALUES[name]})
    wanted = getattr(getattr(config, section), item.name)
    assert wanted != item.default
    assert read(load_settings(Flags(), tmp_path, {})) == item.default
    assert read(load_settings(Flags(), tmp_path, {spelling: VALUES[name]})) == wanted
    (tmp_path / ".env").write_text(f"{spelling}={VALUES[name]}\n")
    assert read(load_settings(Flags(), tmp_path, {})) == wanted


@pytest.mark.parametrize(("name", "spelling"), aliases(PLUGIN))
def test_the_plugin_reads_what_the_sidecar_reads(name: str, spelling: str) -> None:
    """Under each spelling: a key to one is a key to all."""
    read = PLUGIN[name]
    assert VALUES[name] in str(read(read_settings({spelling: VALUES[name]})))


@pytest.mark.parametrize(
    "name",
    ["PROXY_HOST", "PROXY_PORT", "PROXY_STARTUP_WAIT_SECONDS"],
)
def test_the_launchers_own_names_have_the_general_alias(
    tmp_path: Path, name: str
) -> None:
    """MLX_SERVER_<NAME> is a spelling of every name."""
    value = {"PROXY_HOST": "127.0.0.9"}.get(name, "1234")
    plain = load_settings(Flags(), tmp_path, {name: value})
    alias = load_settings(Flags(), tmp_path, {f"MLX_SERVER_{name}": value})
    assert dataclasses.replace(alias, child_env=plain.child_env) == plain


def test_launcher_and_plugin_read_the_same_time_limit(tmp_path: Path) -> None:
    """With the same default, under both spellings."""
    for environ in ({}, {"PROXY_REQUEST_TIMEOUT_SECONDS": "5"},
                    {"MLX_SERVER_PROXY_REQUEST_TIMEOUT_SECONDS": "6"}):  # fmt: skip
        launcher = load_settings(Flags(), tmp_path, environ)
        assert launcher.request_timeout_s == read_settings(environ).request_timeout_s


@pytest.mark.parametrize(
    ("name", "text"),
    [("KEEPALIVE_SECONDS", "0"), ("KEEPALIVE_SECONDS", "3601"),
     ("DRAIN_TIMEOUT_SECONDS", "3601"), ("PROXY_REQUEST_TIMEOUT_SECONDS", "0")],
)  # fmt: skip
def test_a_range_is_the_same_for_all(tmp_path: Path, name: str, text: str) -> None:
    """What the sidecar or the plugin would refuse, the launcher refuses first."""
    with pytest.raises(Exception, match=rf"^{name} must be "):
        load_settings(Flags(), tmp_path, {name: text})


def test_no_reader_knows_a_name_of_its_own() -> None:
    """Each name in the launcher's and the plugin's code is a known one."""
    theirs = {
        "PYTHONPATH", "PYTHONUNBUFFERED", "FORCE_COLOR", "NO_COLOR",
        "LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_DONT_SHOW_FEEDBACK_BOX",
    }  # fmt: skip
    read = {
        node.value
        for file in ("launcher/settings.py", "settings.py")
        for node in ast.walk(ast.parse((REPO / "litellm_mlx" / file).read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[A-Z]+_[A-Z_]*[A-Z]", node.value)
    }
    assert len(read) > 10
    assert read - theirs - known_names() == set()


# Names that nobody reads.


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MLX_PROT", "MLX_PORT"),
        ("MAX_KV_SIZES", "MAX_KV_SIZE"),
        ("PROMT_CACHE_TTL_SECONDS", "PROMPT_CACHE_TTL_SECONDS"),
        ("TEMPERATURE", "DEFAULT_TEMPERATURE"),
        ("PROXY_PROT", "PROXY_PORT"),
        ("MXL_API_KEY", "MLX_API_KEY"),
        ("MODEL_PAHT", "MODEL_PATH"),
        ("NOTHING_LIKE_IT", None),
    ],
)
def test_an_unknown_name_in_the_file_is_told(
    env_file: Path, name: str, meant: str | None
) -> None:
    """With the nearest known name, if one is near."""
    env_file.write_text(f"{name}=1\nMLX_PORT=4\nMLX_SERVER_LOG_LEVEL=INFO\n")
    (found,) = unknown_names(env_file, {})
    assert (found.name, found.meant) == (name, meant)
    assert str(found).startswith(f"unknown setting {name} in {env_file}")


def test_known_names_and_other_peoples_are_not_told(env_file: Path) -> None:
    """The whole example, keys of cloud models, and what a config beside it uses."""
    names = [*lines_of_example(), *known_names()]
    names += ["OPENAI_API_KEY", "MISTRAL_API_BASE", "HF_TOKEN", "https_proxy", "MY_KEY"]
    env_file.write_text("".join(f"{name}=x\n" for name in names))
    config = "model_list: [{litellm_params: {api_key: os.environ/MY_KEY}}]\n"
    (env_file.parent / "mine.yaml").write_text(config)
    assert unknown_names(env_file, {}) == []


def test_of_the_environment_only_what_can_only_be_ours(env_file: Path) -> None:
    """The general alias, and misspelt names that are long enough to be sure."""
    environ = dict.fromkeys(
        ["MLX_SERVER_PROT", "PROXY_PROT", "CACHE_PINING", "EDITOR", "LESS", "MY_NAME",
         "KV_BITZ", "TEMPERATURE", "LS_COLORS", "XAI_API_KEY", "MODEL_DIR"], "1"
    )  # fmt: skip
    found = {one.name: one.meant for one in unknown_names(env_file, environ)}
    assert found == {
        "CACHE_PINING": "CACHE_PINNING",
        "MLX_SERVER_PROT": "MLX_SERVER_PORT",
        "PROXY_PROT": "PROXY_PORT",
    }


def test_a_name_is_told_once(env_file: Path) -> None:
    """The launcher hands the file on as environment."""
    env_file.write_text("CACHE_PINING=1\n")
    assert len(unknown_names(env_file, {"CACHE_PINING": "1"})) == 1


SEEDS = ["PROMPT_CACHE_MAX_ENTRIES_PER_SESSION", "PROMPT_CACHE_BLOCK_SIZE",
         "CACHE_SESSION_PARTITIONING", "CACHE_NORM_SAFETY_CHECK",
         "VLM_CACHE_DEBUG", "GPU_LAYERS", "GPULayers"]  # fmt: skip


@pytest.mark.parametrize("name", SEEDS)
@pytest.mark.parametrize("place", ["file", "environment"])
def test_a_name_that_does_nothing_says_why(
    env_file: Path, name: str, place: str
) -> None:
    """Not that it is unknown, and not that another was meant."""
    written = {f"MLX_SERVER_{name}": "1", name: "1"}
    if place == "file":
        env_file.write_text("".join(f"{n}={v}\n" for n, v in written.items()))
        written = {}
    for found in unknown_names(env_file, written):
        source = str(env_file) if place == "file" else "the environment"
        reason = str(found).removeprefix(f"{found.name} in {source} has no effect: ")
        assert len(reason) > 30
        assert reason != str(found)
    assert len(unknown_names(env_file, written)) == 2


def test_a_name_that_others_use_as_well_is_explained_in_a_file_of_ours(
    env_file: Path,
) -> None:
    """In the environment such a name may be another program's."""
    assert not known_names() & {*FILE_REASONS, *REASONS}
    env_file.write_text("".join(f"{name}=1\n" for name in FILE_REASONS))
    found = unknown_names(env_file, {})
    assert {each.name for each in found} == {*FILE_REASONS}
    assert all(str(each).endswith(FILE_REASONS[each.name]) for each in found)
    env_file.unlink()
    assert unknown_names(env_file, dict.fromkeys(FILE_REASONS, "1")) == []


def test_an_older_name_of_the_cache_home_acts(tmp_path: Path) -> None:
    no_file = tmp_path / ".env"
    config = load_config({}, no_file, {"EXO_CACHE_HOME": str(tmp_path)})
    assert config.disk.home == tmp_path
    both = {"EXO_CACHE_HOME": "/nowhere", "MLX_CACHE_HOME": str(tmp_path)}
    assert load_config({}, no_file, both).disk.home == tmp_path


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MLX_SERVER_MAX_MEMORY_GB", "MAX_MODEL_MEMORY=8GB"),
        ("MLX_SERVER_EMBEDDED_MODE", "sidecar.library.asgi()"),
        ("MLX_SERVER_ENABLE_CLOUD_ROUTING", "litellm_config.yaml"),
    ],
)
def test_names_of_other_servers_say_what_to_write(
    tmp_path: Path, name: str, hint: str
) -> None:
    (found,) = unknown_names(tmp_path / ".env", {name: "1"})
    assert hint in str(found)
