"""
What the launcher needs to know, from flags, the process environment and `.env`.

Later wins: default, `.env`, process environment (`ENV_FILE_OVERRIDES=true` lets
`.env` beat it), flag. A blank value counts as not set.
"""

import ipaddress
import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dotenv import dotenv_values

from litellm_mlx.identity import SECRET_NAME, new_secret

MASTER_KEY = "LITELLM_MASTER_KEY"
# Names that stand in the children's environment because `.env` has them: the sidecar
# reads that file itself, and anew when it is asked to.
FROM_FILE = "MLX_ENV_FILE_NAMES"
DEFAULT_CONFIG = "litellm_config.yaml"
PACKAGE_PARENT = Path(__file__).resolve().parents[2]
# What makes a program run other code is not for a file of the folder of its start.
_NOT_FROM_A_FILE = ("PYTHON", "LD_", "DYLD_")
_BUILTIN = ("built-in", "builtin")  # as the sidecar has it
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class SettingsError(Exception):
    """A setting has a value it cannot have; the message names both."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The command line as given; None where a flag was left out."""

    model: str | None = None
    port: int | None = None
    proxy_port: int | None = None
    no_proxy: bool = False
    config: str | None = None
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server binds."""

    host: str
    port: int

    @property
    def local_host(self) -> str:
        """The host under which this machine itself reaches the server."""
        return _ANY_HOST.get(self.host, self.host)

    @property
    def url(self) -> str:
        """The server's root as seen from this machine, without a final slash."""
        host = self.local_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True)
class SessionLogs:
    """Whether and where the sidecar keeps what is said."""

    is_on: bool
    with_content: bool
    root: Path


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Everything the launcher acts on. Times are in seconds."""

    model_flag: str | None  # handed on; MODEL_PATH reaches the sidecar by itself
    model_path: str | None  # what will be served; None is the built-in model
    sidecar: Address
    proxy: Address | None  # None: no LiteLLM
    config_path: Path
    config_required: bool
    env_path: Path
    run_dir: Path
    proxy_startup_wait_s: float
    keepalive_s: float
    request_timeout_s: float
    drain_timeout_s: float
    api_key: str | None
    admin_token: str | None
    master_key: str | None
    logs: SessionLogs
    is_verbose: bool  # all that the servers write is shown
    child_env: Mapping[str, str]

    @property
    def instance_secret(self) -> str:
        """By which the children prove that they are ours."""
        return self.child_env[SECRET_NAME]

    @property
    def servers_log(self) -> Path:
        """Where all that the servers write is kept."""
        return self.run_dir.parent / "servers.log"

    @property
    def generated_config(self) -> Path:
        """The file LiteLLM is started with."""
        port = self.proxy.port if self.proxy else 0
        return self.run_dir / f"litellm_config-{port}.yaml"


def settings_folder() -> Path:
    """
    Where `.env` lies for a command that is called from any folder.

    LITELLM_MLX_FOLDER says it; else it is the checkout, where this is one: the folder
    at hand may be a project of the user's, whose `.env` is none of ours.
    """
    named = os.environ.get("LITELLM_MLX_FOLDER")  # noqa: TID251 - see above
    if named:
        return Path(named).expanduser()
    is_checkout = (PACKAGE_PARENT / "install_and_run.py").exists()
    return PACKAGE_PARENT if is_checkout else Path.cwd()


def verb_settings() -> LaunchSettings:
    """
    The settings of a verb, which is called from any folder.

    Raises:
        SettingsError: one is out of its range; who runs the verb says so.
    """
    return load_settings(Flags(), settings_folder())


def load_settings(
    flags: Flags, folder: Path, environ: Mapping[str, str] | None = None
) -> LaunchSettings:
    """
    Gather the settings.

    Args:
        folder: where `.env` and the default LiteLLM config are looked for.
        environ: the process environment, or a stand-in.
    Raises:
        SettingsError: a value is out of its range.
    """
    env = merged_environment(folder / ".env", environ)
    proxy_port = flags.proxy_port or _port(env, "PROXY_PORT", 4000)
    proxy = Address(_text(env, "PROXY_HOST") or "127.0.0.1", proxy_port)
    sidecar_port = _sidecar_port(flags, env)
    if sidecar_port == proxy_port and not flags.no_proxy:
        raise SettingsError(f"MLX_PORT and PROXY_PORT must differ, got {proxy_port}")
    sidecar_host = _text(env, "MLX_HOST", "MLX_SERVER_HOST") or "127.0.0.1"
    sidecar = Address(sidecar_host, sidecar_port)
    config_path = folder / Path(flags.config or DEFAULT_CONFIG).expanduser()
    return LaunchSettings(
        model_flag=flags.model,
        model_path=_model_path(flags, env),
        sidecar=sidecar,
        proxy=None if flags.no_proxy else proxy,
        config_path=config_path,
        config_required=flags.config is not None,
        env_path=folder / ".env",
        run_dir=_cache_home(env) / "run",
        proxy_startup_wait_s=_seconds(env, "PROXY_STARTUP_WAIT_SECONDS", 2.0),
        keepalive_s=_seconds(env, "KEEPALIVE_SECONDS", 15.0, (0.1, 3600)),
        request_timeout_s=_seconds(
            env, "PROXY_REQUEST_TIMEOUT_SECONDS", 1200.0, (1, 86400)
        ),
        drain_timeout_s=_seconds(env, "DRAIN_TIMEOUT_SECONDS", 30.0, (0, 3600)),
        api_key=_text(env, "MLX_API_KEY", "MLX_SERVER_API_KEY"),
        admin_token=_text(env, "ADMIN_TOKEN", "MLX_SERVER_ADMIN_TOKEN"),
        master_key=env.get(MASTER_KEY),
        logs=_session_logs(env, folder),
        is_verbose=flags.verbose or (_text(env, "LOG_LEVEL") or "").upper() == "DEBUG",
        child_env={
            **_child_environment(env, sidecar),
            FROM_FILE: ",".join(_of_file(folder / ".env", env, environ)),
        },
    )


def _model_path(flags: Flags, env: Mapping[str, str]) -> str | None:
    path = flags.model or _text(env, "MODEL_PATH", "MLX_SERVER_DEFAULT_MODEL")
    return os.path.expanduser(path) if path and path not in _BUILTIN else None


def merged_environment(
    env_file: Path, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The process environment and `.env` as one mapping, blank values left out."""
    process = dict(os.environ if environ is None else environ)  # noqa: TID251
    env = {name: text for name, text in process.items() if text.strip()}
    file = {
        name: text
        for name, text in _read_env_file(env_file).items()
        if text and not name.startswith(_NOT_FROM_A_FILE)
    }
    override = env.get("ENV_FILE_OVERRIDES", file.get("ENV_FILE_OVERRIDES", "0"))
    return {**env, **file} if _is_true(override) else {**file, **env}


