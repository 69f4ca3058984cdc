"""Draws the tree of GET /admin/cache as text."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from sidecar.cli.server import Json
from sidecar.infra.logs import printable

_SIZES = ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "kB"))
_MAX_INDENT = 20


def draw_tree(rows: Sequence[Json]) -> Iterator[str]:
    """
    One line for each stretch of the tree without a branch, children indented.

    A conversation that only grows is a chain of many nodes; as a line each they would
    say little.
    """
    known = {row["node"] for row in rows}
    children: dict[int | None, list[Json]] = defaultdict(list)
    for row in rows:
        children[row["parent"] if row["parent"] in known else None].append(row)
    todo = [(row, 0) for row in reversed(children[None])]
    while todo:
        row, depth = todo.pop()
        stretch = [row]
        while len(below := children[stretch[-1]["node"]]) == 1 and _alike(row, *below):
            stretch += below
        yield "  " * min(depth, _MAX_INDENT) + _line(stretch)
        todo += [(child, depth + 1) for child in reversed(below)]


def size(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, name in _SIZES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def _alike(one: Json, other: Json) -> bool:
    return all(one[key] == other[key] for key in ("lent", "subagent", "session"))


def _line(stretch: Sequence[Json]) -> str:
    marks = [row["checkpoint_bytes"] for row in stretch if row["checkpoint_bytes"]]
    hits = sorted({row["hits"] for row in stretch})
    first = stretch[0]
    parts = [
        f"{first['start']}-{stretch[-1]['end']}",
        size(sum(row["kv_bytes"] for row in stretch)),
        f"checkpoints={len(marks)} ({size(sum(marks))})" if marks else "",
        f"hits={hits[0]}" + (f"..{hits[-1]}" if len(hits) > 1 else ""),
        f"idle={min(row['idle_s'] for row in stretch):.0f}s",
        "lent" if first["lent"] else "",
        f"leases={max(row['leases'] for row in stretch)}"
        if any(row["leases"] for row in stretch)
        else "",
        "subagent" if first["subagent"] else "",
        f"session={printable(first['session'])}" if first["session"] else "",
        f"({len(stretch)} nodes)" if len(stretch) > 1 else "",
    ]
    return "  ".join(part for part in parts if part)
