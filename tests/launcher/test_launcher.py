"""The launcher as users run it: a process with real children, stopped by signals."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

import litellm_mlx
import litellm_mlx.launcher
from litellm_mlx.identity import (
    CHALLENGE,
    PROOF,
    SECRET_NAME,
    challenge,
    new_secret,
    proof_of,
)
from litellm_mlx.launcher import __main__ as command_line
from litellm_mlx.launcher.commands import main, notices
from litellm_mlx.launcher.ports import PidFile
from litellm_mlx.launcher.services import (
    ProxyPlan,
    plan_proxy,
    proxy_service,
    sidecar_service,
)
from litellm_mlx.launcher.settings import Flags, load_settings
from testkit.launcher import Launcher
from testkit.proxy import free_port
from testkit.raw_http import eventually

REPO = Path(__file__).parents[2]
STAND_IN_GB = 3
STAND_IN = Path(__file__).with_name("stand_in_sidecar.py")
Launch = Callable[..., Launcher]
_HANDLER = """
from pathlib import Path
from litellm.integrations.custom_logger import CustomLogger
logger = CustomLogger()
Path(__file__).with_suffix(".loaded").touch()
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start launchers that are gone, with their children, after the test."""
    # The user's own path comes first, so this is what the launcher starts.
    (tmp_path / "sidecar").mkdir()
    (tmp_path / "sidecar" / "__init__.py").touch()
    shutil.copy(STAND_IN, tmp_path / "sidecar" / "__main__.py")
    launchers: list[Launcher] = []

    def start(*arguments: str, port: int | None = None, **env: str) -> Launcher:
        env["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(REPO)))
        launchers.append(Launcher(tmp_path, *arguments, port=port, **env))
        return launchers[-1]

    yield start
    for launcher in launchers:
        if launcher.process.poll() is None:
            launcher.process.terminate()
            launcher.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_both_servers_start_serve_and_stop(launch: Launch, tmp_path: Path) -> None:
    """
    LiteLLM lists the sidecar's models by all names; SIGINT ends both, code 0.

    The terminal says what is waited for, then one block; LiteLLM's advertising is not
    in it. The user's own handler beside the config is found, and takes nobody's place.
    """
    beside = tmp_path / "configured"
    beside.mkdir()
    (beside / "own_handler.py").write_text(_HANDLER)
    (beside / "dotenv.py").write_text("raise SystemExit('PLANTED')")
    config = beside / "mine.yaml"
    config.write_text("litellm_settings: {callbacks: [own_handler.logger]}")
    launcher = launch("--config", str(config))
    launcher.wait_for("Ready.")
    url = f"http://127.0.0.1:{launcher.proxy_port}"
    listed = httpx.get(f"{url}/v1/models", trust_env=False).json()
    ids = {model["id"]: model for model in listed["data"]}
    assert set(ids) == {"openai/mlx-tiny-agent", "local"}
    assert ids["local"]["max_input_tokens"] == 32768

    assert (beside / "own_handler.loaded").exists()

    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 0
    assert not is_listening(launcher.port)
    assert not is_listening(launcher.proxy_port)
    assert launcher.output.startswith("No MODEL_PATH is set")
    assert f"curl {url}/v1/chat/completions" in launcher.output
    assert "context of 32768 tokens" in launcher.output
    limit = STAND_IN_GB * (1 << 30) / 1e9
    assert f"memory   at most {limit:.1f} GB" in launcher.output
    assert "prompts  logged in ./logs (" in launcher.output
    waited = launcher.output.index("sidecar    loads the built-in model ...")
    assert waited < launcher.output.index("LiteLLM    starts ...")
    # A person reads what is done; all that was written is kept.
    assert max(len(line) for line in launcher.output.splitlines()) <= 80
    assert "Application startup complete" not in launcher.output
    log = launcher.folder / "cache" / "servers.log"
    assert "litellm INFO:     Application startup complete." in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    for chatter in ("█", "Krrish", "feedback", "is not set!", "permit_weak"):
        assert chatter not in launcher.output


def test_litellm_starts_while_the_sidecar_loads(launch: Launch) -> None:
    """It is up before the weights are there; all is ready when both are."""
    launcher = launch(STAND_IN_WEIGHTS="1")
    launcher.wait_for("LiteLLM    starts ...")
    alive = f"{launcher.url}/health/liveliness"
    assert eventually(lambda: is_listening(launcher.proxy_port), 180)
    assert eventually(lambda: httpx.get(alive, trust_env=False).is_success, 60)
    launcher.wait_for("the built-in model ... 4.4 of 17.2 GB, ")
    assert "Ready." not in launcher.output
    httpx.post(f"http://127.0.0.1:{launcher.port}/loaded", trust_env=False)
    launcher.wait_for("Ready.")
    ports = [one for one in examined(launcher) if one["group"] == "ports"]
    assert [one["state"] for one in ports] == ["ok", "ok"], ports
    launcher.process.kill()
    launcher.wait()
    ports = [one for one in examined(launcher, "--fix") if one["group"] == "ports"]
    assert all(one["found"].startswith("mended: ") for one in ports), ports
    assert len(ports) == 2
    assert eventually(lambda: not is_listening(launcher.proxy_port))


def examined(launcher: Launcher, *flags: str) -> list[dict[str, str]]:
    """What `doctor` finds of a launcher's set-up."""
    done = subprocess.run(
        [sys.executable, "-m", "litellm_mlx.launcher", "doctor", "--json", *flags],
        cwd=launcher.folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "MLX_CACHE_HOME": str(launcher.folder / "cache"),
             "PYTHONPATH": str(REPO), "MLX_PORT": str(launcher.port),
             "PROXY_PORT": str(launcher.proxy_port)},
    )  # fmt: skip
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


