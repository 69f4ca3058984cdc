"""Sidecars whose KV outlives them, and what they are asked."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sidecar.app import App
from sidecar.core import lasting_secret
from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.residents.resident import Resident
from testkit.jobs import Outcome, run
from testkit.servers import running_sidecar


def disk_settings(root: Path, model: Path, **more: str) -> dict[str, str]:
    """Everything is written as soon as it rests, and always read back."""
    return {
        "MODEL_PATH": str(model),
        "KV_DISK_PERSISTENCE": "true",
        "KV_DISK_PATH": str(root),
        "KV_DISK_MIN_PREFIX_TOKENS": "32",
        "KV_DISK_RUN_TOKENS": "64",
        "KV_DISK_QUIET_SECONDS": "86400",  # tests flush
        "KV_DISK_MIN_FREE_GB": "0",
        "KV_DISK_RESTORE": "always",
        **more,
    }


@contextlib.contextmanager
def kept_sidecar(root: Path, model: Path, **more: str) -> Iterator[App]:
    """A sidecar with KV on the disk; marks are as before when it ends."""
    before = lasting_secret._secret
    try:
        with running_sidecar(disk_settings(root, model, **more)) as app:
            yield app
    finally:
        lasting_secret.use_secret(before)


@contextlib.contextmanager
def leased(app: App) -> Iterator[Resident]:
    """The resident of a running sidecar's model."""
    with app.pool.lease("local") as served:
        assert isinstance(served, Resident)
        yield served


def ask(app: App, ids: ModelIds, max_tokens: int = 12) -> Outcome:
    """A raw completion, as the service runs one: what the disk has is brought back."""
    with leased(app) as resident:
        resident.restore_raw(ModelPrompt(ids), lambda: True)
        return run(resident.engine, ids, max_tokens)


def said(outcome: Outcome) -> tuple[int, ...]:
    """The ids of an answer that ended well."""
    assert outcome.failure is None
    return outcome.choices[0].ids


def flush(app: App) -> None:
    """Write all that is due; slots as short as at the end."""
    with leased(app) as resident:
        assert resident.disk is not None
        resident.disk.flush()


def disk_counts(app: App) -> dict[str, int]:
    """What the disk has counted."""
    with leased(app) as resident:
        counts = resident.counters()
    return {name: n for name, n in counts.items() if name.startswith("disk_")}


def slots(root: Path) -> list[Path]:
    """Files of ids: one for each slot."""
    return sorted(root.glob("*/slot_*_tokens.safetensors"))
