"""
A process that saves, restores, forgets and clears away until it is killed.

    python -m testkit.disk_worker ROOT MODEL SEED

It says `ready` when it begins. What it is asked, and what it says to that, follows from
`talks`: a parent that knows the answers can tell whether any is wrong.
"""

import os
import random
import sys
from pathlib import Path

from sidecar.app import App
from sidecar.core.prompt import ModelIds
from testkit.jobs import random_ids
from testkit.kept_kv import ask, kept_sidecar, leased, said

NUM_TALKS = 6


def talks() -> list[ModelIds]:
    """Prompts that share beginnings, as long as it takes for several slots."""
    found = []
    for number in range(NUM_TALKS):
        shared = random_ids(number % 2, 120)
        found.append(ModelIds(shared + random_ids(100 + number, 60 + 40 * number)))
    return found


def lose_memory(app: App) -> None:
    """As a restart does: what is on the disk is learned anew."""
    with leased(app) as resident:
        resident.memory.forget()
        disk = resident.disk
        assert disk is not None
        assert disk._place is not None
        with disk._lock:
            disk._index.clear()
            disk._seen, disk._stamps = 0, {}
        disk._refresh(disk._place.folder)


def act(app: App, chance: random.Random) -> None:
    """One of what a server does, at random."""
    prompt = chance.choice(talks())
    what = chance.random()
    with leased(app) as resident:
        disk = resident.disk
        assert disk is not None
        if what < 0.5:
            outcome = ask(app, prompt, 4)
            disk.flush()
            more = ModelIds(prompt + said(outcome) + random_ids(chance.random(), 80))
            ask(app, more, 4)
            disk.flush()
        elif what < 0.8:
            lose_memory(app)
            ask(app, prompt, 4)
        elif what < 0.95:
            disk._root.clear_away()
        else:
            disk.forget()
            resident.memory.forget()


def main(root: Path, model: Path, seed: str) -> None:
    """Act until somebody kills it, or its parent is gone."""
    chance = random.Random(seed)
    # So small that ends are joined and old ones leave all the time.
    more = {"KV_DISK_RUN_TOKENS": "150", "KV_DISK_MAX_SIZE_GB": "0.003"}
    with kept_sidecar(root, model, **more) as app:
        print("ready", flush=True)
        parent = os.getppid()
        while os.getppid() == parent:  # else nobody would end it
            act(app, chance)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
