"""Command line of the sidecar: flags -> Config -> serve, drain on a signal."""

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from sidecar import app as composition
from sidecar.config import Config, load_config, unknown_names
from sidecar.infra.logs import setup_logging
from sidecar.infra.malloc import keep_freed_pages
from sidecar.server.gate import needs_key
from sidecar.setting_sources import ConfigError
from sidecar.tools.commands import TOOLS, run_tool, tools_help

logger = logging.getLogger("sidecar")

_FLAGS = (  # group, flag, variable, help
    ("model", "--model", "MODEL_PATH", "hub id or folder (the built-in model)"),
    ("model", "--model-family", "MODEL_FAMILY", "qwen3, glm4, generic (from name)"),
    ("server", "--host", "MLX_HOST", "address to bind (127.0.0.1)"),
    ("server", "--port", "MLX_PORT", "port, 0 for any (8080)"),
    ("engine", "--max-kv-size", "MAX_KV_SIZE", "most tokens of context (196608)"),
    (
        "engine",
        "--max-concurrent-requests",
        "MAX_CONCURRENT_REQUESTS",
        "generations at once (8)",
    ),
    ("cache", "--cache-bytes", "PROMPT_CACHE_MAX_BYTES", "KV kept, e.g. 8GB (25%%)"),
    ("log", "--log-level", "LOG_LEVEL", "DEBUG INFO WARNING ERROR (INFO)"),
)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 bad usage."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in TOOLS:
        return run_tool(argv[0], argv[1:])
    return _serve(argv)


def _serve(argv: list[str]) -> int:
    arguments = vars(_parser().parse_args(argv))
    env_file = Path(arguments.pop("env_file"))
    flags = {name: value for name, value in arguments.items() if value is not None}
    try:
        config = load_config(flags, env_file)
    except ConfigError as error:
        return _refuse(str(error))
    setup_logging(config.log.level)
    keep_freed_pages()
    for name in unknown_names(env_file):
        logger.warning("unknown setting name=%s file=%s", name, env_file)
    if needs_key(config.server.host) and not config.server.api_key:
        return _refuse(
            f"binding {config.server.host} lets others in: set MLX_API_KEY, "
            "or bind 127.0.0.1"
        )
    return _run(config)


def _run(config: Config) -> int:
    try:
        app = composition.build(config)
    except OSError as error:
        address = f"{config.server.host}:{config.server.port}"
        sys.stderr.write(f"mlx-sidecar: cannot listen on {address}: {error}\n")
        return 1
    sys.stderr.write(
        f"mlx-sidecar: {app.url} model={config.model.path or 'built-in'}\n"
    )
    serving = composition.serve_in_thread(app)
    stop = threading.Event()

    def on_signal(_number: int, _frame: Any) -> None:
        if stop.is_set():
            os._exit(1)  # a second signal: at once
        stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    while serving.is_alive() and not stop.wait(0.5):
        pass
    app.drain()
    app.stop_listening()
    app.close()
    return 0


def _refuse(message: str) -> int:
    sys.stderr.write(f"mlx-sidecar: {message}\n")
    return 2


def _help_format(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=40)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar",
        usage="mlx-sidecar [FLAG ...]\n       mlx-sidecar TOOL ...",
        description="Serves a local MLX model over the OpenAI protocol. Every setting\n"
        "is also an environment variable (named in capitals) and may stand in .env.",
        epilog=tools_help(),
        formatter_class=_help_format,
    )
    groups: dict[str, Any] = {}
    for group, flag, variable, text in _FLAGS:
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(
            flag, dest=variable, metavar=variable, default=None, help=text
        )
    groups["server"].add_argument(
        "--env-file", dest="env_file", default=".env", help="settings file (.env)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
