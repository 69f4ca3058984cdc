"""`litellm-mlx doctor`: each planted fault is found, and its line mends it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from litellm_mlx.launcher.doctor import main as doctor
from litellm_mlx.launcher.doctor.finding import Finding
from litellm_mlx.launcher.doctor.set_up import check_set_up
from litellm_mlx.launcher.ports import PidFile, find_holder
from litellm_mlx.launcher.settings import Flags, load_settings
from sidecar.engine.loading.model_place import BUILTIN_DIR
from testkit.proxy import free_port
from testkit.servers import running_sidecar

REPO = Path(__file__).parents[2]


class Machine:
    """A folder to start from, a home, and free ports."""

    def __init__(self, root: Path) -> None:
        self.folder, self.home = root / "work", root / "home"
        self.folder.mkdir()
        self.home.mkdir()
        self.port, self.proxy_port = free_port(), free_port()
        self.packages = root / "packages"
        self.lines: dict[str, str] = {}

    @property
    def env_file(self) -> Path:
        return self.folder / ".env"

    def write_env(self) -> None:
        text = "".join(f"{name}={value}\n" for name, value in self.lines.items())
        self.env_file.write_text(text)
        self.env_file.chmod(0o600)

    def model(self, name: str = "model") -> Path:
        """A whole model of its user's, which is the default one."""
        folder = self.folder / name
        shutil.copytree(BUILTIN_DIR, folder)
        self.lines["MODEL_PATH"] = str(folder)
        self.write_env()
        return folder

    def config(self, text: str) -> None:
        (self.folder / "litellm_config.yaml").write_text(text)

    def client(self, path: str, value: Any) -> None:
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))

    def examine(self, *flags: str) -> list[dict[str, str]]:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "HF_HOME": str(self.home / "hub"),
            "PYTHONPATH": os.pathsep.join([str(self.packages), str(REPO)]),
            "MLX_CACHE_HOME": str(self.home / "cache"),
            "LITELLM_MLX_FOLDER": str(self.folder),
            "MLX_PORT": str(self.port),
            "PROXY_PORT": str(self.proxy_port),
        }
        done = subprocess.run(
            [sys.executable, "-m", "litellm_mlx.launcher", "doctor", "--json", *flags],
            cwd=self.folder, env=env, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        found: list[dict[str, str]] = json.loads(done.stdout)
        is_bad = any(one["state"] == "bad" for one in found)
        assert done.returncode == int(is_bad), done.stderr
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@dataclass(frozen=True, slots=True)
class Fault:
    """
    Something that is wrong.

    Args:
        plant: makes it so. words: of the finding. mend: what its line says to do.
    """

    plant: Callable[[Machine], None]
    words: str
    mend: Callable[[Machine], None]
    line: str


def _setting(name: str, value: str) -> Callable[[Machine], None]:
    def plant(machine: Machine) -> None:
        machine.lines[name] = value
        machine.write_env()

    return plant


def _without(name: str) -> Callable[[Machine], None]:
    def mend(machine: Machine) -> None:
        del machine.lines[name]
        machine.write_env()

    return mend


def _config(text: str) -> Callable[[Machine], None]:
    return lambda machine: machine.config(text)


def _package(name: str, version: str) -> Callable[[Machine], None]:
    def plant(machine: Machine) -> None:
        folder = machine.packages / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)

    return plant


def _no_packages(machine: Machine) -> None:
    shutil.rmtree(machine.packages)


def _lost_shard(machine: Machine) -> None:
    folder = machine.model()
    shards = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))


def _whole_again(machine: Machine) -> None:
    (machine.folder / "model" / "model.safetensors.index.json").unlink()


def _remove(name: str) -> Callable[[Machine], None]:
    return lambda machine: (machine.model() / name).unlink()


def _restore(name: str) -> Callable[[Machine], None]:
    def mend(machine: Machine) -> None:
        shutil.copy(BUILTIN_DIR / name, machine.folder / "model" / name)

    return mend


def _no_template(machine: Machine) -> None:
    folder = machine.model()
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("chat_template", None)
    file.write_text(json.dumps(config))


def _broken_off(machine: Machine) -> None:
    part = machine.home / "hub/hub/models--a--b/blobs/abc.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 1000)


