"""The supervisor, with real child processes."""

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from litellm_mlx.launcher.child import Child, Service
from litellm_mlx.launcher.ports import PidFile
from litellm_mlx.launcher.services import sidecar_service
from litellm_mlx.launcher.settings import Flags, load_settings
from litellm_mlx.launcher.supervisor import (
    RestartPolicy,
    ServiceFailed,
    StopRequested,
    Supervisor,
)
from testkit.proxy import free_port

STAND_IN = Path(__file__).with_name("stand_in_sidecar.py")
FAST = RestartPolicy(first_pause_s=0.02, longest_pause_s=0.1, health_every_s=0.05)


def wait_until(question: Callable[[], object], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not question():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Run:
    """A supervisor with what it said and the pids of what it started."""

    def __init__(
        self,
        stop_wait_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.said: list[str] = []
        self.pids: list[int | None] = []
        self.failure: ServiceFailed | None = None
        self.supervisor = Supervisor(
            self.said.append, stop_wait_s=stop_wait_s, policy=FAST, clock=clock
        )

    def service(self, **env: str) -> Service:
        port = free_port()
        return Service(
            name="stand-in",
            command=(sys.executable, str(STAND_IN), "--port", str(port)),
            env={**os.environ, **env},
            health_url=f"http://127.0.0.1:{port}/health",
            is_healthy=lambda answer: answer.status_code == 200,
            start_deadline_s=120.0,
            is_stuck=lambda answer: b"stuck" in answer.content,
            is_fetching=lambda answer: b"downloading" in answer.content,
            fault_prefix="mlx-sidecar: error: ",
            on_pid=self.pids.append,
        )

    def watch_in_background(self) -> threading.Thread:
        def watch() -> None:
            try:
                self.supervisor.watch()
            except ServiceFailed as failure:
                self.failure = failure

        thread = threading.Thread(target=watch)
        thread.start()
        return thread

    def stop(self, thread: threading.Thread) -> None:
        self.supervisor.request_stop()
        thread.join(120.0)
        assert not thread.is_alive()


@pytest.fixture
def run() -> Iterator[Run]:
    one = Run()
    with one.supervisor:
        yield one


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_start_waits_while_the_service_loads(run: Run) -> None:
    """A service that answers 503 at first is started once it answers 200."""
    began = time.monotonic()
    run.supervisor.start(run.service(STAND_IN_LOADING_S="0.5"))
    assert time.monotonic() - began >= 0.5
    assert "stand-in | stand-in starts, model=None" in run.said


def test_what_dies_while_another_one_starts_is_said_at_once(run: Run) -> None:
    """Nobody waits for the other one first."""
    run.supervisor.start(run.service())
    (pid,) = run.pids
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServiceFailed, match="ended by signal 9"):
        run.supervisor.start(run.service(STAND_IN_LOADING_S="600"))


def test_a_failing_start_shows_the_last_lines(run: Run, tmp_path: Path) -> None:
    """A service that ends before it is healthy fails the start, with its stderr."""
    (tmp_path / "once").touch()
    with pytest.raises(ServiceFailed, match="ended with code 1") as caught:
        run.supervisor.start(run.service(STAND_IN_ONCE=str(tmp_path / "once")))
    assert "cannot start a second time" in caught.value.tail
    assert run.pids[-1] is None


def test_a_start_has_a_deadline(run: Run) -> None:
    """A service that stays unhealthy is killed at its deadline, and the start fails."""
    slow = run.service(STAND_IN_LOADING_S="60")
    service = Service(
        slow.name, slow.command, slow.env, slow.health_url, slow.is_healthy,
        start_deadline_s=0.6, on_pid=run.pids.append,
    )  # fmt: skip
    with pytest.raises(ServiceFailed, match=r"not ready within 0\.6 s"):
        run.supervisor.start(service)
    assert run.pids[0] is not None
    assert not is_running(run.pids[0])


def test_a_download_is_no_part_of_the_deadline() -> None:
    """Hours of `downloading` do not end a start; after it the deadline counts anew."""
    passed = [0.0]
    run = Run(clock=lambda: time.monotonic() + passed[0])
    service = run.service(STAND_IN_FETCHING="1")
    root = service.health_url.removesuffix("/health")

    def asked() -> int:
        try:
            answer = httpx.get(f"{root}/asked", trust_env=False)
        except httpx.HTTPError:
            return 0
        return int(answer.json()["asked"])

    def let_hours_pass() -> None:
        wait_until(lambda: asked() > 0, 60)
        for _ in range(3):
            passed[0] += 10_000
            before = asked()
            wait_until(lambda before=before: asked() > before + 1, 60)  # type: ignore[misc]
        httpx.post(f"{root}/fetched", trust_env=False)

    driver = threading.Thread(target=let_hours_pass)
    driver.start()
    with run.supervisor:
        run.supervisor.start(service)
    driver.join()
    assert passed[0] == 30_000


def test_a_start_that_says_its_reason_is_that_reason(run: Run) -> None:
    """One sentence, said by who acts on it: no tail, not echoed, not tried again."""
    service = run.service(STAND_IN_FAULT="the folder is empty")
    with pytest.raises(ServiceFailed) as caught:
        run.supervisor.start(service)
    assert str(caught.value) == "the folder is empty"
    assert caught.value.tail is None
    assert not any("the folder is empty" in line for line in run.said)
    assert len([pid for pid in run.pids if pid is not None]) == 1


def test_a_stop_ends_a_start(run: Run) -> None:
    """A signal during a long start does not wait for the start to end."""
    threading.Timer(0.3, run.supervisor.request_stop).start()
    with pytest.raises(StopRequested):
        run.supervisor.start(run.service(STAND_IN_LOADING_S="60"))


def test_a_service_that_dies_is_started_again(run: Run) -> None:
    """After its process was killed, the service is up again in a new one."""
    run.supervisor.start(run.service())
    thread = run.watch_in_background()
    first = run.pids[0]
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: "stand-in is up again" in run.said)
    run.stop(thread)
    assert run.pids[-1] not in (None, first)
    assert any("ended by signal 9" in line for line in run.said)