def test_a_sidecar_that_cannot_load_ends_litellm_as_well(launch: Launch) -> None:
    """However far that one is."""
    launcher = launch(STAND_IN_WEIGHTS="1")
    launcher.wait_for("LiteLLM    starts ...")
    pid = launcher.pid_of("sidecar", launcher.port)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait() == 1
    assert "sidecar ended by signal 9" in launcher.output
    assert not is_listening(launcher.proxy_port)


def test_a_sidecar_that_dies_comes_back(launch: Launch) -> None:
    """The sidecar is restarted when it is killed; TERM then ends all with code 0."""
    launcher = launch("--no-proxy", "--model", "some/model")
    launcher.wait_for("Ready.")
    assert "sidecar    loads some/model" in launcher.output
    pid = launcher.pid_of("sidecar", launcher.port)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    launcher.wait_for("sidecar is up again")
    launcher.process.terminate()
    assert launcher.wait() == 0
    assert not is_listening(launcher.port)
    assert launcher.pid_of("sidecar", launcher.port) is None


def test_a_sidecar_that_cannot_start_ends_it(launch: Launch, tmp_path: Path) -> None:
    """The sidecar's own words are shown when it does not come up, and the code is 1."""
    (tmp_path / "once").touch()
    launcher = launch("--no-proxy", STAND_IN_ONCE=str(tmp_path / "once"))
    assert launcher.wait() == 1
    tail = launcher.output.partition("Its last lines:")[2]
    assert "cannot start a second time" in tail


def test_a_reason_not_to_start_is_all_that_is_said(launch: Launch) -> None:
    """The sidecar's sentence once, no traceback, no last lines; code 1."""
    launcher = launch("--no-proxy", STAND_IN_FAULT="the folder is empty")
    assert launcher.wait() == 1
    assert launcher.output.count("the folder is empty") == 1
    assert "litellm-mlx: the folder is empty\n" in launcher.output
    assert "last lines" not in launcher.output


def test_a_stop_while_it_starts_is_no_success(launch: Launch) -> None:
    """Ctrl-C during a download ends all at once, with code 130."""
    launcher = launch("--no-proxy", STAND_IN_FETCHING="1")
    launcher.wait_for("stand-in starts")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 130
    assert not is_listening(launcher.port)


def test_a_second_signal_does_not_wait(launch: Launch) -> None:
    """A sidecar that will not stop is killed at the second signal, with code 1."""
    endless = {"DRAIN_TIMEOUT_SECONDS": "3600"}
    launcher = launch("--no-proxy", STAND_IN_STUBBORN="1", **endless)
    launcher.wait_for("Ready.")
    launcher.process.send_signal(signal.SIGINT)
    launcher.wait_for("stopping")
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 1
    assert not is_listening(launcher.port)