def _readable(machine: Machine) -> None:
    machine.write_env()
    machine.env_file.chmod(0o644)


def _stray(machine: Machine) -> None:
    machine.config("model_list: []\n")
    (machine.folder / "litellm_mlx").mkdir()


def _gguf(machine: Machine) -> None:
    file = machine.folder / "model.gguf"
    file.write_bytes(b"GGUF")
    _setting("MODEL_PATH", str(file))(machine)


def _claude(**env: str) -> Callable[[Machine], None]:
    def plant(machine: Machine) -> None:
        url = f"http://127.0.0.1:{machine.proxy_port}"
        filled = {name: value.format(url=url) for name, value in env.items()}
        machine.client(".claude/settings.json", {"env": filled})

    return plant


def _no_client(machine: Machine) -> None:
    shutil.rmtree(machine.home / ".claude")


_FALLBACK = """
model_list:
  - model_name: local
    litellm_params: {model: mlx/local}
router_settings:
  fallbacks: [{local: [%s]}]
"""
_CLOUD = """
  - model_name: cloud
    litellm_params: {model: openai/x}
"""
_OTEL = """
litellm_settings:
  callbacks: ["otel"]
  turn_off_message_logging: %s
"""

FAULTS = {
    "unknown setting": Fault(
        _setting("PROMT_CACHE_TTL_SECONDS", "1"), "unknown setting PROMT_CACHE",
        _without("PROMT_CACHE_TTL_SECONDS"), "rename it to PROMPT_CACHE_TTL_SECONDS"),
    "value out of range": Fault(
        _setting("MAX_KV_SIZE", "7"), "MAX_KV_SIZE must be", _without("MAX_KV_SIZE"),
        "correct MAX_KV_SIZE"),
    "unknown kind of value": Fault(
        _setting("CACHE_PIN_POLICY", '{"nosuchkind": "stop"}'), "must be a known kind",
        _without("CACHE_PIN_POLICY"), "correct CACHE_PIN_POLICY"),
    "launcher's value": Fault(
        _setting("DRAIN_TIMEOUT_SECONDS", "x"), "DRAIN_TIMEOUT_SECONDS must be",
        _without("DRAIN_TIMEOUT_SECONDS"), "correct it in"),
    "open without a key": Fault(
        _setting("MLX_HOST", "0.0.0.0"), "lets others in",
        _setting("MLX_API_KEY", "a-long-key"), "set MLX_API_KEY"),
    "readable keys": Fault(
        _readable, "can be read by others", lambda m: m.env_file.chmod(0o600),
        "chmod 600"),
    "a line without an end": Fault(
        _setting("MLX_API_KEY", '"a-long-key'), "line 1 of", _without("MLX_API_KEY"),
        "mend line 1"),
    "no such model": Fault(
        _setting("MODEL_PATH", "/nonexistent/model"), "there is no such folder",
        _without("MODEL_PATH"), "correct MODEL_PATH"),
    "no hub id": Fault(
        _setting("MODEL_PATH", "llama3.2:3b"), "it is no hub id",
        _without("MODEL_PATH"), "correct MODEL_PATH"),
    "not to be had": Fault(
        _setting("MODEL_PATH", "org/nowhere"), "org/nowhere is not here",
        _without("MODEL_PATH"), ""),
    "GGUF": Fault(_gguf, "GGUF", _without("MODEL_PATH"), "MLX model"),
    "lost shard": Fault(
        _lost_shard, "model-2.safetensors", _whole_again, "fetch the model again"),
    "cut weights": Fault(
        lambda m: os.truncate(m.model() / "model.safetensors", 5000),
        "model.safetensors", _restore("model.safetensors"), "fetch the model again"),
    "no config": Fault(
        _remove("config.json"), "config.json", _restore("config.json"), "fetch"),
    "no tokenizer": Fault(
        _remove("tokenizer.json"), "tokenizer", _restore("tokenizer.json"), ""),
    "tokenizer that is none": Fault(
        lambda m: (m.model() / "tokenizer.json").write_text("{}"), "is not what",
        _restore("tokenizer.json"), "fetch that file"),
    "template that is none": Fault(
        lambda m: (m.model() / "chat_template.jinja").write_text("{% foo %}"),
        "chat_template.jinja, line 1:", _restore("chat_template.jinja"), "fetch that"),
    "no template": Fault(
        _no_template, "no chat template", _restore("chat_template.jinja"),
        "copy chat_template.jinja"),
    "too large": Fault(
        _setting("MAX_PROCESS_MEMORY", "1MB"), "loaded: its weights",
        _without("MAX_PROCESS_MEMORY"),
        "choose a smaller model"),
    "broken off download": Fault(
        _broken_off, "not complete", lambda m: shutil.rmtree(m.home / "hub"),
        "start that model again"),
    "YAML": Fault(
        _config("model_list: [\n"), "litellm_config.yaml", _config("model_list: []\n"),
        "correct"),
    "lost fallback": Fault(
        _config(_FALLBACK % "cloud"), "a fallback names cloud",
        _config((_FALLBACK % "cloud").replace("router", _CLOUD[1:] + "router", 1)),
        "add it to model_list"),
    "stray plugin": Fault(
        _stray, "in our plugin's place",
        lambda m: (m.folder / "litellm_mlx").rename(m.folder / "mine"),
        "rename that folder"),
    "telling traces": Fault(
        _config(_OTEL % "false"), "OpenTelemetry", _config(_OTEL % "true"),
        "turn_off_message_logging: true"),
    "old package": Fault(
        _package("orjson", "0.1"), "orjson 0.1 is installed", _no_packages,
        "install_and_run.py"),
    "old LiteLLM": Fault(
        _package("litellm", "1.20.0"), "LiteLLM 1.20.0", _no_packages,
        "install_and_run.py"),
    "name clash": Fault(
        _package("sidecar", "1.0"), "import name", _no_packages,
        "pip uninstall sidecar"),
    "client sent elsewhere": Fault(
        _claude(ANTHROPIC_BASE_URL="http://127.0.0.1:9"), "sends Claude Code to",
        _no_client, "litellm-mlx launch claude"),
    "client without a context": Fault(
        _claude(ANTHROPIC_BASE_URL="{url}"), "assumes a million tokens",
        _claude(ANTHROPIC_BASE_URL="{url}", CLAUDE_CODE_MAX_CONTEXT_TOKENS="32768"),
        "litellm-mlx launch claude"),
}  # fmt: skip


