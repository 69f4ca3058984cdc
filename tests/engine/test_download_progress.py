"""What is told of a download, and how often."""

import pytest

from sidecar.engine.loading.download_progress import DownloadProgress, format_seconds


class Told:
    """A progress with its lines and a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self.progress = DownloadProgress(self.lines.append, lambda: self.now)

    def run(self, seconds: int, bytes_a_second: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.progress.add(bytes_a_second)
            self.progress.tell_when_due()


def test_bytes_speed_and_time_left() -> None:
    """Four lines a minute, the speed that of the last half minute."""
    told = Told()
    told.progress.begin("org/m", 1_000_000_000, 17_000_000_000)
    told.run(60, 50_000_000)
    assert len(told.lines) == 5
    assert told.lines[0] == "downloading org/m: 17.0 GB; 1.0 GB are here already"
    assert told.lines[-1] == (
        "downloading org/m: 4.0 GB of 17.0 GB (23 %), 50 MB/s, 4 min 20 s left"
    )
    told.run(60, 10_000_000)
    assert "10 MB/s" in told.lines[-1]
    told.run(60, 0)
    assert told.lines[-1].endswith("nothing arrives")


def test_the_end_is_told_with_what_was_fetched_now() -> None:
    """Bytes of earlier tries do not count; afterwards nothing is said any more."""
    told = Told()
    told.progress.begin("org/m", 500, 1500)
    told.run(10, 100)
    told.progress.end()
    assert told.lines[-1] == "downloaded org/m: 1 kB in 10 s"
    assert told.progress.state is None
    told.run(60, 1)
    told.progress.end()
    assert len(told.lines) == 2


def test_the_state_is_there_while_it_runs() -> None:
    """For /health; a file that is begun again takes its bytes back."""
    told = Told()
    assert told.progress.state is None
    told.progress.begin("org/m", 0, 1000)
    told.progress.add(600)
    told.progress.add(-200)
    state = told.progress.state
    assert state is not None
    assert (state.name, state.done_bytes, state.total_bytes) == ("org/m", 400, 1000)
    told.progress.stop()
    assert told.progress.state is None
    told.progress.begin("org/n", 900, 1000)
    told.progress.add(100)
    assert told.progress.arrived_bytes == 700, "of both, and what came in vain"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (320, "5 min 20 s"), (8000, "2 h 13 min")],
)
def test_times_for_people(seconds: float, text: str) -> None:
    """In the units that matter."""
    assert format_seconds(seconds) == text