def test_what_a_killed_launcher_left_is_stopped(launch: Launch) -> None:
    """The sidecar of a launcher that was killed gives way to the next one's."""
    first = launch("--no-proxy")
    first.wait_for("Ready.")
    left_over = first.pid_of("sidecar", first.port)
    first.process.kill()
    first.wait()
    assert is_listening(first.port)
    second = launch("--no-proxy", port=first.port)
    second.wait_for("Ready.")
    assert f"left over from an earlier run (pid {left_over})" in second.output


def test_a_second_launcher_leaves_the_first_alone(launch: Launch) -> None:
    """A launcher on ports of one that runs says so and ends, stopping nothing."""
    first = launch("--no-proxy")
    first.wait_for("Ready.")
    second = launch("--no-proxy", port=first.port)
    assert second.wait() == 1
    assert "another litellm-mlx is running" in second.output
    assert is_listening(first.port)
    # What it says to do helps: the launcher ends, and its sidecar with it.
    assert f"Stop it with: kill {first.process.pid} " in second.output
    first.process.terminate()
    assert first.wait() == 0
    assert not is_listening(first.port)


KEPT_BACK = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.kill(os.getpid(), signal.SIGINT)
os.execv(sys.executable, [sys.executable, "-m", "litellm_mlx.launcher", *sys.argv[1:]])
"""


def test_a_stop_before_it_can_act_on_it_is_not_lost(tmp_path: Path) -> None:
    """As install_and_run.py hands over; no traceback out of an import."""
    env = {**os.environ, "PYTHONPATH": str(REPO), "MLX_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", KEPT_BACK, "--no-proxy", "--port", str(free_port())],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_foreign_process_on_a_port_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher does not start beside a stranger; it says who has the port."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_CACHE_HOME", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["--no-proxy", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert f"port {port}, wanted for sidecar, is held by pid {os.getpid()}" in error


def test_a_bad_setting_is_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting out of range ends with code 2 and its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROXY_PORT", "99999")
    assert main([]) == 2
    assert "PROXY_PORT must be a port 1..65535" in capsys.readouterr().err


def test_the_built_in_model_is_announced(tmp_path: Path) -> None:
    """The first lines say it is the built-in model and how to start a real one."""
    first, second, platform = notices(load_settings(Flags(), tmp_path, {}))
    assert "built-in model" in first
    assert "install_and_run.py --model lmstudio-community/GLM" in second
    assert "MLX" in platform
    chosen = load_settings(Flags(), tmp_path, {"MODEL_PATH": "some/model"})
    assert len(notices(chosen)) == 1


def test_others_get_in_only_with_a_key(tmp_path: Path) -> None:
    """Bound beyond loopback a master key is made once, and used at the next start."""
    env = {"PROXY_HOST": "0.0.0.0"}
    first = plan_proxy(load_settings(Flags(), tmp_path, env))
    second = plan_proxy(load_settings(Flags(), tmp_path, env))
    assert first is not None
    assert second is not None
    assert (first.needs_key, first.created_key) == (True, True)
    assert (second.needs_key, second.created_key) == (True, False)
    assert first.env["LITELLM_MASTER_KEY"] == second.env["LITELLM_MASTER_KEY"]
    alone = plan_proxy(load_settings(Flags(), tmp_path / "other", {}))
    assert alone is not None
    assert not alone.needs_key


def test_the_sidecar_is_started_by_this_python(tmp_path: Path) -> None:
    """The command names host, port and, if a flag did, the model."""
    settings = load_settings(Flags(model="m", port=1234), tmp_path, {"MLX_HOST": "::1"})
    service = sidecar_service(settings, PidFile(tmp_path / "pid"))
    expected = "-m sidecar --host ::1 --port 1234 --model m"
    assert service.command == (sys.executable, *expected.split())
    assert service.health_url == "http://[::1]:1234/health"


def test_a_stranger_on_the_port_is_not_taken_for_the_child(tmp_path: Path) -> None:
    """Who answers without the launcher's secret gets no key and no prompt."""
    settings = load_settings(Flags(), tmp_path, {})
    plan = plan_proxy(settings)
    assert plan is not None
    pid_file = PidFile(tmp_path / "pid")
    services = (
        sidecar_service(settings, pid_file),
        proxy_service(settings, plan, pid_file),
    )
    for service in services:
        asked = httpx.Request("GET", service.health_url, headers=challenge())
        secret = service.env[SECRET_NAME]
        for proof, is_ours in (
            (proof_of(secret, asked.headers[CHALLENGE]), True),
            (proof_of(new_secret(), asked.headers[CHALLENGE]), False),
            (proof_of(secret, "an earlier question"), False),
            ("", False),
        ):
            answer = httpx.Response(
                200, json={"status": "ok"}, headers={PROOF: proof}, request=asked
            )
            assert service.is_healthy(answer) is is_ours


