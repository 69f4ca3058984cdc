"""A conversation over restarts of the process: values, thinking, and forgetting."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from sidecar.kv.disk.tensor_file import read_header, read_tensor
from testkit.kept_kv import disk_settings, slots
from testkit.process import sidecar_process
from testkit.tiny_models import BUILTIN

Message = dict[str, Any]
SYSTEM = "You help.\nCurrent time: 2026-11-23 {clock}\n" + "word " * 300
QUESTIONS = ("Who are you?", "What can you do?", "Is that all?", "And then?")
PHRASE = "heliotrope"
LINE = 83  # bytes of a tombstone


@contextmanager
def process(
    folder: Path, root: Path, *, is_killed: bool = False, **more: str
) -> Iterator[str]:
    """A sidecar in a process of its own; its URL."""
    folder.mkdir(exist_ok=True)
    settings = {
        "MODEL_DIR": "none", "CACHE_SELFTEST": "off",
        **disk_settings(root, BUILTIN, **more),
    }  # fmt: skip
    settings.pop("MODEL_PATH")  # the built-in one
    with sidecar_process(folder, settings) as running:
        yield running.url
        if is_killed:
            running.process.kill()


class Talk:
    """A client that thinks nothing of restarts."""

    def __init__(self, form: str, *, drops_thinking: bool) -> None:
        self.form = form
        self.drops_thinking = drops_thinking
        self.messages: list[Message] = []

    def turn(self, url: str, number: int) -> tuple[int, int, str]:
        """The next question; tokens of its prompt, those not computed, pins."""
        self.messages.append({"role": "user", "content": QUESTIONS[number]})
        system = SYSTEM.format(clock=f"10:{number:02}")
        return getattr(self, f"_{self.form}")(url, system)  # type: ignore[no-any-return]

    def _chat(self, url: str, system: str) -> tuple[int, int, str]:
        body = {
            "model": "local", "max_tokens": 300, "temperature": 0, "session_id": "one",
            "messages": [{"role": "system", "content": system}, *self.messages],
            "chat_template_kwargs": {"enable_thinking": True},
        }  # fmt: skip
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        told = answer.json()
        message = told["choices"][0]["message"]
        if self.drops_thinking:
            message = {"role": "assistant", "content": message["content"]}
        self.messages.append(message)
        usage = told["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], cached, answer.headers["x-mlx-pinned"]

    def _anthropic(self, url: str, system: str) -> tuple[int, int, str]:
        body = {
            "model": "local", "max_tokens": 300, "temperature": 0, "system": system,
            "messages": self.messages,
            "thinking": {"type": "enabled", "budget_tokens": 200},
        }  # fmt: skip
        answer = httpx.post(f"{url}/v1/messages", json=body, timeout=120)
        told = answer.json()
        self.messages.append({"role": "assistant", "content": told["content"]})
        usage = told["usage"]
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, answer.headers["x-mlx-pinned"]


@pytest.mark.parametrize(
    ("form", "drops_thinking"),
    [("chat", True), ("chat", False), ("anthropic", False)],
    ids=["thinking dropped", "thinking echoed", "signed thinking"],
)
def test_it_goes_on_as_if_nothing_had_been(
    form: str, drops_thinking: bool, tmp_path: Path
) -> None:
    """Prompts, pins, own words: each turn as in a process that never ended."""
    whole = Talk(form, drops_thinking=drops_thinking)
    for root in ("whole-kv", "kv"):  # the same marks of notes, which are of a root
        (tmp_path / root).mkdir()
        (tmp_path / root / "secret").write_bytes(bytes(range(32)))
    with process(tmp_path / "whole", tmp_path / "whole-kv") as url:
        expected = [whole.turn(url, number) for number in range(3)]
    assert any(pins for _, _, pins in expected)
    broken = Talk(form, drops_thinking=drops_thinking)
    found = []
    for number in range(3):
        with process(tmp_path / "broken", tmp_path / "kv") as url:
            found.append(broken.turn(url, number))
    for (length, cached, pins), as_ever in zip(found, expected, strict=True):
        assert (length, pins) == (as_ever[0], as_ever[2])
        assert cached >= as_ever[1] - 64
    assert [m["content"] for m in broken.messages if m["role"] == "user"]
    said = [_text(m) for m in broken.messages]
    assert said == [_text(m) for m in whole.messages]


def _text(message: Message) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def files_with(root: Path, ids: list[int], text: str) -> list[Path]:
    """Files of a root in which ids stand in a row, or a text does."""
    wanted, found = np.array(ids), []
    for file in slots(root):
        with file.open("rb") as data:
            tokens = read_tensor(data, read_header(data), "tokens")
        windows = np.lib.stride_tricks.sliding_window_view(tokens, len(ids))
        if (windows == wanted).all(axis=1).any():
            found.append(file)
    return found + files_that_say(root, text)


def files_that_say(root: Path, text: str) -> list[Path]:
    """Files of a root in which a text stands, as JSON has it."""
    wanted = json.dumps(text, ensure_ascii=False)[1:-1].encode()
    found = []
    for file in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # it was replaced meanwhile
            if file.is_file() and wanted in file.read_bytes():
                found.append(file)
    return found


def log_size(root: Path) -> int:
    """Bytes of the tombstones of all models."""
    return sum(file.stat().st_size for file in root.rglob("tombstones.log"))


def planted_ids() -> list[int]:
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    return list(tokenizer.encode(f" {PHRASE}", add_special_tokens=False).ids)


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_turn_that_was_dropped_stays_so(tmp_path: Path, *, is_killed: bool) -> None:
    """
    Asked again for two answers, both as before: which one the client goes on from
    nobody knows, and none is put back, in this process or in the next.
    """
    root = tmp_path / "kv"
    question = [{"role": "user", "content": f"Who are you? {'word ' * 100}"}]

    def ask(url: str, messages: list[Message], **more: Any) -> dict[str, Any]:
        body = {
            "model": "local", "max_tokens": 300, "temperature": 0, "session_id": "one",
            "messages": messages,
            "chat_template_kwargs": {"enable_thinking": True}, **more,
        }  # fmt: skip
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        told: dict[str, Any] = answer.json()
        return told

    def size_of_next(url: str) -> int:
        told = ask(url, goes_on, max_tokens=1)
        return int(told["usage"]["prompt_tokens"])

    with process(tmp_path / "a", root, KV_DISK_QUIET_SECONDS="0") as url:
        message = ask(url, question)["choices"][0]["message"]
        thinking = message["reasoning_content"]
        echoed = {"role": "assistant", "content": message["content"]}
        goes_on = [*question, echoed, {"role": "user", "content": "And then?"}]
        known = size_of_next(url)
        wait_until(lambda: bool(files_that_say(root, thinking)))
    often = {"KV_DISK_QUIET_SECONDS": "0"}
    with process(tmp_path / "b", root, is_killed=is_killed, **often) as url:
        assert size_of_next(url) == known
        wait_until(lambda: log_size(root) >= 2 * LINE)  # of the first turn
        before = log_size(root)
        again = ask(url, question, n=2)
        assert {c["message"]["content"] for c in again["choices"]} == {
            message["content"]
        }
        dropped = size_of_next(url)
        assert dropped < known
        if is_killed:
            wait_until(lambda: log_size(root) >= before + LINE)
    with process(tmp_path / "c", root) as url:
        assert size_of_next(url) == dropped


@pytest.mark.parametrize("when", ["at rest", "while it waits"])
def test_what_is_forgotten_does_not_come_back(when: str, tmp_path: Path) -> None:
    """Nor does a planted word stand in any file."""
    root = tmp_path / "kv"
    more = {"KV_DISK_QUIET_SECONDS": "0" if when == "at rest" else "86400"}
    body: dict[str, Any] = {
        "model": "local", "max_tokens": 5, "temperature": 0,
        "messages": [{"role": "user", "content": f"{'word ' * 200}{PHRASE} it is"}],
    }  # fmt: skip

    def cached(url: str) -> int:
        told = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    with process(tmp_path / "a", root, **more) as url:
        cached(url)
        ids = planted_ids()
        if when == "at rest":
            wait_until(lambda: bool(slots(root)))
            assert files_with(root, ids, PHRASE)
        told = httpx.post(f"{url}/admin/cache/clear", timeout=60).json()
        if when == "at rest":
            assert told["disk_slots"] == 1
            assert told["disk_bytes"] > 1000
        assert files_with(root, ids, PHRASE) == []
    assert slots(root) == []
    with process(tmp_path / "b", root, **more) as url:
        assert cached(url) == 0
        wait_until(lambda: more["KV_DISK_QUIET_SECONDS"] != "0" or bool(slots(root)))
        httpx.post(f"{url}/admin/cache/clear?disk=keep", timeout=60)
        kept = bool(slots(root))
    with process(tmp_path / "c", root, **more) as url:
        assert (cached(url) > 0) is kept


@pytest.mark.parametrize("when", ["at rest", "while it waits"])
def test_one_conversation_is_forgotten(when: str, tmp_path: Path) -> None:
    """No file holds a word of it; the other's comes back once it was used again."""
    root = tmp_path / "kv"
    more = {"KV_DISK_QUIET_SECONDS": "0" if when == "at rest" else "86400"}
    more["KV_DISK_RUN_TOKENS"] = "4096"

    def ask(url: str, session: str, text: str) -> int:
        said = [
            {"role": "system", "content": "word " * 200},
            {"role": "user", "content": f"It is {text} {'more ' * 80}"},
        ]
        body = {"model": "local", "max_tokens": 5, "temperature": 0, "messages": said,
                "session_id": session}  # fmt: skip
        told = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    with process(tmp_path / "a", root, **more) as url:
        for number, (session, text) in enumerate([("one", PHRASE), ("other", "sun")]):
            ask(url, session, text)
            if when == "at rest":
                wait_until(lambda minimum=number: len(slots(root)) > minimum)
        assert bool(files_with(root, planted_ids(), PHRASE)) is (when == "at rest")
        forget = f"{url}/admin/cache/forget"
        told = httpx.post(forget, json={"session": "one"}, timeout=60).json()
        assert told["threads"] == 1
        for word in (PHRASE, '"one"'):
            assert files_with(root, planted_ids(), word) == []
        assert ask(url, "other", "sun") > 250
    assert slots(root)
    for word in (PHRASE, '"one"'):
        assert files_with(root, planted_ids(), word) == []
    with process(tmp_path / "b", root, **more) as url:
        assert ask(url, "other", "sun") > 250
        assert 150 < ask(url, "one", PHRASE) < 250


def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_keys_and_paths_stand_in_no_file(tmp_path: Path) -> None:
    """Everything is for its owner alone."""
    root, key = tmp_path / "kv", "sk-very-secret-key-1234"
    more = {"KV_DISK_QUIET_SECONDS": "0", "MLX_API_KEY": key}
    with process(tmp_path / "a", root, **more) as url:
        body = {
            "model": "local", "max_tokens": 5,
            "messages": [{"role": "user", "content": "word " * 200}],
        }  # fmt: skip
        answer = httpx.post(
            f"{url}/v1/chat/completions", json=body, timeout=120,
            headers={"Authorization": f"Bearer {key}"},
        )  # fmt: skip
        assert answer.status_code == 200
        wait_until(lambda: bool(slots(root)))
    files = [path for path in root.rglob("*") if path.is_file()]
    for path in files:
        data = path.read_bytes()
        assert key.encode() not in data
        assert str(tmp_path).encode() not in data
        assert path.stat().st_mode & 0o777 == 0o600, path
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
