"""`mlx-sidecar bench` against a running server."""

import json

import pytest

from sidecar.__main__ import main
from sidecar.app import App
from sidecar.cli.bench import Timed, decode_rate
from sidecar.cli.server import Reply


def timed(completion_len: int, started: float, ttft_s: float, ended: float) -> Timed:
    return Timed(Reply({}, 10, 0, completion_len, ttft_s), started, ended)


def test_a_row_a_length(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    """What is longer than the context is said, not asked."""
    ask = ["bench", "--url", app.url, "--max-tokens", "16", "--streams", "2"]
    assert main([*ask, "--lengths", "128,300,900k"]) == 0
    shown = capsys.readouterr().err
    assert "921600 is more than the model's context takes" in shown
    assert main([*ask, "--lengths", "256", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert 200 < row["prompt_len"] < 400
    assert row["reused"] > 0.5
    assert row["cold_s"] > 0
    assert row["prefill_rate"] > 0


def test_rates_are_of_what_was_written_at_once() -> None:
    assert decode_rate([timed(11, 5.0, 1.0, 8.0)]) == 5.0
    together = [timed(11, 0.0, 1.0, 5.0), timed(21, 0.0, 2.0, 11.0)]
    assert decode_rate(together) == 3.0
    assert decode_rate([timed(7, 0.0, 1.0, 2.0)]) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "absent"], "no model 'absent' is served"),
        (["--lengths", "900k"], "is too short for each"),
    ],
)
def test_what_cannot_be_measured_says_why(
    app: App, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", app.url, *flags]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("lengths", ["10", "1kk", "", "1k,", "-5", "99999k"])
def test_a_length_has_a_range(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--lengths", lengths])
    assert ended.value.code == 2
    assert "each must be 64 to 1048576 tokens" in capsys.readouterr().err
