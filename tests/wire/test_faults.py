"""
kill -9 under load: the pair as users run it, launcher, sidecar and LiteLLM.

    FAULT_KILLS=20 pytest -m slow -n 0 -s tests/wire/test_faults.py

Three kills on each run of the suite. Every request ends in a right answer or in a clear
error, the next ones are served soon, and what comes after is as if nothing had been.
"""

import importlib.util
import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import anthropic
import httpx
import openai
import pytest
import yaml

from sidecar.app import App
from testkit.launcher import REPO, Launcher
from testkit.raw_http import eventually
from testkit.tiny_models import make_model

KILLS = int(os.environ.get("FAULT_KILLS", "20"))
DEADLINE_S = 240.0
BACK_WITHIN_S = 15.0  # on a machine that does nothing else
NUM_CLIENTS = 6
TOKENS = 120
_LIBRARIES = [importlib.import_module(name) for name in ("httpx", "httpx2")
              if importlib.util.find_spec(name)]  # fmt: skip
_CUT = tuple(library.HTTPError for library in _LIBRARIES)  # each SDK has its own
QUESTIONS = [f"question {n} " + f"about w{n} " * (40 * n + 1) for n in range(6)]


@pytest.fixture(scope="module")
def launched(app: App, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A launcher with a tiny model; `local` falls back to a cloud."""
    folder = tmp_path_factory.mktemp("faults")
    model = make_model(folder / "tiny", "hybrid")
    config = yaml.safe_load((REPO / "litellm_config.yaml").read_text())
    cloud = {"model": "openai/local", "api_base": f"{app.url}/v1", "api_key": "any"}
    config["model_list"].append({"model_name": "cloud", "litellm_params": cloud})
    config["router_settings"]["fallbacks"] = [{"local": ["cloud"]}]
    (folder / "litellm_config.yaml").write_text(yaml.safe_dump(config))
    launcher = Launcher(folder, MODEL_PATH=str(model), PREFILL_STEP_SIZE="128")
    try:
        launcher.wait_for("Ready.")
        yield launcher
    finally:
        launcher.process.terminate()
        launcher.wait()


class Clients:
    """What came of each request; by the SDKs, whole and streamed."""

    def __init__(self, launcher: Launcher) -> None:
        same: dict[str, Any] = {
            "api_key": "any", "max_retries": 0, "timeout": DEADLINE_S,
        }  # fmt: skip
        self._openai = openai.OpenAI(base_url=f"{launcher.url}/v1", **same)
        self._anthropic = anthropic.Anthropic(base_url=launcher.url, **same)
        self._ways = [self._whole, self._streamed, self._messages]
        self.outcomes = Counter[str]()
        self.served_at: list[float] = []
        self.wrong: list[str] = []
        self._expected: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._openai.close()
        self._anthropic.close()

    def learn(self) -> None:
        """What each question's answer is; greedy, so it stays so."""
        self._expected = {text: self._whole("tiny", text) for text in QUESTIONS}

    def ask(self, chance: random.Random, model: str = "tiny") -> None:
        """One request; its outcome is noted."""
        way, text = chance.choice(self._ways), chance.choice(QUESTIONS)
        started = time.monotonic()
        try:
            answer = way(model, text)
        except (openai.APIError, anthropic.APIError) as error:
            self.outcomes[f"error: {type(error).__name__}"] += 1
            if not str(error).strip():
                self.wrong.append("an error without words")
        except _CUT as error:  # the proxy died in mid-stream; it does not look whole
            self.outcomes[f"cut: {type(error).__name__}"] += 1
        else:
            self.outcomes["answered"] += 1
            self.served_at.append(time.monotonic())
            if answer != self._expected[text]:
                self.wrong.append(f"{way.__name__} said {answer[:80]!r}")
        if time.monotonic() - started > DEADLINE_S:
            self.wrong.append(f"{way.__name__} took too long")

    def _whole(self, model: str, text: str) -> str:
        completion = self._openai.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], max_tokens=TOKENS
        )
        assert completion.choices[0].finish_reason == "length"
        return _joined(completion.choices[0].message)

    def _streamed(self, model: str, text: str) -> str:
        said, finish = "", None
        chunks = self._openai.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}],
            max_tokens=TOKENS, stream=True,
        )  # fmt: skip
        with chunks:
            for choice in itertools.chain.from_iterable(c.choices for c in chunks):
                said += _joined(choice.delta)
                finish = choice.finish_reason or finish
        if finish is None:
            self.wrong.append("a stream ended without a word: it looks complete")
        return said

    def _messages(self, model: str, text: str) -> str:
        with self._anthropic.messages.stream(
            model=model, messages=[{"role": "user", "content": text}], max_tokens=TOKENS
        ) as stream:
            message = stream.get_final_message()
        if message.stop_reason is None:
            self.wrong.append("a message without a stop reason: it looks complete")
        blocks = [getattr(b, "thinking", "") or getattr(b, "text", "") for b in
                  message.content]  # fmt: skip
        return "".join(blocks)


