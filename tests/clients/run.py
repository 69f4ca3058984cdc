"""
Runs real clients against the scripted server, through the proxy, and prints a table.

    python -m tests.clients.run [NAME...] [--tree DIR] [--kinds dense,hybrid,sliding]

A NAME is a case's or the beginning of one (`pi`, `vercel-responses`); none is all.
"""

import argparse
import json
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import httpx

from tests.clients import agents, groups, probes, sdks
from tests.clients.case import Case, Place, end_left_over
from tests.clients.figures import Record, figures, losses
from tests.clients.stack import REPO, Stack, running_stack

ADMIN_TOKEN = "clients"
CASES = [*sdks.CASES, *agents.CASES, *groups.CASES, *probes.CASES]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a client failed."""
    options = _parser().parse_args(argv)
    cases = [c for c in CASES if _is_chosen(c, options.names)]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    rows = []
    for kind in options.kinds.split(","):
        run = options.runs / time.strftime(f"%m%d-%H%M%S-{kind}")
        with running_stack(
            options.tree.resolve(), kind, run, {"ADMIN_TOKEN": ADMIN_TOKEN}
        ) as stack:
            record = Record(run / "requests.jsonl")
            for case in cases:
                row = _run_case(case, stack, record, options, kind)
                rows.append(row)
                print(_line(row), flush=True)
                with (options.runs / "results.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{kind}: verified hits: {_counters(stack)}; logs in {run}")
    return int(any(row["wrong"] for row in rows))


def _is_chosen(case: Case, names: Sequence[str]) -> bool:
    return not names or any(case.name.startswith(name) for name in names)


def _run_case(
    case: Case, stack: Stack, record: Record, options: argparse.Namespace, kind: str
) -> dict[str, object]:
    place = Place(stack.url, stack.run / case.name, options.clients)
    place.prepare()
    stack.work_in(place.project)
    _clear(stack)
    record.forget()
    started = time.monotonic()
    try:
        wrong = case.run(place)
    except Exception:  # noqa: BLE001 - the next client shall run
        wrong = [traceback.format_exc()[-600:]]
    end_left_over(place.folder)
    time.sleep(0.5)
    served = record.read()
    found = figures(served)
    (place.folder / "requests.txt").write_text("\n".join(losses(served)) + "\n")
    try:
        version = case.version(options.clients)
    except OSError:
        version = "not installed"
    return {
        "tree": options.tree.name, "name": case.name,
        "client": case.client, "version": version,
        "wire": case.wire, "kind": kind, "wrong": wrong, "appends": case.appends,
        "seconds": round(time.monotonic() - started, 1), **asdict(found),
    }  # fmt: skip


def _line(row: dict[str, object]) -> str:
    def share(value: object) -> str:
        return f"{value:.2%}" if isinstance(value, float) else "-"

    wrong = row["wrong"]
    assert isinstance(wrong, list)
    told = "  ".join(text.replace("\n", " ")[-300:] for text in wrong)
    return (
        f"{'FAIL' if wrong else 'ok':4} {row['kind']:7} {row['name']:32} "
        f"{row['version']:24} req={row['requests']:<3} prompt={row['prompt']:<7} "
        f"prefilled={row['prefilled']:<6} reuse={share(row['reuse']):7} "
        f"appended={share(row['appended']):7} "
        f"of={share(row['possible']):7} spliced={row['spliced']} "
        f"{row['seconds']}s {told}"
    )


def _clear(stack: Stack) -> None:
    """A client must not live on what another one left."""
    url = f"{stack.sidecar_url}/admin/cache/clear"
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    httpx.post(url, headers=headers, trust_env=False, timeout=60).raise_for_status()


def _counters(stack: Stack) -> dict[str, float]:
    """What must be zero, or tells of trouble."""
    text = httpx.get(f"{stack.sidecar_url}/metrics", trust_env=False, timeout=30).text
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        is_trouble = any(w in name for w in ("invariant", "refused", "unavailable"))
        if is_trouble and not name.startswith("#"):
            found[name] = float(value)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", help="cases, or their beginnings")
    add("--tree", type=Path, default=REPO, help="the checkout that is run")
    add("--kinds", default="dense,hybrid", help="tiny models")
    add("--list", action="store_true", help="only name the cases")
    home = Path.home() / ".cache"
    clients = Path(os.environ.get("CLIENTS", home / "agent-clients"))
    runs = Path(os.environ.get("CLIENTS_RUNS", home / "agent-client-runs"))
    add("--clients", type=Path, default=clients, help="where they are installed")
    add("--runs", type=Path, default=runs, help="for homes, projects and logs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