def test_one_child_proves_nothing_for_another(tmp_path: Path) -> None:
    """Who has the port of one may ask the other, which answers everybody."""
    settings = load_settings(Flags(), tmp_path, {})
    plan = plan_proxy(settings)
    assert plan is not None
    pid_file = PidFile(tmp_path / "pid")
    sidecar = sidecar_service(settings, pid_file)
    proxy = proxy_service(settings, plan, pid_file)
    for service, other in ((sidecar, proxy), (proxy, sidecar)):
        asked = httpx.Request("GET", service.health_url, headers=challenge())
        relayed = {PROOF: proof_of(other.env[SECRET_NAME], asked.headers[CHALLENGE])}
        answer = httpx.Response(
            200, json={"status": "ok"}, headers=relayed, request=asked
        )
        assert not service.is_healthy(answer)


def test_both_children_are_watched_for_silence(tmp_path: Path) -> None:
    """LiteLLM never says that it is stuck; one whose event loop hangs says nothing."""
    settings = load_settings(Flags(), tmp_path, {})
    plan, pid_file = plan_proxy(settings), PidFile(tmp_path / "pid")
    assert plan is not None
    proxy = proxy_service(settings, plan, pid_file)
    assert sidecar_service(settings, pid_file).is_stuck is not None
    assert proxy.is_stuck is not None
    assert not proxy.is_stuck(httpx.Response(503))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_light_has_its_colour_under_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """The sidecar sees a pipe; whether a person reads it the launcher knows."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    settings = load_settings(Flags(), tmp_path, {})
    service = sidecar_service(settings, PidFile(tmp_path / "pid"))
    assert service.env.get("FORCE_COLOR") == ("1" if is_terminal else None)
    settings = load_settings(Flags(), tmp_path, {"FORCE_COLOR": "0"})
    service = sidecar_service(settings, PidFile(tmp_path / "pid"))
    assert service.env["FORCE_COLOR"] == "0"


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_litellm_gives_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    """glibc's allocator alone has to be told so; who knows better is not overruled."""
    monkeypatch.setattr(sys, "platform", platform)
    settings = load_settings(Flags(), tmp_path, {"MALLOC_ARENA_MAX": "5"})
    pid_file = PidFile(tmp_path / "pid")
    plan = ProxyPlan({}, settings.child_env, needs_key=False, created_key=False)
    env = proxy_service(settings, plan, pid_file).env
    assert env["MALLOC_ARENA_MAX"] == "5"
    assert ("MALLOC_TRIM_THRESHOLD_" in env) == (platform == "linux")
    # The sidecar sets its own, by other needs (sidecar/infra/malloc.py).
    assert "MALLOC_TRIM_THRESHOLD_" not in sidecar_service(settings, pid_file).env


def test_ctrl_c_while_it_imports_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupts:
        """Where Ctrl-C comes: as the module of the verbs is looked for."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "litellm_mlx.launcher.commands":
                raise KeyboardInterrupt

    monkeypatch.delattr(litellm_mlx.launcher, "commands")
    monkeypatch.delitem(sys.modules, "litellm_mlx.launcher.commands")
    monkeypatch.setattr(sys, "meta_path", [Interrupts, *sys.meta_path])
    assert command_line.main() == 130


def test_the_launcher_is_light() -> None:
    """It starts at once: neither LiteLLM nor MLX nor the sidecar is imported."""
    code = (
        "import sys, litellm_mlx.launcher.commands; "
        "print(sorted({'litellm', 'mlx', 'mlx_lm', 'sidecar'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_another_package_of_the_servers_name_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package index has a `sidecar` that is not ours."""
    settings = load_settings(Flags(model="/m"), tmp_path, {})
    before = notices(settings)
    about = tmp_path / "sidecar-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: sidecar\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told, *rest = notices(settings)
    assert rest == before
    assert "pip uninstall sidecar" in told


def test_the_version_is_the_projects() -> None:
    """As packages say it, for reports of faults."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert litellm_mlx.__version__ == project["version"]
