"""What the sidecar's own record says of a client: requests, tokens and reuse."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Served:
    """
    One request.

    Args:
        oracle: prompt tokens that exact reuse could have saved: the longest beginning
            of this prompt that any earlier request of the stack had in its KV.
        meta: what the session log says of the prompt.
        windows: the ids' text before and now, where prompts part.
    """

    prompt: int
    cached: int
    oracle: int
    meta: dict[str, Any]
    windows: Any
    said: str
    outcome: str

    @property
    def prefilled(self) -> int:
        """Tokens that were computed."""
        return self.prompt - self.cached


@dataclass(frozen=True, slots=True)
class Figures:
    """
    Sums over a client's requests.

    Args:
        reuse: of prompt tokens from the third request on, those not prefilled.
        appended: the same without requests that begin another conversation
            (sub-agents, titles): those of which most was never seen before.
        possible: as `reuse`, for the oracle.
    """

    requests: int
    prompt: int
    prefilled: int
    reuse: float | None
    appended: float | None
    possible: float | None
    spliced: int


class Record:
    """Reads what the sidecar wrote since it was last asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._held: list[Any] = []

    def forget(self) -> None:
        """Begin a client on an empty store."""
        self.read()
        self._held.clear()

    def read(self) -> list[Served]:
        """The requests that have come and ended since then, in order."""
        jobs: dict[int, dict[str, Any]] = {}
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                row = json.loads(line)
                if row["job"] is not None:
                    jobs.setdefault(row["job"], {})[row["kind"]] = row
            self._at = file.tell()
        served = [self._served(jobs[number]) for number in sorted(jobs)]
        return [row for row in served if row]

    def _served(self, rows: dict[str, Any]) -> Served | None:
        if "job" not in rows:
            return None  # nothing was sampled: cancelled or refused
        ids = np.array(rows["job"]["ids"], np.int32)
        oracle = max((_common(ids, held) for held in self._held), default=0)
        said = np.array(rows["job"]["said_ids"], np.int32)
        self._held.append(np.concatenate([ids, said]))
        meta, content = (rows.get("prompt") or {}).get("told") or ({}, {})
        ended = (rows.get("generation") or {}).get("told") or ({}, {})
        return Served(
            len(ids),
            int(
                (rows.get("end") or {}).get("cached", ended[0].get("cached_tokens", 0))
            ),
            min(oracle, len(ids) - 1),
            meta,
            content.get("divergence_windows"),
            rows["job"]["said"],
            str(ended[0].get("outcome", "?")),
        )


def _common(one: Any, other: Any) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(np.argmax(differs)) if differs.any() else length


def figures(served: list[Served]) -> Figures:
    """The sums."""
    later = served[2:]
    going_on = [row for row in later if row.oracle * 2 > row.prompt]
    return Figures(
        len(served),
        sum(row.prompt for row in served),
        sum(row.prefilled for row in served),
        _share(later, "cached"),
        _share(going_on, "cached"),
        _share(later, "oracle"),
        sum(row.meta.get("spliced_turns") or 0 for row in later),
    )


def _share(rows: list[Served], name: str) -> float | None:
    total = sum(row.prompt for row in rows)
    return sum(getattr(row, name) for row in rows) / total if total else None


def losses(served: list[Served]) -> list[str]:
    """A line for each request that reused less than its predecessor held."""
    lines = []
    for number, row in enumerate(served, 1):
        meta = row.meta
        line = (
            f"#{number} prompt={row.prompt} cached={row.cached} oracle={row.oracle} "
            f"match={meta.get('match_type')} spliced={meta.get('spliced_turns')} "
            f"stable={meta.get('stable_messages')} pinned={meta.get('pinned')} "
            f"stopped_by={meta.get('stopped_by')} outcome={row.outcome}"
        )
        if meta.get("divergence"):
            line += f"\n    parts at {meta['divergence']}: {row.windows}"
        lines.append(line)
    return lines
