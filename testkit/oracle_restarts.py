"""The oracle fuzzer's player on a server that is restarted between requests."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sidecar.core import lasting_secret
from sidecar.kv.disk.disk_cache import DiskCache
from testkit.kept_kv import disk_settings
from testkit.oracle import Player, Totals, Violation
from testkit.oracle_rig import Rig, running_rig
from testkit.oracle_talk import Op


@contextmanager
def kept_rig(folder: Path, kind: str, run_tokens: int) -> Iterator[Rig]:
    """
    A rig whose server keeps KV on the disk; marks are as before when it ends.

    Args:
        run_tokens: few, so that chains are long and ends are joined.
    """
    before = lasting_secret._secret
    asked = disk_settings(folder / "kv", folder, KV_DISK_RUN_TOKENS=str(run_tokens))
    del asked["MODEL_PATH"]
    try:
        with running_rig(folder, kind, **asked) as rig:
            yield rig
    finally:
        lasting_secret.use_secret(before)


def disk_of(rig: Rig) -> DiskCache:
    """The disk's side of the rig's model."""
    with rig.app.pool.lease("") as served:
        disk: DiskCache | None = served.disk
    assert disk is not None
    return disk


@dataclass
class RestartTotals(Totals):
    """And how many tokens came from the disk."""

    restored: int = 0


class RestartingPlayer(Player):
    """
    Before half of the ops memory is lost, and what the disk has is learned anew.

    All that a restart takes is taken: KV, lineage, turns, threads, the index of slots.
    Before some of them nothing was written: then what is there is older.
    """

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.totals: RestartTotals = RestartTotals()
        self._disk = disk_of(rig)
        self.num_restarts = 0

    def play(self, ops: Sequence[Op]) -> list[Violation]:
        """All ops in order, on a server that has nothing of others on its disk."""
        self._rig.settle()
        self._disk.forget()
        return super().play(ops)

    def _act(self, op: Op, chance: random.Random) -> None:
        dice = random.Random(f"restart {op}")
        if dice.random() < 0.5:
            self._rig.settle()
            if dice.random() < 0.8:
                self._disk.flush()
            restart(self._rig, self._disk)
            self.num_restarts += 1
        super()._act(op, chance)


def restart(rig: Rig, disk: DiskCache) -> None:
    """Lose what is in memory; know again what is on the disk."""
    rig.pipeline.memory.forget()
    place = disk._place
    assert place is not None
    with disk._lock:
        disk._write_queue.due.forget()
        disk._index.clear()
        disk._seen, disk._stamps = 0, {}
    disk._refresh(place.folder)