def faults(found: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    return [one for one in found if one["state"] != "ok"]


def test_on_a_sound_machine_it_finds_nothing(machine: Machine) -> None:
    """With a model and a config of the user's own, too."""
    assert faults(machine.examine()) == []
    machine.model()
    shutil.copy(REPO / "litellm_config.yaml", machine.folder)
    assert faults(machine.examine()) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_its_line_mends_it(machine: Machine, name: str) -> None:
    fault = FAULTS[name]
    fault.plant(machine)
    found = faults(machine.examine())
    own = [one for one in found if fault.words in one["found"]]
    assert own, found
    assert fault.line in own[0]["mend"]
    assert own[0]["mend"]
    fault.mend(machine)
    assert faults(machine.examine()) == []


@contextmanager
def _listening(port: int) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", port)):
        yield


def test_ports_that_a_stranger_holds(machine: Machine) -> None:
    """Whose they are, and how to do without."""
    for port, flag in ((machine.port, "--port"), (machine.proxy_port, "--proxy-port")):
        with _listening(port):
            (found,) = faults(machine.examine())
        assert f"port {port}" in found["found"]
        assert f"pid {os.getpid()}" in found["found"]
        assert flag in found["mend"]
    assert faults(machine.examine()) == []


def test_a_server_of_an_earlier_run_is_ended(machine: Machine) -> None:
    """With `--fix`; it is ours by its pid file."""
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', "
        f"{machine.port})); time.sleep(600)"
    )
    left_over = subprocess.Popen([sys.executable, "-c", code, "sidecar"])
    file = PidFile(machine.home / "cache" / "run" / f"sidecar-{machine.port}.pid")
    try:
        gone = subprocess.Popen(["true"])
        gone.wait()
        file.path.write_text(f"{left_over.pid}\n{gone.pid}\n")
        while not faults(found := machine.examine()):
            pass
        (found_one,) = faults(found)
        assert found_one["mend"] == f"kill {left_over.pid}"
        machine.examine("--fix")
        assert left_over.wait(60) != 0
        assert faults(machine.examine()) == []
    finally:
        left_over.kill()
        left_over.wait()
        file.close()


