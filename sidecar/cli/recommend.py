"""
Which models this machine can serve to an agent: those that are here, and the hub's.

    mlx-sidecar recommend [--author mlx-community] [--offline] [--json]

A model fits where its weights and the KV of 64,000 tokens of context, and a quarter
more, are within MAX_PROCESS_MEMORY. The hub says which models it has and how large they
are; what KV takes follows from a model's own config.json. Nothing is downloaded but
that.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.cli.server import settings_file
from sidecar.config.settings import Config, load_config
from sidecar.config.sources import ConfigError
from sidecar.core.format_bytes import format_bytes
from sidecar.infra.logs import printable

if TYPE_CHECKING:  # mlx-lm, which they import, takes a second
    from sidecar.engine.kv_estimate import KVEstimate

_CONTEXT = 64_000  # tokens
_RESERVE = 1.25
_NUM_LISTED = 60  # of the hub's, the most downloaded first
_NUM_AT_ONCE = 8
_NUM_SHOWN = 12
_FIRST_PROMPT = (
    "An agent's first prompt has 10,000 to 35,000 tokens: at 300 tokens/s of prefill\n"
    "35,000 take two minutes, once. `mlx-sidecar bench` measures a model that runs."
)


@dataclass(frozen=True, slots=True)
class Fit:
    """
    A model, and what of it this machine can hold.

    Args:
        weight_bytes: of its files. kv_per_token: bytes; None: it cannot be told.
        context: tokens that fit beside its weights, at most those it was made for.
        is_here: whether it is on this machine.
    """

    model: str
    weight_bytes: int
    kv_per_token: int | None
    context: int | None
    is_here: bool

    @property
    def is_enough(self) -> bool:
        """Whether an agent's context fits."""
        return self.context is not None and self.context >= _CONTEXT


def main(argv: list[str]) -> int:
    """Exit codes: 0 some model fits, 1 none does or is known, 2 bad usage."""
    options = _parser().parse_args(argv)
    from sidecar.engine.device_memory import process_limit
    from sidecar.engine.loading.hub_faults import HubFault

    try:
        config = load_config({}, settings_file())
    except ConfigError as error:
        sys.stderr.write(f"mlx-sidecar recommend: {error}\n")
        return 1
    limit = process_limit(config.engine)
    found, fault = list(_here(config, limit)), ""
    if not options.offline:
        try:
            here = {fit.model for fit in found}
            found += (f for f in _at_hub(options.author, limit) if f.model not in here)
        except HubFault as error:
            fault = str(error)
    if fault:
        sys.stderr.write(f"mlx-sidecar recommend: {fault}\n")
    found.sort(key=lambda fit: fit.weight_bytes, reverse=True)
    fits = [fit for fit in found if fit.is_enough]
    if options.json:
        sys.stdout.write(f"{json.dumps([asdict(fit) for fit in fits])}\n")
    else:
        small = [fit for fit in found if fit.is_here and not fit.is_enough]
        was_asked = not (fault or options.offline)
        _show(fits, small, limit, was_asked=was_asked)
    return 0 if fits else 1


def _here(config: Config, limit: int) -> Iterator[Fit]:
    """The models of this machine that write text."""
    from sidecar.engine.kv_estimate import estimate_kv
    from sidecar.residents.detection import TEXT_KINDS
    from sidecar.residents.discovery import HUB, discover

    places = config.model.places
    for model in discover((HUB,) if places is None else places):
        if model.kind in TEXT_KINDS and model.state == "unloaded":
            kv = estimate_kv(model.folder)
            yield _fit(model.id, model.size_bytes, kv, model.context_len, limit, True)


def _at_hub(author: str, limit: int) -> Iterator[Fit]:
    """
    The models of an organisation that are not too large.

    Raises:
        HubFault: the hub cannot be reached.
    """
    from sidecar.engine.kv_estimate import estimate_kv
    from sidecar.engine.loading.checkpoint_files import (
        WEIGHTS,
        context_len,
        read_config,
    )
    from sidecar.engine.loading.hub_faults import HubFault
    from sidecar.engine.loading.hub_listing import (
        HubModel,
        described,
        most_downloaded,
    )
    from sidecar.residents.detection import TEXT_KINDS, kind_of

    ids = most_downloaded(author, _NUM_LISTED)
    most = int(limit / _RESERVE)

    def describe(repo_id: str) -> HubModel | None:
        with contextlib.suppress(HubFault):  # the others are told
            return described(repo_id, WEIGHTS, most)
        return None

    with ThreadPoolExecutor(_NUM_AT_ONCE) as threads:
        for found in filter(None, threads.map(describe, ids)):
            config = read_config(found.folder) or {}
            # Its name tells as well what it is: of a folder of that name.
            if kind_of(Path(found.repo_id), config) not in TEXT_KINDS:
                continue
            kv, length = estimate_kv(found.folder), context_len(config)
            yield _fit(found.repo_id, found.weight_bytes, kv, length, limit, False)


def _fit(
    model: str,
    weight_bytes: int,
    kv: "KVEstimate | None",
    made_for: int | None,
    limit: int,
    is_here: bool,
) -> Fit:
    if kv is None:
        return Fit(model, weight_bytes, None, None, is_here)
    context = kv.context(int(limit / _RESERVE) - weight_bytes)
    context = context if made_for is None else min(context, made_for)
    return Fit(model, weight_bytes, kv.per_token, context, is_here)


def _show(
    fits: Sequence[Fit], others: Sequence[Fit], limit: int, *, was_asked: bool
) -> None:
    lines = [f"{format_bytes(limit)} may be used (MAX_PROCESS_MEMORY)."]
    if not fits:
        known = "is known that" if was_asked else "of this machine"
        lines.append(f"No model {known} fits with {_CONTEXT:,} tokens.")
    shown = [fit for n, fit in enumerate(fits) if n < _NUM_SHOWN or fit.is_here]
    lines += [_line(fit, "  here" if fit.is_here else "") for fit in shown]
    lines += [_line(fit, "  here, too little for an agent") for fit in others]
    if fits:
        lines += [_FIRST_PROMPT, "Take one: python3 install_and_run.py --model ID"]
    sys.stdout.write("\n".join(lines) + "\n")


def _line(fit: Fit, note: str) -> str:
    tokens = "? tokens" if fit.context is None else f"{fit.context:,} tokens"
    size = format_bytes(fit.weight_bytes)
    return f"{size:>9}  {tokens:>16}  {printable(fit.model)}{note}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar recommend",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--author",
        default="mlx-community",
        help="whose models of the hub are looked at (%(default)s)",
    )
    parser.add_argument(
        "--offline", action="store_true", help="this machine's models alone"
    )
    parser.add_argument("--json", action="store_true", help="one JSON array")
    return parser