def start_and_watch(run: Run) -> tuple[threading.Thread, str]:
    """The watching thread, and the root of a service that is up."""
    service = run.service()
    run.supervisor.start(service)
    return run.watch_in_background(), service.health_url.removesuffix("/health")


def test_a_service_that_says_it_is_stuck_is_started_again(run: Run) -> None:
    """Three times in a row, after it was up."""
    thread, root = start_and_watch(run)
    httpx.post(f"{root}/sick", trust_env=False)
    wait_until(lambda: "stand-in is up again" in run.said)
    run.stop(thread)
    assert any("said it is stuck" in line for line in run.said)


def test_a_service_that_says_nothing_any_more_is_started_again(run: Run) -> None:
    """Its interpreter hangs: it takes connections, and answers none."""
    run.supervisor._policy = dataclasses.replace(FAST, silent_after=3)
    thread, _root = start_and_watch(run)
    pid = run.pids[-1]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: "stand-in is up again" in run.said)
    run.stop(thread)
    assert any("does not answer any more" in line for line in run.said)


def test_a_service_that_is_busy_is_left_alone(run: Run) -> None:
    """503 for another reason, many times in a row: too many connections, draining."""
    thread, root = start_and_watch(run)
    httpx.post(f"{root}/busy", trust_env=False)

    def asked() -> int:
        return int(httpx.get(f"{root}/asked", trust_env=False).json()["asked"])

    before = asked()
    wait_until(lambda: asked() > before + 3 * FAST.sick_after)
    run.stop(thread)
    assert not any("stuck" in line for line in run.said)
    assert len(run.pids) == 1