def test_a_strangers_process_is_not_ended(machine: Machine) -> None:
    """Though its pid stands in a file of ours: it may have passed to it since."""
    file = PidFile(machine.home / "cache" / "run" / f"sidecar-{machine.port}.pid")
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', "
        f"{machine.port})); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, "\x1b[31mred"])
    try:
        file.path.write_text(f"{other.pid}\n{os.getpid()}\n")
        while not faults(found := machine.examine("--fix")):
            pass
        assert faults(found)[0]["state"] == "bad"
        assert other.poll() is None
        assert "\x1b" not in str(Finding("ports", "bad", faults(found)[0]["found"]))
    finally:
        other.kill()
        other.wait()
        file.close()


def test_a_pid_file_that_a_full_disk_left_is_no_fault(machine: Machine) -> None:
    """Nothing stands in it: the port is a stranger's."""
    file = PidFile(machine.home / "cache" / "run" / f"sidecar-{machine.port}.pid")
    file.path.write_bytes(b"garbage\xff\n")
    with _listening(machine.port):
        (found,) = faults(machine.examine())
    file.close()
    assert "is held by" in found["found"]


def test_a_frozen_server_is_no_running_one(machine: Machine) -> None:
    """Its launcher lives, and it takes connections."""
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', "
        f"{machine.port})); print(flush=True); time.sleep(600)"
    )
    file = PidFile(machine.home / "cache" / "run" / f"sidecar-{machine.port}.pid")
    command = [sys.executable, "-c", code, "sidecar"]
    frozen = subprocess.Popen(command, stdout=subprocess.PIPE)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)", "litellm_mlx"]
    launcher = subprocess.Popen(sleep)
    try:
        assert frozen.stdout is not None
        frozen.stdout.readline()
        file.path.write_text(f"{frozen.pid}\n{launcher.pid}\n")
        alone = faults(machine.examine())  # as with --no-proxy
        other = machine.home / "cache" / "run" / f"litellm-{machine.proxy_port}.pid"
        other.write_text(f"\n{launcher.pid}\n")
        found = faults(machine.examine())
    finally:
        for process in (frozen, launcher):
            process.kill()
            process.communicate()
        file.close()
    assert not any("does not listen" in one["found"] for one in alone)
    said = {one["found"]: one["mend"] for one in found}
    (mend,) = [said[one] for one in said if "does not answer within" in one]
    assert "litellm-mlx stop" in mend
    assert any("litellm does not listen" in one for one in said)


@contextmanager
def _launched(
    machine: Machine, port: int, code: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A sidecar by its pid file; its launcher, which holds that file's lock."""
    file = PidFile(machine.home / "cache" / "run" / f"sidecar-{port}.pid")
    launcher = subprocess.Popen([sys.executable, "-c", code, "litellm_mlx sidecar"])
    try:
        assert file.lock()
        file.path.write_text(f"{launcher.pid}\n{launcher.pid}\n")
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()
        file.close()


def test_a_launcher_that_is_stopped(machine: Machine) -> None:
    """Ctrl-Z: its servers answer, and none of them would come back."""
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', "
        f"{machine.port})); time.sleep(600)"
    )
    with _launched(machine, machine.port, code) as launcher:
        while not find_holder(machine.port).pid:
            pass
        os.kill(launcher.pid, signal.SIGSTOP)
        os.waitpid(launcher.pid, os.WUNTRACED)
        found = faults(machine.examine())
        (stopped,) = [one for one in found if "is stopped" in one["found"]]
        assert f"kill -CONT {launcher.pid}" in stopped["mend"]
        os.kill(launcher.pid, signal.SIGCONT)
        os.waitpid(launcher.pid, os.WCONTINUED)
        found = faults(machine.examine())
        assert not any("is stopped" in one["found"] for one in found)


