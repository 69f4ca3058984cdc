"""
Draws what a running server keeps for reuse, and what keeps it from reusing more.

    mlx-sidecar inspect-cache --check
"""

import argparse
import sys
from collections.abc import Iterator, Mapping

from sidecar.cli.cache_tree import draw_tree, size
from sidecar.cli.server import Json, ServerError, add_server_flags, server_of
from sidecar.infra.logs import printable
from sidecar.infra.metrics import HEALTHY_AT_ZERO

_MAX_PLACES = 10
_MAX_SESSIONS = 20


def main(argv: list[str]) -> int:
    """Exit codes: 0 good, 1 the store has problems or no answer, 2 bad usage."""
    options = _parser().parse_args(argv)
    server = server_of(options)
    try:
        report = server.get("/admin/cache" + ("?check=1" if options.check else ""))
        places = server.get("/admin/cache/drift")["places"]
    except ServerError as error:
        sys.stderr.write(f"inspect-cache: {error}\n")
        return 1
    for line in (*_totals(report), *_drift(places), *_problems(report)):
        sys.stdout.write(line + "\n")
    return 1 if report.get("problems") else 0


def _totals(report: Json) -> Iterator[str]:
    tree = report["tree"]
    checkpoints = sum(row["checkpoint_bytes"] for row in tree)
    tokens = sum(row["end"] - row["start"] for row in tree)
    yield (
        f"{report['model']}: {tokens} tokens in {len(tree)} nodes, "
        f"{size(report['bytes'])} ({size(checkpoints)} of checkpoints), "
        f"{report['lineage_records']} prompts remembered"
    )
    for line in _state(report):
        yield f"  {line}"
    yield from _sessions(report["sessions"])
    yield "\ntree (tokens, KV bytes, ...)"
    for line in draw_tree(tree):
        yield f"  {line}"
    yield "\ncounters (! should be 0)"
    for line in _counters(report["counters"]):
        yield f"  {line}"


def _state(report: Json) -> Iterator[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in report["layers"].items())
    yield f"layers: {kinds}"
    needs = "needs" if report["needs_checkpoints"] else "does not need"
    splices = "can" if report["can_splice"] else "CANNOT"
    yield f"the model {needs} checkpoints; its template {splices} splice"
    outcomes = " ".join(f"{k}={v}" for k, v in report["selftest"].items())
    yield f"selftest: {outcomes or 'not run'}"
    if report["switched_off"]:
        yield f"SWITCHED OFF: {', '.join(report['switched_off'])}"


def _sessions(sessions: list[Json]) -> Iterator[str]:
    yield f"\nsessions ({len(sessions)}, the one used last first)"
    for row in sessions[:_MAX_SESSIONS]:
        parents = " < ".join(printable(name) for name in row["parents"])
        yield (
            f"  {printable(row['session'])}  threads={row['threads']}  "
            f"messages={row['messages']}  tokens={row['tokens']}  "
            f"idle={row['idle_s']:.0f}s" + (f"  parents: {parents}" if parents else "")
        )


def _counters(counters: Mapping[str, int]) -> Iterator[str]:
    for name, count in sorted(counters.items()):
        if count:
            yield f"{'!' if name in HEALTHY_AT_ZERO else ' '} {name:<34}{count:>12}"


def _drift(places: list[Json]) -> Iterator[str]:
    yield f"\ndrift ({len(places)} places, the dearest first)"
    for place in places[:_MAX_PLACES]:
        yield (
            f"  {place['prefilled']:>9} tokens {place['times']:>5} times  "
            f"{place['role']:<10}{printable(place['agent'])}"
        )
        yield f"            before {place['before']!r}"
        yield f"            now    {place['now']!r}"


def _problems(report: Json) -> Iterator[str]:
    if "problems" not in report:
        return
    yield f"\nproblems: {len(report['problems'])}"
    for problem in report["problems"]:
        yield f"  {problem}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar inspect-cache",
        description="Draws what a running server keeps for reuse, and what keeps it "
        "from reusing more.",
    )
    add_server_flags(parser, "ADMIN_TOKEN", "MLX_API_KEY")
    parser.add_argument(
        "--check", action="store_true", help="look for broken invariants as well"
    )
    return parser
