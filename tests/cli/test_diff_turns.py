"""diff-turns on logs that a real sidecar wrote."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from sidecar.__main__ import main
from sidecar.cli.log_blocks import read_prompts
from sidecar.infra.session_log import LogLimits, SessionLog
from testkit.servers import running_sidecar

WORDS = "Nine grey herons stand in the shallow water and wait for the evening. " * 8


def ask(url: str, system: str, *texts: str, request_id: str = "") -> None:
    """One request with a fixed history."""
    messages = [{"role": "system", "content": system}]
    for number, text in enumerate(texts):
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": text})
    body = {"messages": messages, "max_tokens": 4, "session_id": "s"}
    headers = {"x-request-id": request_id} if request_id else {}
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
    )
    assert answer.status_code == 200


@pytest.fixture
def write_log(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> Callable[..., Path]:
    """`write_log(requests, **settings)`: the session's file after these requests."""

    def write(requests: list[tuple[str, ...]], **settings: str) -> Path:
        logging = {"ENABLE_REQUEST_LOGGING": "true", "LOG_ROOT": str(tmp_path)}
        model = {"MODEL_PATH": str(model_folder("dense"))}
        with running_sidecar({**model, **logging, **settings}) as app:
            for number, texts in enumerate(requests):
                ask(app.url, *texts, request_id=f"request-{number}")
        (file,) = tmp_path.glob("*/cache-session-*.log")
        return file

    return write


WriteLog = Callable[..., Path]


def test_the_first_difference_is_shown_with_forty_characters_on_both_sides(
    write_log: WriteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """An order turned round in the middle of the system prompt: exit code 1."""
    before = f"{WORDS}Do not touch the red boat. {WORDS}"
    after = f"{WORDS}Do now touch the red boat. {WORDS}"
    file = write_log([(before, "hi"), (after, "hi")])
    assert main(["diff-turns", str(file)]) == 1
    shown = capsys.readouterr().out
    old, new = read_prompts(file)
    assert old.prompt is not None
    assert new.prompt is not None
    at = old.prompt.index("Do not") + 5
    assert f"First difference at character {at} of {len(new.prompt)}" in shown
    assert f"from  {old.prompt[at - 40 : at]!r} | {old.prompt[at : at + 40]!r}" in shown
    assert f"to    {new.prompt[at - 40 : at]!r} | {new.prompt[at : at + 40]!r}" in shown
    assert "in message 0 (system)" in shown


def test_an_appended_turn_is_no_difference(
    write_log: WriteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """`to` extends `from`: exit code 0, and what came is shown."""
    file = write_log([("Be brief.", "hi"), ("Be brief.", "hi", "Hello.", "Go on.")])
    assert main(["diff-turns", str(file), "--last"]) == 0
    shown = capsys.readouterr().out
    assert "`to` extends `from`" in shown


def test_the_same_request_twice_is_equal(
    write_log: WriteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_log([("Be brief.", "hi")] * 2)
    assert main(["diff-turns", str(file)]) == 0
    assert "The prompts are equal" in capsys.readouterr().out


def test_any_two_requests_of_the_file_are_compared(
    write_log: WriteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their ids, in either order."""
    file = write_log([("One.", "hi"), ("Two.", "hi"), ("One.", "hi")])
    command = ["diff-turns", str(file), "--from", "request-2", "--to"]
    assert main([*command, "request-0"]) == 0
    assert main([*command, "request-1"]) == 1
    shown = capsys.readouterr().out
    assert "'<|im_start|>system\\n' | 'Two." in shown


def test_what_the_server_pinned_and_restated_is_told(
    write_log: WriteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the pinned value leaves the prompts equal up to the note."""
    requests = [
        (f"{WORDS}\nCurrent time is 10:0{minute}.\n{WORDS}{WORDS}", "hi")
        for minute in (1, 2)
    ]
    file = write_log(requests)
    assert main(["diff-turns", str(file)]) == 1
    shown = capsys.readouterr().out
    lines = {line[:21].strip(): line[21:].split() for line in shown.splitlines()}
    assert lines["pinned"] == ["-", "current_time"]
    assert lines["restated"] == ["-", "current_time"]
    assert lines["match"] == ["none", "pinned"]
    assert int(lines["reused"][1]) > int(lines["reused without pins"][1])
    assert "| '\\n\\n<context-update " in shown


def test_a_log_without_content_tells_what_it_has(
    write_log: WriteLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """LOG_CONTENT=false: the numbers, the reason, exit code 2."""
    file = write_log([("One.", "hi"), ("Two.", "hi")], LOG_CONTENT="false")
    assert main(["diff-turns", str(file)]) == 2
    captured = capsys.readouterr()
    assert "prompt tokens" in captured.out
    assert "LOG_CONTENT=false" in captured.err


def test_what_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file, no prompts, no such request, half a question: exit code 2."""
    log = SessionLog(tmp_path, LogLimits(1 << 30, 0), with_content=True)
    for number in range(2):
        log.write("s", f"r{number}", "prompt", {"match_type": "none"}, {"prompt": "x"})
    (file,) = tmp_path.glob("*/*.log")
    assert main(["diff-turns", str(tmp_path / "none.log")]) == 2
    assert main(["diff-turns", str(file), "--from", "r0", "--to", "r9"]) == 2
    assert "request r9" in capsys.readouterr().err
    (tmp_path / "empty.log").touch()
    assert main(["diff-turns", str(tmp_path / "empty.log")]) == 2
    assert "this file has 0" in capsys.readouterr().err
    for usage in (["--from", "r0"], ["--last", "--from", "r0", "--to", "r1"]):
        with pytest.raises(SystemExit) as ended:
            main(["diff-turns", str(file), *usage])
        assert ended.value.code == 2


def test_strange_line_ends_and_half_written_blocks_do_not_confuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts may hold any character; the last block may still be being written."""
    log = SessionLog(tmp_path, LogLimits(1 << 30, 0), with_content=True)
    text = "a\u2028b\x85c\r\n\x1cd \ud800 [x] request_id=y direction=prompt\n"
    for number, prompt in enumerate((text, text + "more")):
        log.write("s", f"r {number}", "prompt", {}, {"prompt": prompt})
        log.write("s", f"r {number}", "generation", {}, {"text": text})
    (file,) = tmp_path.glob("*/*.log")
    with file.open("a") as out:
        out.write('[now] request_id=r direction=prompt\n{"request_meta": {}, "pro')
    blocks = read_prompts(file)
    assert [block.request_id for block in blocks] == ["r 0", "r 1"]
    assert main(["diff-turns", str(file)]) == 0
    assert "| 'more'" in capsys.readouterr().out
