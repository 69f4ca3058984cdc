"""Command line of the sidecar: flags -> Config -> serve, drain on a signal."""

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sidecar.cli.commands import TOOLS, run_tool, tools_help
from sidecar.config.names import unknown_names, unread_lines
from sidecar.config.setting_sources import SettingSources
from sidecar.config.settings import SECTIONS, Config
from sidecar.config.sources import ConfigError
from sidecar.engine.loading.checkpoint_files import memory_limit
from sidecar.engine.loading.model_place import early_fault
from sidecar.infra.cuda_graphs import keep_cuda_graphs
from sidecar.infra.file_limit import kept_file_limit, raise_file_limit
from sidecar.infra.lasting_imports import lasting_imports
from sidecar.infra.logs import setup_logging
from sidecar.infra.malloc import keep_freed_pages
from sidecar.infra.transformers_scan import scan_once
from sidecar.residents.model_settings import with_default_model
from sidecar.server.access import needs_key

if TYPE_CHECKING:
    from sidecar.app import App

logger = logging.getLogger("sidecar")

_POLL_S = 0.1
_LOAD_END_S = 1.0  # of a load that nobody is served by any more
_END_S = 180.0  # of the end when no answer runs any more; KV is written meanwhile
_PRINTING_S = 5.0  # where the threads stand; nobody may read it
_MAX_CHARS = 1000

_FLAGS = (  # group, flag, variable
    ("model", "--model", "MODEL_PATH"),
    ("model", "--model-family", "MODEL_FAMILY"),
    ("model", "--model-dir", "MODEL_DIR"),
    ("server", "--host", "MLX_HOST"),
    ("server", "--port", "MLX_PORT"),
    ("engine", "--max-kv-size", "MAX_KV_SIZE"),
    ("engine", "--max-concurrent-requests", "MAX_CONCURRENT_REQUESTS"),
    ("engine", "--max-model-memory", "MAX_MODEL_MEMORY"),
    ("engine", "--max-process-memory", "MAX_PROCESS_MEMORY"),
    ("cache", "--cache-bytes", "PROMPT_CACHE_MAX_BYTES"),
    ("log", "--log-level", "LOG_LEVEL"),
)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 failed, 2 bad usage, 130 stopped before it was ready."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in TOOLS:
        with kept_file_limit():
            return run_tool(argv[0], argv[1:])
    return _serve(argv)


def _serve(argv: list[str]) -> int:
    arguments = vars(_parser().parse_args(argv))
    env_file = Path(arguments.pop("env_file"))
    flags = {name: value for name, value in arguments.items() if value is not None}
    try:
        sources = SettingSources(flags, env_file, os.environ)  # noqa: TID251 - kept
        config = with_default_model(sources.config())
    except ConfigError as error:
        return _refuse(str(error))
    setup_logging(config.log.level, os.environ)  # noqa: TID251 - FORCE_COLOR and such
    keep_freed_pages()
    keep_cuda_graphs(os.environ)  # noqa: TID251 - MLX reads them there
    raise_file_limit()
    for line in unread_lines(env_file):
        text = "line %d of %s is not read: it is no NAME=value, or its quote is open"
        logger.warning(text, line, env_file)
    for unknown in unknown_names(env_file, os.environ):  # noqa: TID251 - names only
        logger.warning("%s", unknown)
    if needs_key(config.server.host) and not config.server.api_key:
        return _refuse(
            f"binding {config.server.host} lets others in: set MLX_API_KEY, "
            "or bind 127.0.0.1"
        )
    return _run(config, sources)


def _run(config: Config, sources: SettingSources) -> int:
    # What the device holds, only MLX knows; the loader asks it.
    engine = config.engine
    limit = memory_limit(engine.max_process_bytes, engine.max_model_bytes)
    fault = early_fault(config.model.path, limit)
    if fault:
        return _refuse(_with_place(fault, config.model.path), 1)
    # Not before: MLX and mlx-lm take seconds to import.
    with kept_file_limit(), lasting_imports():
        scan_once(os.environ)  # noqa: TID251 - transformers reads it there
        from sidecar import app as composition

    try:
        app = composition.build(config, tell=_tell, sources=sources)
    except ConfigError as error:
        return _refuse(str(error), 1)
    except OSError as error:
        address = f"{config.server.host}:{config.server.port}"
        return _refuse(f"cannot listen on {address}: {error}", 1)
    if fault := app.pool.default_fault():
        return _end_now(_refuse(_with_place(fault, config.model.path), 1))
    return _answer(app, config)