def _of_file(
    env_file: Path, merged: Mapping[str, str], environ: Mapping[str, str] | None
) -> list[str]:
    """Names whose value `.env` says, not the process environment."""
    process = os.environ if environ is None else environ  # noqa: TID251 - see above
    named = [name for name in _read_env_file(env_file) if name in merged]
    return [name for name in named if merged[name] != process.get(name)]


def _read_env_file(file: Path) -> dict[str, str | None]:
    logging.getLogger("dotenv.main").setLevel(logging.ERROR)  # the sidecar says it
    try:
        return dotenv_values(file)
    except UnicodeDecodeError as error:
        problem = f"it is not in UTF-8 (byte {error.start}); save it in UTF-8"
    except OSError as error:
        problem = str(error.strerror)
    raise SettingsError(f"{file} cannot be read: {problem}")


def create_master_key(env_path: Path) -> str:
    """Add a random LiteLLM master key to `.env` (readable by the user only)."""
    key = "sk-" + secrets.token_urlsafe(32)
    old = env_path.read_text(encoding="utf-8") if env_path.exists() else ""
    line = f"{MASTER_KEY}={key}\n"
    descriptor = os.open(env_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(line if not old or old.endswith("\n") else "\n" + line)
    return key


def _child_environment(env: Mapping[str, str], sidecar: Address) -> dict[str, str]:
    paths = [env["PYTHONPATH"]] if "PYTHONPATH" in env else []
    paths.append(str(PACKAGE_PARENT))
    child = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DONT_SHOW_FEEDBACK_BOX": "true",
        **env,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        # Else a `sidecar` or `json` in the folder of the start runs instead of ours.
        "PYTHONSAFEPATH": "1",
        # For the plugin: a flag may have said otherwise than the environment.
        "MLX_HOST": sidecar.host,
        "MLX_PORT": str(sidecar.port),
        SECRET_NAME: new_secret(),
    }
    # The children write into a pipe, where they would leave their colours out.
    if sys.stdout.isatty() and "NO_COLOR" not in env:
        child.setdefault("FORCE_COLOR", "1")
    return child


def _cache_home(env: Mapping[str, str]) -> Path:
    chosen = env.get("MLX_CACHE_HOME") or env.get("EXO_CACHE_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache/litellm-mlx"


def _text(env: Mapping[str, str], name: str, also: str = "") -> str | None:
    for spelling in (name, also, f"MLX_SERVER_{name}"):
        if spelling in env:
            return env[spelling].strip()
    return None


def _port(env: Mapping[str, str], name: str, default: int) -> int:
    text = _text(env, name)
    try:
        return valid_port(text) if text else default
    except ValueError as error:
        raise SettingsError(f"{name} must be {error}, got {text!r}") from None


def valid_port(text: str) -> int:
    """Read a port number; ValueError with the range in words."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError("a port 1..65535")
    return int(text)


def valid_sidecar_port(text: str) -> int:
    """The same; 0, as elsewhere, is any free one."""
    return 0 if text.strip("0") == "" and text else valid_port(text)


def _sidecar_port(flags: Flags, env: Mapping[str, str]) -> int:
    text = _text(env, "MLX_PORT", "MLX_SERVER_PORT") or "8080"
    try:
        port = valid_sidecar_port(text) if flags.port is None else flags.port
    except ValueError as error:
        raise SettingsError(f"MLX_PORT must be {error}, got {text!r}") from None
    if port:
        return port
    # It has to be known before the sidecar is up: LiteLLM is given it.
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _seconds(
    env: Mapping[str, str],
    name: str,
    default: float,
    limits: tuple[float, float] = (0, 86400),
) -> float:
    text = _text(env, name)
    lowest, highest = limits
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not lowest <= value <= highest:
        limit = f"seconds {lowest:g}..{highest:g}"
        raise SettingsError(f"{name} must be {limit}, got {text!r}")
    return value


def _session_logs(env: Mapping[str, str], folder: Path) -> SessionLogs:
    is_on, with_content = (
        _is_true(_text(env, name) or "true", name)
        for name in ("ENABLE_REQUEST_LOGGING", "LOG_CONTENT")
    )
    root = Path(_text(env, "LOG_ROOT") or "logs").expanduser()
    return SessionLogs(is_on, with_content, folder / root)


def _is_true(text: str, name: str = "ENV_FILE_OVERRIDES") -> bool:
    word = text.strip().lower()
    if word not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise SettingsError(f"{name} must be true or false, got {text!r}")
    return word in ("1", "true", "yes", "on")
