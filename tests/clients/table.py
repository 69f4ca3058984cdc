"""
Writes the table of `docs/clients.md` from the rows that `run` left.

    python -m tests.clients.table results.jsonl [more.jsonl ...]

The latest row of a client, wire format and kind of model counts. Whole and streamed
answers share a line: the lower reuse of the two.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_KINDS = ("dense", "hybrid", "sliding")
_WIRES = {
    "compatible": "chat (openai-compatible)",
    "previous_id": "responses, `previous_response_id`",
    "responses-stored": "responses, stored",
}

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    latest: dict[tuple[str, str], Row] = {}
    for path in sys.argv[1:] if argv is None else argv:
        for line in Path(path).read_text().splitlines():
            row = json.loads(line)
            latest[row["name"], row["kind"]] = row
    lines: dict[str, list[Row]] = {}
    for row in latest.values():
        key = re.sub(r"-(whole|stream)$", "", row["name"])
        lines.setdefault(key, []).append(row)
    kinds = [k for k in _KINDS if any(k == kind for _, kind in latest)]
    heads = ["client", "version", "wire format", "requests", "passed", *kinds]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for rows in sorted(lines.values(), key=lambda rows: str(rows[0]["client"]).lower()):
        print("| " + " | ".join([*_about(rows), *_reuse(rows, kinds)]) + " |")


def _about(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    wire, _, how = first["wire"].partition(", ")
    ways = dict.fromkeys(row["wire"].partition(", ")[2] for row in rows)
    wire = _WIRES.get(wire, wire)
    name = f"{wire} ({' and '.join(ways)})" if how else wire
    counts = sorted({row["requests"] for row in rows})
    num = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    failed = [row["wire"] for row in rows if row["wrong"]]
    passed = "yes" if not failed else "no" if len(failed) == len(rows) else "partly"
    return [first["client"], first["version"], name, num, passed]


def _reuse(rows: Sequence[Row], kinds: Sequence[str]) -> list[str]:
    cells = []
    for kind in kinds:
        found = [row for row in rows if row["kind"] == kind and row["reuse"]]
        cells.append(_cell(min(found, key=lambda row: row["reuse"], default=None)))
    return cells


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    text = f"{row['reuse']:.1%}"
    if row.get("appended") and row["appended"] - row["reuse"] > 0.0005:
        text += f" ({row['appended']:.1%})"
    return text.replace("%", " %")


if __name__ == "__main__":
    main()