def _answer(app: "App", config: Config) -> int:
    """Serve until a signal; the exit code."""
    from sidecar import app as composition
    from sidecar.residents.detection import TEXT_KINDS

    stop = _stop_on_signal()
    _reload_on_hangup(app)
    _tell(f"{app.url} model={config.model.path or 'built-in'}")
    if (kind := app.pool.entry("").kind) not in TEXT_KINDS:
        _tell(f"warning: MODEL_PATH names a model of kind {kind}, which takes no chats")
    serving = composition.serve_in_thread(app)
    while serving.is_alive() and not (default := app.pool.entry("")).num_loads:
        if (fault := default.load_error) is not None:
            explained = _with_place(fault, config.model.path)
            if not app.serves_others:
                return _end_now(_refuse(explained, 1))
            _tell(f"warning: {explained}")
            break
        if stop.wait(_POLL_S) and not app.pool.entry("").num_loads:
            _tell("stopped before the model was ready; what was downloaded is kept")
            return _end_now(130)
    while serving.is_alive() and not stop.wait(0.5):
        pass
    app.drain()
    _end_within(_END_S)
    app.stop_listening()
    if not app.close(load_wait_s=_LOAD_END_S):
        _end_now(0)
    return 0


def _stop_on_signal() -> threading.Event:
    stop = threading.Event()

    def on_signal(_number: int, _frame: Any) -> None:
        if stop.is_set():
            os._exit(1)  # a second signal: at once
        stop.set()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    return stop


def _reload_on_hangup(app: "App") -> None:
    """SIGHUP reads the settings again; what it finds is logged."""
    from sidecar.core.errors import SidecarError

    def reload() -> None:
        try:
            changed = app.core.services.settings.reload()
        except SidecarError as error:
            logger.warning("settings are as they were: %s", error.message)
            return
        logger.info("settings were read again, changed=%d", len(changed))

    def on_hangup(_number: int, _frame: Any) -> None:
        # Not here: the main thread may hold a lock that the reading needs.
        threading.Thread(target=reload, name="reload", daemon=True).start()

    signal.signal(signal.SIGHUP, on_hangup)


def _end_within(seconds: float) -> None:
    """
    Exit with 1 then, whatever hangs, and print where each thread stands.

    No thread of Python's: what hangs may hold the interpreter. Where stderr takes
    nothing, the system ends the process by SIGALRM.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + _PRINTING_S)
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        faulthandler.dump_traceback_later(seconds, exit=True)


def _end_now(code: int) -> NoReturn:
    """End now: nobody is served, and MLX or a line that hangs is not waited for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _with_place(fault: str, path: str | None) -> str:
    """Errors on the wire hold no path; here it is what the person wrote."""
    if not path or path in fault or "the model that drafts for" in fault:
        return fault
    return f"{fault} (MODEL_PATH={path})"


def _tell(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"mlx-sidecar: {line}\n")


def _refuse(message: str, code: int = 2) -> int:
    # A model's folder may have a part in it, and must not drive the terminal.
    shown = "".join(c if c.isprintable() else "?" for c in message[:_MAX_CHARS])
    # The launcher knows the reason for the end by the word behind the name.
    _tell(f"error: {shown}")
    return code


def _help_format(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=36)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar",
        usage="mlx-sidecar [FLAG ...]\n       mlx-sidecar TOOL ...",
        description="Serves a local MLX model to OpenAI and Anthropic clients.\n"
        "Settings are environment variables (in capitals) and may stand in .env.",
        epilog=tools_help(),
        formatter_class=_help_format,
    )
    items = {item.metadata["env"]: item for s in SECTIONS for item in fields(s)}
    groups: dict[str, Any] = {}
    for group, flag, variable in _FLAGS:
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        help = _flag_help(items[variable])
        groups[group].add_argument(
            flag, dest=variable, metavar=variable, default=None, help=help
        )
    groups["server"].add_argument(
        "--env-file", dest="env_file", default=".env", help="settings file (.env)"
    )
    return parser


def _flag_help(item: Any) -> str:
    default = item.metadata["shown"] or item.default
    return f"{item.metadata['help'].rstrip('.')} ({default})".replace("%", "%%")


if __name__ == "__main__":
    sys.exit(main())
