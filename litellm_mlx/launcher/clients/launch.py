"""
`litellm-mlx launch CLIENT [--print] [-- ARGS]`: a client on the local model.

The client takes this process's place: its terminal, its signals, its exit code. No file
of the user's is written, unless he asks for that: `--write` puts into the client's own
settings where the model is, for editors that start it themselves, and `--undo` takes it
out again.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import httpx

from litellm_mlx.launcher.clients.client_setup import (
    CLIENTS,
    MODEL,
    NAME,
    ClientSetup,
    Endpoint,
)
from litellm_mlx.launcher.clients.json_file import without_secrets
from litellm_mlx.launcher.clients.user import User
from litellm_mlx.launcher.clients.user_files import Unreadable, write_own
from litellm_mlx.launcher.clients.user_settings import SETTINGS
from litellm_mlx.launcher.clients.written_settings import (
    Journal,
    NotTouched,
    planned,
    undo,
    write,
)
from litellm_mlx.launcher.running import found_settings
from litellm_mlx.launcher.settings import LaunchSettings

_ANY_KEY = "any"
_NOT_THE_KEY = 401
_OURS_OF_OPENCODE = ("model", "small_model", "provider")
_OUTPUT_SHARE, _MAX_OUTPUT = 4, 32768
_INSTALL = {
    "claude": "npm install -g @anthropic-ai/claude-code",
    "openclaw": "npm install -g openclaw",
    "pi": "npm install -g @earendil-works/pi-coding-agent",
    "codex": "npm install -g @openai/codex",
    "opencode": "npm install -g opencode-ai",
    "qwen": "npm install -g @qwen-code/qwen-code",
}


class NotRunning(Exception):
    """The servers do not answer; the message says which."""


def main(argv: Sequence[str]) -> int:
    """Exit codes: 1 it cannot be started, 2 bad usage; else the client's own."""
    options, rest = _parsed(argv)
    try:
        settings = found_settings()
        if options.undo:
            sys.stdout.write(f"{undo(options.client, _journal(settings))}\n")
            return 0
        if options.write:
            return _write(options.client, settings, is_sure=options.yes)
        user = _user(settings, rest)
        setup = CLIENTS[options.client](find_endpoint(settings), user)
        environ = _environ(setup)
        command = [setup.program, *setup.arguments, *setup.given]
        if options.print:
            sys.stdout.write(described(setup) + _files_of(setup))
            return 0
        if shutil.which(setup.program) is None:
            install = _INSTALL[options.client]
            return _fail(f"{setup.program} is not on PATH. Fix: {install}")
        write_own(setup.files, setup.links)
    except (NotRunning, Unreadable, NotTouched, OSError) as error:
        return _fail(str(error))
    sys.stderr.write(described(setup))
    return _become(command, environ)


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    given = list(argv)
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="litellm-mlx launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("client", choices=CLIENTS)
    does = parser.add_mutually_exclusive_group()
    does.add_argument(
        "--print", action="store_true", help="say what would be set, and start nothing"
    )
    does.add_argument(
        "--write", action="store_true", help="put it into the client's own settings"
    )
    does.add_argument(
        "--undo", action="store_true", help="take out again what --write put in"
    )
    parser.add_argument("--yes", action="store_true", help="--write without asking")
    options = parser.parse_args(given[:cut])
    if options.yes and not options.write:
        parser.error("--yes goes with --write")
    if given[cut + 1 :] and (options.write or options.undo):
        parser.error("--write and --undo start nothing that could take arguments")
    return options, given[cut + 1 :]


def _user(settings: LaunchSettings, arguments: Sequence[str] = ()) -> User:
    own = settings.run_dir.parent / "launch"
    environ = dict(os.environ)  # noqa: TID251 - the client's
    return User(Path.home(), own, environ, arguments)


def _journal(settings: LaunchSettings) -> Journal:
    return Journal(_user(settings).own / "written")


def _write(client: str, settings: LaunchSettings, *, is_sure: bool) -> int:
    """Show what would change, ask, and write it; 1: nothing was written."""
    server = find_endpoint(settings)
    own = SETTINGS[client](server, _user(settings))
    journal = _journal(settings)
    if own.keys is None:
        sys.stdout.write(own.text)
        return _fail(f"{own.path}: {own.why}: put the above in")
    try:
        change = planned(own.path, own.keys)
    except Unreadable:
        sys.stdout.write(own.text)
        raise
    if change.after == change.before:
        sys.stdout.write(f"{change.path} says so already\n")
        return 0
    journal.check_free(client)
    _show(change.difference())
    if not (is_sure or _agrees(change.path)):
        how = "" if sys.stdin.isatty() else "; without a terminal it takes --yes"
        return _fail(f"nothing was written{how}")
    copy = write(client, change, journal)
    kept = f"; what it was: {copy}" if copy else ""
    sys.stdout.write(f"Written{kept}. Back: litellm-mlx launch --undo {client}\n")
    return 0


