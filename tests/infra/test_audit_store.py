"""Rows in SQLite: bounded, and nobody waits for them."""

import sqlite3
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar.infra.audit_store import AuditFilter, AuditRow, AuditStore
from sidecar.service.audit import Audit
from testkit.raw_http import eventually

DAY = 86400.0


def row(at: float, **more: object) -> AuditRow:
    fields: dict[str, object] = {"kind": "request", "request_id": "r", "status": 200}
    fields |= {"endpoint": "/v1/x", "duration_ms": 5, "address": "127.0.0.1"}
    fields |= {"outcome": "finished", **more}
    return AuditRow(at=at, **fields)  # type: ignore[arg-type]


@dataclass
class Clock:
    now: float

    def __call__(self) -> float:
        return self.now


class Kept:
    """A store of a file, and its clock."""

    def __init__(self, path: Path, days: float = 30, max_bytes: int = 1 << 30) -> None:
        self.clock = Clock(1000 * DAY)
        self.store = AuditStore(path, days, max_bytes, 3600, self.clock)

    def ats(self) -> list[float]:
        return [found["at"] for found in self.store.rows(AuditFilter(), 1000)]


def test_rows_come_back_by_filter_and_by_cursor(tmp_path: Path) -> None:
    store = Kept(tmp_path / "made" / "audit.db").store
    rows = [row(1000 * DAY + n, model=f"m{n % 2}") for n in range(5)]
    store.write([*rows, row(1000 * DAY + 9, model="other", prompt_tokens=7)])
    assert len(store.rows(AuditFilter(), 100)) == 6
    assert [r["model"] for r in store.rows(AuditFilter(model="m1"), 100)] == ["m1"] * 2
    newest = store.rows(AuditFilter(), 2, offset=1)
    assert newest[0]["at"] > newest[1]["at"]
    later = store.rows(AuditFilter(after=4), 100)
    assert [r["id"] for r in later] == [5, 6]
    assert store.rows(AuditFilter(since=1000 * DAY + 5), 9)[0]["at"] == 1000 * DAY + 9
    assert store.rows(AuditFilter(until=1000 * DAY - 1), 9) == []
    store.write([row(1000 * DAY + 10, status=404)])
    assert len(store.rows(AuditFilter(status=200), 100)) == 6
    assert len(store.rows(AuditFilter(status=404), 100)) == 1
    sums = {r["model"]: r for r in store.stats(AuditFilter())}
    assert (sums["m0"]["calls"], sums["other"]["prompt_tokens"]) == (3, 7)


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    Kept(tmp_path / "audit.db").store.write([row(1.0)])
    assert stat.S_IMODE((tmp_path / "audit.db").stat().st_mode) == 0o600


def test_what_is_too_old_goes(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "audit.db", days=30)
    kept.store.write([row(960 * DAY), row(990 * DAY)])
    assert kept.ats() == [990 * DAY]
    kept.clock.now += 21 * DAY
    kept.store.write([row(1021 * DAY)])
    assert kept.ats() == [1021 * DAY]


def test_what_is_too_much_goes_the_oldest_first(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "audit.db", max_bytes=60_000)
    kept.store.write([row(1000 * DAY + n, client="c" * 200) for n in range(900)])
    left = kept.ats()
    assert left[0] == 1000 * DAY + 899
    assert 50 < len(left) < 400
    assert min(left) == 1000 * DAY + 900 - len(left)


@pytest.mark.parametrize("from_byte", [100, 8192])
def test_a_damaged_database_is_set_aside(tmp_path: Path, from_byte: int) -> None:
    """Its schema or only what stands in it."""
    path = tmp_path / "audit.db"
    Kept(path).store.write([row(1000 * DAY + n) for n in range(900)])
    whole = path.read_bytes()
    path.write_bytes(whole[:from_byte] + b"x" * (len(whole) - from_byte))
    kept = Kept(path)
    kept.store.write([row(2000 * DAY)])
    assert kept.ats() == [2000 * DAY]
    (aside,) = tmp_path.glob("audit.damaged-*")
    assert aside.read_bytes().endswith(b"xxxx")


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    """A name that was set by mistake."""
    path = tmp_path / "notes.txt"
    path.write_bytes(b"my notes, which are long enough")
    with pytest.raises(OSError, match="no SQLite database"):
        Kept(path).store.write([row(1000 * DAY)])
    assert path.read_bytes().startswith(b"my notes")


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "audit.db"
    path.touch(0o644)
    Kept(path).store.write([row(1000 * DAY)])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_file_gets_smaller(tmp_path: Path) -> None:
    path = tmp_path / "audit.db"
    Kept(path).store.write([row(1000 * DAY, client="c" * 200) for n in range(5000)])
    before = path.stat().st_size
    Kept(path, max_bytes=100_000).store.write([row(1000 * DAY)])
    assert path.stat().st_size < before / 4


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Kept(tmp_path / "file" / "audit.db")
    with pytest.raises(OSError, match="file"):
        kept.store.write([row(1.0)])
    assert kept.ats() == []


class Lost:
    """Counts rows that were lost."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, num: int) -> None:
        self.num += num


def test_a_locked_file_costs_rows_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who notes one never waits; beyond a thousand that wait they are lost at once."""
    kept, lost = Kept(tmp_path / "audit.db"), Lost()
    kept.store.write([row(1000 * DAY)])
    audit = Audit(kept.store, lost)
    lock = sqlite3.connect(tmp_path / "audit.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    for number in range(1500):
        audit.note(row(1000 * DAY + number))
    assert lost.num >= 299
    assert eventually(lambda: "audit rows are lost" in caplog.text)
    lock.execute("ROLLBACK")
    lock.close()
    assert eventually(lambda: not audit._waiting.full())
    audit.note(row(1000 * DAY + 9000))
    audit.close()
    assert caplog.text.count("audit rows are lost") == 1
    assert kept.ats()[0] == 1000 * DAY + 9000


def test_each_outage_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, lost = Kept(tmp_path / "audit.db"), Lost()
    audit = Audit(kept.store, lost)
    for number in range(2):
        at = 1000 * DAY + number
        kept.store.write([row(at - 1)])
        lock = sqlite3.connect(tmp_path / "audit.db", isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        audit.note(row(at))
        assert eventually(lambda wanted=number + 1: lost.num >= wanted, 60)
        lock.execute("ROLLBACK")
        lock.close()
        audit.note(row(at))
        assert eventually(lambda wanted=at: wanted in kept.ats(), 60)
    audit.close()
    assert caplog.text.count("audit rows are lost") == 2