def test_a_start_on_another_port_than_the_settings_say(machine: Machine) -> None:
    """As after a change of MLX_PORT."""
    before = free_port()
    with _launched(machine, before, "import time; time.sleep(600)"):
        (found,) = faults(machine.examine())
    assert f"runs on {before}, and the settings say {machine.port}" in found["found"]
    assert f"MLX_PORT={before}" in found["mend"]
    assert faults(machine.examine()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"RATE_LIMIT_RPM": 9999999}', "on the admin page"), ("{", "settings.json")],
)
def test_a_value_that_the_page_saved(machine: Machine, text: str, words: str) -> None:
    """Its place is told, which is not `.env`."""
    file = machine.home / "cache" / "settings.json"
    file.parent.mkdir()
    file.write_text(text)
    (found,) = [f for f in faults(machine.examine()) if f["group"] == "settings"]
    assert words in found["mend"]
    assert ".env" not in found["mend"]


def test_a_hub_that_the_env_file_names(machine: Machine) -> None:
    """Its library reads the environment alone, and so does what doctor asks."""
    cache = machine.home / "elsewhere" / "hub" / "models--org--name"
    shutil.copytree(BUILTIN_DIR, cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    machine.lines |= {"MODEL_PATH": "org/name", "HF_HUB_OFFLINE": "1"}
    machine.write_env()
    (found,) = faults(machine.examine())
    assert found["mend"] == "start once without HF_HUB_OFFLINE"
    machine.lines["HF_HUB_CACHE"] = str(machine.home / "elsewhere" / "hub")
    machine.write_env()
    assert faults(machine.examine()) == []
    (cache / "snapshots" / "abc" / "model.safetensors").unlink()
    (found,) = faults(machine.examine())
    assert "org/name is not here" in found["found"]


def test_an_admin_token_that_was_removed(machine: Machine) -> None:
    machine.write_env()
    settings = {"MLX_PORT": str(machine.port), "ADMIN_TOKEN": "its-token"}
    with running_sidecar(settings):
        found = faults(machine.examine())
    (wrong,) = [one for one in found if one["group"] == "keys"]
    assert "wants an ADMIN_TOKEN, and none is set" in wrong["found"]


def test_a_check_that_never_ends_is_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them share the seconds."""
    machine.write_env()
    monkeypatch.setattr(doctor, "_LIMIT_S", 0.2)
    ended = threading.Event()
    monkeypatch.setattr(doctor, "check_machine", lambda _limit: ended.wait())
    monkeypatch.setattr(doctor, "check_running", lambda _settings: ended.wait())
    monkeypatch.setattr(doctor, "_model_half", lambda _folder, _settings: [])
    found = [*doctor.examine(machine.folder, machine.home)]
    ended.set()
    late = [one.group for one in found if "not looked at within" in one.found]
    assert {"machine", "self-test"} <= set(late)


def test_a_key_that_the_running_server_does_not_know(machine: Machine) -> None:
    machine.lines["MLX_API_KEY"] = "not-its-key"
    machine.write_env()
    settings = {"MLX_PORT": str(machine.port), "MLX_API_KEY": "its-key"}
    with running_sidecar(settings):
        found = faults(machine.examine())
    (wrong,) = [one for one in found if one["group"] == "keys"]
    assert "MLX_API_KEY is not the key" in wrong["found"]


def test_what_can_be_mended_is(machine: Machine) -> None:
    _readable(machine)
    found = machine.examine("--fix")
    assert any(one["found"].startswith("mended") for one in found)
    assert machine.env_file.stat().st_mode & 0o777 == 0o600


def test_a_running_sidecar_is_asked(machine: Machine, tmp_path: Path) -> None:
    """Its self-test, and a reuse that went wrong."""
    with running_sidecar({"MLX_PORT": str(machine.port)}) as app:
        with app.pool.lease("") as resident:
            resident.engine.store.switched_off.add("restore")
            resident.engine.selftest["restore"] = "failed"
        found = machine.examine()
    ours = [one for one in faults(found) if one["group"] == "self-test"]
    assert ours
    assert "mlx-sidecar selftest" in ours[0]["mend"]


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_another_python(tmp_path: Path, version: tuple[int, int]) -> None:
    settings = load_settings(Flags(), tmp_path, {"MLX_CACHE_HOME": str(tmp_path)})
    (found,) = check_set_up(settings, version)
    assert (found.state, "3.11 to 3.13" in found.found) == ("bad", True)