def _agrees(path: Path) -> bool:
    if not sys.stdin.isatty():
        return False
    sys.stdout.write(f"Write {path}? [y/N] ")
    sys.stdout.flush()
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        return False


def _show(text: str) -> None:
    """Write what a terminal may have no characters for."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def find_endpoint(settings: LaunchSettings, timeout_s: float = 10.0) -> Endpoint:
    """
    What the running servers say of themselves.

    Args:
        timeout_s: for each of two answers.
    Raises:
        NotRunning: one of them does not answer, or not to this key.
    """
    assert settings.proxy is not None
    with httpx.Client(trust_env=False, timeout=timeout_s) as client:
        try:
            client.get(f"{settings.proxy.url}/health/liveliness").raise_for_status()
        except httpx.HTTPError:
            raise NotRunning(_start(f"LiteLLM at {settings.proxy.url}")) from None
        headers = {}
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        url = f"{settings.sidecar.url}/v1/models"
        try:
            answer = client.get(url, headers=headers)
            if answer.status_code == _NOT_THE_KEY:
                raise NotRunning(_wrong_key(url, has_key=bool(settings.api_key)))
            answer.raise_for_status()
            rows = answer.json()["data"]
            (model,) = [row for row in rows if MODEL in (row["id"], *row["aliases"])]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            where = f"the sidecar at {settings.sidecar.url}"
            raise NotRunning(_start(where)) from None
    context = int(model.get("max_input_tokens") or 0) or 32768
    return Endpoint(
        settings.proxy.url,
        settings.master_key or _ANY_KEY,
        context,
        min(context // _OUTPUT_SHARE, _MAX_OUTPUT),
        takes_images=bool(model.get("supports_vision")),
        reasons=model.get("supports_reasoning") is not False,
    )


def _wrong_key(url: str, *, has_key: bool) -> str:
    given = "MLX_API_KEY is not its key" if has_key else "MLX_API_KEY is not set"
    return f"{url} wants a key, and {given}. Fix: that setting, in .env"


def _start(what: str) -> str:
    return f"{what} does not answer. Fix: python3 install_and_run.py, in a terminal"


def _environ(setup: ClientSetup) -> dict[str, str]:
    """The client's environment."""
    environ = {**os.environ, **setup.environ}  # noqa: TID251 - the client's
    # A proxy of the environment must not see what is said on this machine.
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [*filter(None, [environ.get(name)]), "127.0.0.1,localhost"]
        environ[name] = ",".join(hosts)
    return environ


def described(setup: ClientSetup) -> str:
    """What is set, as it could be typed: keys masked, and nothing of the user's own."""
    lines = [
        f"{name}={shlex.quote(_masked(name, value))}"
        for name, value in setup.environ.items()
    ]
    lines += [f"# written for you alone at a launch: {path}" for path in setup.files]
    command = shlex.join([setup.program, *setup.arguments])
    return "\n".join([*lines, f"{command} ..." if setup.given else command, ""])


def _files_of(setup: ClientSetup) -> str:
    """What a launch would write: `--print` has written nothing."""
    shown = ""
    for path, text in setup.files.items():
        body = "".join(f"#   {line}\n" for line in without_secrets(text).splitlines())
        shown += f"# {path}:\n{body}"
    return shown


def _masked(name: str, value: str) -> str:
    if name.endswith(("_KEY", "_TOKEN")) and value not in ("", _ANY_KEY):
        return "***"
    if name == "OPENCODE_CONFIG_CONTENT":  # the user's own may be among it
        config = json.loads(value)
        config["provider"] = {NAME: config["provider"][NAME]}
        ours = {key: config[key] for key in _OURS_OF_OPENCODE if key in config}
        return without_secrets(json.dumps(ours))
    return value


def _become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    program = shutil.which(command[0])
    assert program is not None
    os.execve(program, list(command), dict(environ))


def _fail(text: str) -> int:
    sys.stderr.write(f"litellm-mlx launch: {text}\n")
    return 1
