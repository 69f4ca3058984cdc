"""Session logs: who may read them, how large and how old they become."""

import logging
import os
import stat
import time
from pathlib import Path

import pytest

from sidecar.infra.session_log import LogLimits, SessionLog

DAY_S = 86_400.0
NOON = 1_795_262_400.0
PLENTY = LogLimits(max_bytes=1 << 30, max_age_days=0)


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_log(root: Path, clock: Clock, limits: LogLimits = PLENTY) -> SessionLog:
    return SessionLog(root, limits, with_content=True, now=clock, steady=clock)


def say(log: SessionLog, session: str, text: str = "x") -> None:
    log.write(session, "r", "prompt", {}, {"prompt": text})


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def put(root: Path, name: str, size: int, written_at: float) -> Path:
    """A session file of an earlier run."""
    file = root / "2026-01-01" / f"cache-session-{name}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x" * size)
    os.utime(file, (written_at, written_at))
    return file


def test_only_the_user_may_read_them(tmp_path: Path, clock: Clock) -> None:
    """0600 in 0700 folders, also where an older file was open to others."""
    root = tmp_path / "logs"
    log = open_log(root, clock)
    say(log, "a")
    (file,) = files(root)
    file.chmod(0o644)
    say(log, "a")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_folder_of_the_users_keeps_its_mode(tmp_path: Path, clock: Clock) -> None:
    """LOG_ROOT may name one that others use as well; what is put in it is closed."""
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o755)
    log = open_log(root, clock)
    say(log, "a")
    (file,) = files(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_large_file_is_set_aside_and_goes_on(tmp_path: Path, clock: Clock) -> None:
    """No file grows beyond its limit, no block is cut, and none is lost."""
    limits = LogLimits(1 << 30, 0, max_file_bytes=1000)
    log = open_log(tmp_path, clock, limits)
    for number in range(10):
        say(log, "a", f"{number} " + "y" * 300)
    found = files(tmp_path)
    assert [path.suffix for path in found] == [".log", ".1", ".2", ".3", ".4"]
    assert all(path.stat().st_size <= 1000 for path in found)
    assert sum(path.read_text().count("request_id=r") for path in found) == 10
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in found)


def test_a_block_above_the_limit_is_kept_whole(tmp_path: Path, clock: Clock) -> None:
    """A single long prompt is larger than a file should be."""
    log = open_log(tmp_path, clock, LogLimits(1 << 30, 0, max_file_bytes=100))
    say(log, "a", "y" * 1000)
    assert files(tmp_path)[0].stat().st_size > 1000


def test_all_files_together_stay_below_the_limit(tmp_path: Path, clock: Clock) -> None:
    """After each of 10,000 blocks; the sessions written to last are those left."""
    limits = LogLimits(50_000, 0, max_file_bytes=5_000)
    log = open_log(tmp_path, clock, limits)
    for number in range(10_000):
        clock.now += 1
        say(log, f"session {number // 100}", "z" * 50)
        if number % 500 == 499:
            assert sum(path.stat().st_size for path in files(tmp_path)) <= 50_000
    kept = files(tmp_path)
    assert sum(path.stat().st_size for path in kept) >= 30_000
    last = SessionLog(
        tmp_path / "other", PLENTY, with_content=True, now=clock, steady=clock
    )
    say(last, "session 99")
    assert files(tmp_path / "other")[0].name in {path.name for path in kept}


def test_the_oldest_go_first(tmp_path: Path, clock: Clock) -> None:
    """At the start, too: what earlier runs left counts."""
    old = put(tmp_path, "old", 600, NOON - 3 * DAY_S)
    recent = put(tmp_path, "recent", 600, NOON - DAY_S)
    say(open_log(tmp_path, clock, LogLimits(1000, 0)), "a")
    assert not old.exists()
    assert recent.exists()
    assert len(files(tmp_path)) == 2


def test_what_is_too_old_goes(tmp_path: Path, clock: Clock) -> None:
    """With the folder of its day; looked at once an hour, not only at the start."""
    log = open_log(tmp_path, clock, LogLimits(1 << 30, max_age_days=14))
    say(log, "a")
    aged = put(tmp_path, "aged", 10, NOON - 13.99 * DAY_S)
    clock.now += 1800
    say(log, "a")
    assert aged.exists()
    clock.now += 1801
    say(log, "a")
    assert not aged.exists()
    assert not aged.parent.exists()
    assert len(files(tmp_path)) == 1


def test_other_files_are_left_alone(tmp_path: Path, clock: Clock) -> None:
    """LOG_ROOT may hold what is not ours."""
    (tmp_path / "notes").mkdir()
    strangers = [tmp_path / "notes" / "mine.log", tmp_path / "mine.txt"]
    for stranger in strangers:
        stranger.write_bytes(b"x" * 5000)
        os.utime(stranger, (0, 0))
    say(open_log(tmp_path, clock, LogLimits(1000, max_age_days=1)), "a")
    assert all(stranger.exists() for stranger in strangers)


def test_a_failure_is_a_warning_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """No request fails for its log: here a file stands where the folder should."""
    (tmp_path / "logs").write_text("in the way")
    log = open_log(tmp_path / "logs", clock)
    with caplog.at_level(logging.WARNING):
        say(log, "a")
        say(log, "b")
    assert [r.message for r in caplog.records] == ["cannot write the session log"]


def test_a_file_that_cannot_be_removed_stops_nothing(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The block is written, without a warning; an hour later it is tried again."""
    stuck = put(tmp_path, "stuck", 600, NOON - 3 * DAY_S)
    log = open_log(tmp_path, clock, LogLimits(500, 0))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(Path, "unlink", refuse)
        say(log, "a", "first")
    assert stuck.exists()
    clock.now += 3600
    say(log, "a", "second")
    (file,) = files(tmp_path)
    assert "first" in file.read_text()
    assert "second" in file.read_text()
    assert caplog.records == []


def test_a_clock_that_jumps_ahead_erases_nothing(tmp_path: Path) -> None:
    """A machine that slept, a wrong answer of the time server."""
    clock, limits = Clock(), LogLimits(max_bytes=1 << 30, max_age_days=14)
    clock.now = time.time()
    log = SessionLog(tmp_path, limits, with_content=True, now=clock)
    say(log, "first")
    clock.now += 40 * DAY_S
    say(log, "second")
    assert len(files(tmp_path)) == 2
