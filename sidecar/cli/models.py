"""
Models from the terminal: what is here, what is loaded, load and let go.

    mlx-sidecar list                 models of this machine, loaded or not
    mlx-sidecar ps                   what runs now
    mlx-sidecar load|unload|pin|unpin MODEL
    mlx-sidecar logs [-f]            the last lines of the running sidecar's log
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from sidecar.cli.server import Server, ServerError, add_server_flags, server_of
from sidecar.infra.logs import printable

Json = dict[str, Any]

_POLL_S = 1.0
_GB = 1e9


def main(argv: list[str]) -> int:
    """Exit codes: 0 done, 1 refused or not running, 2 bad usage."""
    verb, *rest = argv
    parser = argparse.ArgumentParser(
        prog=f"mlx-sidecar {verb}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_flags(parser, "ADMIN_TOKEN", "MLX_API_KEY")
    parser.add_argument("--json", action="store_true", help="as the server says it")
    if verb in _CHANGES:
        parser.add_argument("model")
    if verb == "logs":
        parser.add_argument("-f", "--follow", action="store_true", help="go on")
    options = parser.parse_args(rest)
    server = server_of(options)
    try:
        if verb in _CHANGES:
            return _change(server, verb, options)
        return _SHOWN[verb](server, options)
    except ServerError as error:
        sys.stderr.write(f"mlx-sidecar {verb}: {error}\n")
        return 1
    except (KeyError, TypeError, ValueError):
        other = f"{options.url} answers, but not as a sidecar does"
        sys.stderr.write(f"mlx-sidecar {verb}: {other}\n")
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def _list(server: Server, options: argparse.Namespace) -> int:
    body = server.get("/admin/models")
    if options.json:
        return _as_json(body)
    rows = [
        (
            model["id"],
            model["kind"],
            f"{(model['actual_bytes'] or model['size_bytes']) / _GB:.1f} GB",
            "" if model["max_input_tokens"] is None else str(model["max_input_tokens"]),
            _state(model),
        )
        for model in body["models"]
    ]
    _write_table(("MODEL", "KIND", "SIZE", "CONTEXT", "STATE"), rows)
    return 0


def _state(model: Json) -> str:
    state = "pinned" if model["pinned"] and model["state"] == "loaded" else ""
    fault = f": {model['load_error']}" if model["load_error"] else ""
    return f"{state or model['state']}{fault}"


def _ps(server: Server, options: argparse.Namespace) -> int:
    body = server.get("/admin/state")
    if options.json:
        return _as_json(body)
    loaded = [m for m in body["models"] if m["state"] == "loaded"]
    memory = body["memory"]
    names = ", ".join(model["id"] for model in loaded) or "nothing"
    sys.stdout.write(
        f"{server.url}: {body['status']}; loaded: {names}; "
        f"{memory['active'] / _GB:.1f} of {memory['limit'] / _GB:.1f} GB\n"
    )
    rows = [
        (
            run["request_id"],
            run["client"] or "",
            run["state"] + (f" #{run['place']}" if run["place"] else ""),
            f"{run['done_tokens']}/{run['prompt_tokens']}",
            str(run["output_tokens"]),
            f"{run['age_s']:.1f} s",
        )
        for run in body["running"]
    ]
    if rows:
        head = ("REQUEST", "CLIENT", "STATE", "PROMPT", "OUTPUT", "AGE")
        _write_table(head, rows)
    return 0


def _logs(server: Server, options: argparse.Namespace) -> int:
    last = 0
    while True:
        lines = server.get(f"/admin/logs?after={last}")["lines"]
        for line in lines:
            last = line["n"]
            at = time.strftime("%H:%M:%S", time.localtime(line["at"]))
            said = f"{at} {line['level']} [{line['request']}] {line['text']}"
            text = f"{printable(said)}\n"
            sys.stdout.write(json.dumps(line) + "\n" if options.json else text)
        sys.stdout.flush()
        if not options.follow:
            return 0
        time.sleep(_POLL_S)


def _change(server: Server, verb: str, options: argparse.Namespace) -> int:
    model = f"/admin/models/{quote(options.model, safe='')}"
    if verb in ("pin", "unpin"):
        answer = server.post(f"{model}/settings", {"pinned": verb == "pin"})
    else:
        answer = server.post(f"{model}/{verb}", {})
    if options.json:
        return _as_json(answer)
    freed = answer.get("freed_bytes")
    said = f"; {freed / _GB:.1f} GB came back" if freed is not None else ""
    sys.stdout.write(f"{printable(options.model)}: {_CHANGES[verb]}{said}\n")
    return 0


_CHANGES = {
    "load": "loaded",
    "unload": "unloaded",
    "pin": "stays loaded",
    "unpin": "may leave",
}
_SHOWN: dict[str, Callable[[Server, argparse.Namespace], int]] = {
    "list": _list,
    "ps": _ps,
    "logs": _logs,
}


def _as_json(body: Any) -> int:
    sys.stdout.write(f"{json.dumps(body)}\n")
    return 0


def _write_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        sys.stdout.write(f"{printable('  '.join(cells).rstrip())}\n")
