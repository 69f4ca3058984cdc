"""
Asks a model of a running server what it can do: calls of tools, thinking.

    mlx-sidecar capabilities local

What is found is kept by the server, used at the model's next load, and shown in
GET /v1/models.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from sidecar.cli.server import ServerError, add_server_flags, server_of
from sidecar.infra.logs import printable


def main(argv: list[str]) -> int:
    """Exit codes: 0 good, 1 a step failed or no answer, 2 bad usage."""
    options = _parser().parse_args(argv)
    server = server_of(options)
    path = f"/admin/models/{quote(options.model, safe='/')}/capabilities"
    is_good = True
    try:
        for step in server.steps(path):
            is_good &= step.get("status") != "failed"
            sys.stdout.write("".join(f"{line}\n" for line in _lines(step)))
            sys.stdout.flush()
    except ServerError as error:
        sys.stderr.write(f"capabilities: {error}\n")
        return 1
    return 0 if is_good else 1


def _lines(step: Mapping[str, Any]) -> list[str]:
    """A step as people read it; the record line by line."""
    name, status = step["step"], step["status"]
    if status == "running":
        return [f"{name} ..."]
    if name == "store" and status == "completed":
        return [f"  {key:<24} {_said(value)}" for key, value in step["value"].items()]
    said = step.get("error") or step.get("value")
    hints = [
        f"  {one['level']}: {printable(one['message'])}"
        for one in step.get("diagnostics") or ()
    ]
    return [f"{name}: {status}" + (f" ({_said(said)})" if said is not None else ""),
            *hints]  # fmt: skip


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in (None, "") else printable(str(value))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar capabilities",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="any name of it (`local`: the default one)")
    add_server_flags(parser, "ADMIN_TOKEN", "MLX_API_KEY")
    return parser
