"""What of the servers' output a person sees, and what is only kept."""

import io
from pathlib import Path

from litellm_mlx.launcher import servers_log
from litellm_mlx.launcher.servers_log import ServersLog
from litellm_mlx.launcher.terminal_lines import litellm_lines, prefixed, sidecar_lines


class _FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


AT = "15:58:14"
SELF_TEST = f"{AT} INFO sidecar.engine.selftest.self_test [-]"


def test_a_start_is_a_line_for_the_load_and_one_for_the_self_test() -> None:
    lines = [
        "mlx-sidecar: http://127.0.0.1:8080 model=built-in",
        f"{AT} INFO sidecar.loader [-] loaded model=m bytes=17200000000 seconds=8.1",
        f"{SELF_TEST} selftest goes on between requests: chunks, restore; not used yet",
        f"{AT} INFO sidecar.residents [-] ready to reuse layers=8xKVCache",
        f"{SELF_TEST} tested reuse path=chunks outcome=ok moved=0.0e+00",
        f"{SELF_TEST} tested reuse path=restore outcome=ok moved=0.0e+00",
    ]
    assert list(sidecar_lines(lines)) == [
        "load       m, 17.2 GB in 8.1 s",
        "self-test  2 of 2 ways of reuse are right",
    ]


def test_what_is_wrong_is_shown() -> None:
    """A traceback by its last line; the rest is kept in the log."""
    lines = [
        f"{AT} WARNING sidecar.engine.selftest [-] tested reuse path=x outcome=failed",
        f"{AT} ERROR sidecar.server [id] request failed path=/v1",
        "    Traceback (most recent call last):",
        "      File x",
        "mlx-sidecar: warning: it does not fit",
        "something that is no line of ours",
        "mlx-sidecar: downloading org/m: 1.0 of 2.0 GB, 48 MB/s",
    ]
    assert list(sidecar_lines(lines)) == [
        f"sidecar | {AT} WARNING tested reuse path=x outcome=failed",
        f"sidecar | {AT} ERROR request failed path=/v1",
        "sidecar | warning: it does not fit",
        "sidecar | something that is no line of ours",
        "download   org/m: 1.0 of 2.0 GB, 48 MB/s",
    ]


def test_requests_are_shown_with_their_light() -> None:
    light = "request started light=\x1b[92m●\x1b[0m green match=strict reused=9 of 10"
    found = sidecar_lines([f"{AT} INFO sidecar.service.request_log [id] {light}"])
    assert list(found) == [f"{AT} {light}"]


def test_litellms_own_lines() -> None:
    lines = [
        "INFO:     Started server process [1]",
        "\x1b[32mLiteLLM: Proxy initialized with Config, Set models:\x1b[0m",
        "\x1b[32m    local\x1b[0m",
        'INFO:     127.0.0.1:1 - "GET /health/liveliness HTTP/1.1" 200 OK',
        "-> cloud: local would need 34 s",
        "12:00:00 - LiteLLM Proxy:ERROR: x.py:1 - failed",
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in f',
        "    raise Error",
        "ValueError: a",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in f',
        "litellm.BadRequestError: messages",
        "the next line",
    ]
    assert list(litellm_lines(lines)) == [
        "litellm | -> cloud: local would need 34 s",
        "litellm | 12:00:00 - LiteLLM Proxy:ERROR: x.py:1 - failed",
        "litellm | ValueError: a",
        "litellm | litellm.BadRequestError: messages",
        "litellm | the next line",
    ]
    assert list(prefixed("litellm")(["INFO: x"])) == ["litellm | INFO: x"]


def test_all_is_kept_for_its_owner_alone(
    tmp_path: Path,
) -> None:
    """In five files; a disk that is full costs the line alone."""
    servers_log._MAX_BYTES, before = 1000, servers_log._MAX_BYTES
    try:
        log = ServersLog(tmp_path / "run" / "servers.log")
        for number in range(200):
            log.write("sidecar", f"line {number}")
    finally:
        servers_log._MAX_BYTES = before
    files = sorted(log.path.parent.iterdir())
    assert len(files) == 5
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert "sidecar line 199" in log.path.read_text()
    real, log._handler.stream = log._handler.stream, _FullDisk()
    log.write("sidecar", "no room")
    log._handler.stream = real
    log.write("sidecar", "room again")
    assert "room again" in log.path.read_text()
    log._handler.close()