def _joined(part: Any) -> str:
    return (getattr(part, "reasoning_content", None) or "") + (part.content or "")


@contextmanager
def load(clients: Clients, seed: int) -> Iterator[None]:
    """Clients that ask one question after the other."""
    over = threading.Event()

    def run(number: int) -> None:
        chance = random.Random(f"{seed}/{number}")
        while not over.is_set():
            clients.ask(chance)
            over.wait(chance.random() * 0.2)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(2 * DEADLINE_S)


def kill_and_recover(
    launcher: Launcher, clients: Clients, name: str, port: int, chance: random.Random
) -> float:
    """Kill a child at a random moment; seconds until a request is served again."""
    time.sleep(chance.uniform(0.5, 3.0))
    pid = launcher.pid_of(name, port)
    assert pid is not None
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    # What was under way may still end well; what begins afterwards counts.
    assert eventually(lambda: launcher.pid_of(name, port) not in (None, pid))
    again_at = time.monotonic()
    assert eventually(lambda: any(at > again_at for at in clients.served_at), 240)
    return min(at for at in clients.served_at if at > again_at) - killed_at


def run_kills(launcher: Launcher, name: str, port: int, kills: int) -> list[float]:
    """Kill a child that often; the seconds until requests were served again."""
    chance = random.Random(kills)
    with Clients(launcher) as clients:
        clients.learn()
        with load(clients, kills):
            seconds = [
                kill_and_recover(launcher, clients, name, port, chance)
                for _ in range(kills)
            ]
            before = len(clients.served_at)
            assert eventually(lambda: len(clients.served_at) > before + 12, 240)
    after = ", ".join(f"{s:.1f}" for s in seconds)
    print(f"{kills} kills of the {name}: served again after {after} s")
    print(dict(clients.outcomes))
    assert clients.wrong == []
    assert clients.outcomes["answered"] > kills
    assert sum(clients.outcomes.values()) > clients.outcomes["answered"]
    check_sound(launcher)
    return seconds


def check_sound(launcher: Launcher) -> None:
    """The state of the sidecar that came last: nothing broken, nothing held."""
    url = f"http://127.0.0.1:{launcher.port}/admin/cache"

    def report() -> Any:
        return httpx.get(url, params={"check": "1"}, timeout=120).json()

    assert report()["problems"] == []
    assert eventually(lambda: not any(row["leases"] for row in report()["tree"]))


def test_a_few_kills_of_the_sidecar(launched: Launcher) -> None:
    """The supervisor brings it back; nobody takes half an answer for a whole one."""
    run_kills(launched, "sidecar", launched.port, 3)


@pytest.mark.slow
def test_many_kills_of_the_sidecar(launched: Launcher) -> None:
    """The same at twenty random moments, and it is back soon."""
    seconds = run_kills(launched, "sidecar", launched.port, KILLS)
    assert max(seconds) <= BACK_WITHIN_S


def test_a_kill_of_the_proxy(launched: Launcher) -> None:
    """LiteLLM comes back as well; the sidecar drops what nobody waits for."""
    run_kills(launched, "litellm", launched.proxy_port, 1)


def test_the_router_falls_back_meanwhile(launched: Launcher) -> None:
    """What is asked while the sidecar is down goes to the cloud."""
    pid = launched.pid_of("sidecar", launched.port)
    assert pid is not None
    body = {"model": "local", "messages": [{"role": "user", "content": "Who are you?"}]}
    launched.process.send_signal(signal.SIGSTOP)  # nobody brings it back meanwhile
    try:
        os.kill(pid, signal.SIGKILL)
        for stream in (False, True):
            with httpx.stream(
                "POST", f"{launched.url}/v1/chat/completions",
                json={**body, "stream": stream}, timeout=240,
            ) as answer:  # fmt: skip
                assert answer.status_code == 200
                assert answer.headers["x-litellm-model-group"] == "cloud"
                assert "built-in demo model" in _text_of(answer)
    finally:
        launched.process.send_signal(signal.SIGCONT)
    assert eventually(lambda: launched.pid_of("sidecar", launched.port) != pid)


def _text_of(answer: httpx.Response) -> str:
    answer.read()
    if "event-stream" not in answer.headers["content-type"]:
        return str(answer.json()["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines()
              if line.startswith("data: {")]  # fmt: skip
    choices = itertools.chain.from_iterable(event["choices"] for event in events)
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_a_stop_lets_answers_end(app: App, tmp_path: Path, model_folder: Any) -> None:
    """SIGTERM to the launcher: running streams are drained, then all is down."""
    launcher = Launcher(
        tmp_path, MODEL_PATH=str(model_folder("dense")), DRAIN_TIMEOUT_SECONDS="240"
    )
    launcher.wait_for("Ready.")
    url = f"{launcher.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="local", messages=[{"role": "user", "content": "x"}],
            max_tokens=1500, stream=True,
        )  # fmt: skip
        next(iter(chunks))
        launcher.process.terminate()
        finish = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert finish[-1] == "length"
    assert len(finish) > 100
    assert launcher.wait() == 0