@pytest.mark.parametrize(
    ("said", "stuck"),
    [
        (b'{"status": "stuck"}', True),
        (b'{"status": "dead"}', True),
        (b'{"status": "degraded"}', False),
        (b'{"status": "loading"}', False),
        (b'{"status": "draining"}', False),
        (b'{"error": {"message": "too many connections"}}', False),
        (b"", False),
    ],
)
def test_what_the_sidecar_says_when_it_is_stuck(
    said: bytes, stuck: bool, tmp_path: Path
) -> None:
    """Only what no waiting mends."""
    settings = load_settings(Flags(), tmp_path, {})
    is_stuck = sidecar_service(settings, PidFile(tmp_path / "pid")).is_stuck
    assert is_stuck is not None
    assert is_stuck(httpx.Response(503, content=said)) == stuck


def test_five_failed_starts_in_a_row_end_it(run: Run, tmp_path: Path) -> None:
    """A service that never comes up again is given up, with its last lines."""
    run.supervisor.start(run.service(STAND_IN_ONCE=str(tmp_path / "once")))
    thread = run.watch_in_background()
    first = run.pids[0]
    assert first is not None
    os.kill(first, signal.SIGKILL)
    thread.join(120.0)
    assert not thread.is_alive()
    assert run.failure is not None
    assert "5 starts in a row" in str(run.failure)
    assert "cannot start a second time" in run.failure.tail
    assert len([pid for pid in run.pids if pid is not None]) == 6


def test_only_failed_starts_in_a_row_count(run: Run, tmp_path: Path) -> None:
    """Twice three failed ones, each time before one that came up, do not end it."""
    service = run.service(STAND_IN_EVERY_FOURTH=str(tmp_path / "starts"))
    run.supervisor.start(service)
    thread = run.watch_in_background()
    for num_up in (1, 2):
        pid = [pid for pid in run.pids if pid is not None][-1]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda n=num_up: run.said.count("stand-in is up again") == n, 60)
    run.stop(thread)
    assert run.failure is None
    assert (tmp_path / "starts").stat().st_size == 9


def test_pauses_double_up_to_a_limit() -> None:
    """The pause before a restart grows from 0.5 s to 15 s."""
    policy = RestartPolicy()
    pauses = [policy.pause_s(num_failed) for num_failed in range(7)]
    assert pauses == [0.5, 1, 2, 4, 8, 15, 15]


def test_all_services_stop_together() -> None:
    """Leaving the supervisor ends every service, by TERM."""
    run = Run()
    with run.supervisor:
        run.supervisor.start(run.service())
        run.supervisor.start(run.service())
    pids = [pid for pid in run.pids if pid is not None]
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


def test_a_stubborn_service_is_killed_in_the_end() -> None:
    """A service that ignores TERM is killed when its time to drain is over."""
    run = Run(stop_wait_s=0.5)
    with run.supervisor:
        run.supervisor.start(run.service(STAND_IN_STUBBORN="1"))
        began = time.monotonic()
    assert time.monotonic() - began >= 0.5
    assert run.pids[0] is not None
    assert not is_running(run.pids[0])


def test_a_second_signal_kills_at_once() -> None:
    """Asking twice to stop does not wait for a service that is draining."""
    run = Run(stop_wait_s=3600.0)
    with run.supervisor:
        run.supervisor.start(run.service(STAND_IN_STUBBORN="1"))
        run.supervisor.request_stop()
        threading.Timer(0.3, run.supervisor.request_stop).start()
    assert run.supervisor.was_killed
    assert run.pids[0] is not None
    assert not is_running(run.pids[0])


def test_output_drives_no_terminal(run: Run) -> None:
    """What clients send stands in it: colours are left, and nothing else."""
    text = "\x1b[31mred\x1b[0m \x1b[2J\x1b]52;c;eA==\x07 a\tb \x9b2J \u202e"
    code = f"import time; print({text!r}, flush=True); time.sleep(600)"
    service = dataclasses.replace(
        run.service(), command=(sys.executable, "-c", code),
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    child = Child(service, run.said.append)
    wait_until(lambda: run.said)
    child.kill()
    (line,) = run.said
    assert line == (
        "stand-in | \x1b[31mred\x1b[0m \\x1b[2J\\x1b]52;c;eA==\\x07 a\tb "
        "\\x9b2J \\u202e"
    )
