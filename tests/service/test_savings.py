"""Sums of what reuse has saved, over days and starts."""

import datetime
from pathlib import Path

import pytest

from sidecar.service.kept_file import KeptFile
from sidecar.service.request_history import Work
from sidecar.service.savings import Savings
from testkit.raw_http import eventually


class Days:
    """A calendar, and the work that is done by it."""

    def __init__(self, file: Path) -> None:
        self.file, self.today, self.work = file, datetime.date(2026, 1, 1), Work()

    def opened(self) -> Savings:
        self.work = Work()
        return Savings(self.file, lambda: self.work, lambda: self.today, 3600)

    def works(self, savings: Savings, tokens: int) -> None:
        self.work += Work(tokens, tokens // 2, 1.0)
        savings.as_dict()


def test_today_is_kept_beside_thirty_others(tmp_path: Path) -> None:
    days = Days(tmp_path / "savings.json")
    savings = days.opened()
    for _ in range(40):
        days.today += datetime.timedelta(days=1)
        days.works(savings, 10)
    found = savings.as_dict()
    savings.close()
    assert found["today"]["prompt_tokens"] == 10
    assert found["total"]["prompt_tokens"] == found["start"]["prompt_tokens"] == 400
    assert len(days.opened()._days) == 31


def test_the_total_outlives_a_start_and_says_since_when(tmp_path: Path) -> None:
    days = Days(tmp_path / "savings.json")
    savings = days.opened()
    days.works(savings, 10)
    savings.close()
    days.today += datetime.timedelta(days=3)
    savings = days.opened()
    days.works(savings, 4)
    found = savings.as_dict()
    assert found["since"] == "2026-01-01"
    assert found["today"]["prompt_tokens"] == found["start"]["prompt_tokens"] == 4
    assert found["total"]["prompt_tokens"] == 14
    savings.close()


def test_a_file_is_written_before_its_end_and_again_after_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What has not changed since it could not be written is written, too."""
    file, content = tmp_path / "folder" / "kept.json", [1]
    file.parent.write_text("in its way")
    kept = KeptFile(file, "what is kept", lambda: list(content), 0.01)
    content.append(2)
    assert eventually(lambda: "cannot be kept" in caplog.text)
    file.parent.unlink()
    assert eventually(lambda: file.exists() and file.read_text() == "[1, 2]")
    assert caplog.text.count("cannot be kept") == 1
    kept.close()
