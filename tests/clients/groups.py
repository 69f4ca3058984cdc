"""OpenClaw's gateway in a group chat, its Bot API being a stand-in on loopback."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from testkit.proxy import free_port
from tests.clients.agents import openclaw_config, openclaw_env
from tests.clients.case import TASKS, Case, Place, npm_version

_TOKEN = "123456:stand-in"
_BOT = {"id": 123456, "is_bot": True, "first_name": "Claw", "username": "claw_bot"}
_GROUP = {"id": -1001234567890, "type": "supergroup", "title": "Build room"}
_FIXED_ANSWERS: dict[str, Any] = {
    "getMe": {**_BOT, "can_join_groups": True, "can_read_all_group_messages": True},
    "getChat": _GROUP,
    "getChatMember": {"user": _BOT, "status": "administrator"},
    "getMyCommands": [],
    "getChatAdministrators": [],
    "getWebhookInfo": {
        "url": "", "has_custom_certificate": False, "pending_update_count": 0,
    },
}  # fmt: skip
_ANSWER_S = 300.0  # a busy machine; 15 s are usual
_START_S = 300.0
_POLL_S = 5.0


class Channel(ThreadingHTTPServer):
    """Speaks as much of the Bot API as the gateway asks for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.said: list[str] = []
        self.calls: list[str] = []
        self._updates: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._num_messages = 4000

    @property
    def url(self) -> str:
        """Its root."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def post(self, sender: tuple[int, str], text: str, *, direct: bool = False) -> None:
        """Someone writes; in the group unless `direct`."""
        person = {"id": sender[0], "is_bot": False, "first_name": sender[1]}
        chat = {**person, "type": "private"} if direct else _GROUP
        message = {**self._stamp(), "from": person, "chat": chat, "text": text}
        if text.startswith("@claw_bot"):
            entity = {"type": "mention", "offset": 0, "length": len("@claw_bot")}
            message["entities"] = [entity]
        with self._news:
            number = 900 + len(self._updates)
            self._updates.append({"update_id": number, "message": message})
            self._news.notify_all()

    def updates(self, offset: int, wait_s: float) -> list[dict[str, Any]]:
        """What came since; waits for something."""

        def fresh() -> list[dict[str, Any]]:
            return [u for u in self._updates if u["update_id"] >= offset]

        with self._news:
            self._news.wait_for(lambda: bool(fresh()), min(wait_s, _POLL_S))
            return fresh()

    def answer(self, method: str, given: dict[str, Any]) -> Any:
        """The result of a Bot API method."""
        with self._news:
            self.calls.append(method)
            self._news.notify_all()
        if method == "getUpdates":
            wait_s = float(given.get("timeout") or 0)
            return self.updates(int(given.get("offset") or 0), wait_s)
        if method.startswith(("sendMessage", "editMessage", "sendRich")):
            return self._take(given)
        return _FIXED_ANSWERS.get(method, True)

    def _take(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the bot said."""
        text = str(given.get("text") or json.dumps(given))
        with self._news:
            self.said.append(text)
            self._news.notify_all()
        chat = {**_GROUP, "id": given.get("chat_id")}
        return {**self._stamp(), "from": _BOT, "chat": chat, "text": text}

    def wait_for(self, words: str, since: int) -> bool:
        """Whether the bot says that within the time."""
        with self._news:
            return self._news.wait_for(
                lambda: any(words in text for text in self.said[since:]), _ANSWER_S
            )

    def wait_polled(self) -> bool:
        """Whether the gateway listens within the time."""
        with self._news:
            return self._news.wait_for(lambda: "getUpdates" in self.calls, _START_S)

    def _stamp(self) -> dict[str, int]:
        with self._news:
            self._num_messages += 1
            return {"message_id": self._num_messages, "date": int(time.time())}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Channel

    def log_message(self, *_arguments: Any) -> None:
        pass

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        try:
            given = json.loads(raw) if raw else {}
        except ValueError:
            given = {"text": raw.decode("utf-8", "replace")}
        method = self.path.split("?")[0].rsplit("/", 1)[-1]
        result = self.server.answer(method, given)
        body = json.dumps({"ok": True, "result": result}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # it need not wait for its poll
            self.wfile.write(body)

    do_GET = do_POST = _answer  # noqa: N815


@contextlib.contextmanager
def _channel() -> Iterator[Channel]:
    channel = Channel()
    thread = threading.Thread(target=channel.serve_forever, daemon=True)
    thread.start()
    try:
        yield channel
    finally:
        channel.shutdown()
        channel.server_close()


@contextlib.contextmanager
def _gateway(place: Place, wire: str, channel: Channel) -> Iterator[None]:
    telegram = {
        "enabled": True, "botToken": _TOKEN, "apiRoot": channel.url,
        "dmPolicy": "open", "allowFrom": ["*"], "groupPolicy": "open",
        "groups": {"*": {"requireMention": True}}, "streaming": {"mode": "off"},
        "joinIntro": False, "network": {"dangerouslyAllowPrivateNetwork": True},
    }  # fmt: skip
    owner = {
        "agentId": "main",
        "match": {"channel": "telegram", "accountId": "default"},
    }
    config = openclaw_config(place, wire)
    config |= {"channels": {"telegram": telegram}, "bindings": [owner]}
    path = place.home / ".openclaw/openclaw.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(config, indent=1))
    command = [str(place.binary("openclaw", "openclaw")), "gateway", "--port"]
    with (place.folder / "calls.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, str(free_port()), "--verbose"], cwd=place.project,
            env=place.env(openclaw_env(place)), stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


_ANN, _BOB = (1001, "Ann Lee"), (1002, "Bob")
_HERON, _RESULT, _FIXED = (
    "The secret word is heron",
    "result.txt now holds",
    "prints OK",
)
# Who writes what, where; what the bot is to say. Without an answer: room talk.
_TALK: tuple[tuple[tuple[int, str], str, str | None, bool], ...] = (
    (_ANN, TASKS[1], _HERON, False),
    (_BOB, "I had lunch already, what about you?", None, False),
    (_BOB, TASKS[2], _RESULT, False),
    (_ANN, TASKS[3], _FIXED, False),
    (_ANN, "The build is green now.", None, False),
    (_BOB, "This is remark 11: just note it.", "Noted 11", False),
    (_ANN, TASKS[1], _HERON, False),
    (_ANN, "This is remark 12: just note it.", "Noted 12", True),
    (_BOB, TASKS[2], _RESULT, False),
    (_ANN, "This is remark 13: just note it.", "Noted 13", False),
    (_BOB, "Bob here, back from lunch.", None, False),
    (_BOB, TASKS[3], _FIXED, False),
    (_ANN, "This is remark 14: just note it.", "Noted 14", False),
    (_ANN, TASKS[1], _HERON, True),
)


def group(wire: str) -> Any:
    """A room where two people talk, ask the bot, and write to it alone."""

    def run(place: Place) -> list[str]:
        wrong = []
        with _channel() as channel, _gateway(place, wire, channel):
            if not channel.wait_polled():
                return ["the gateway did not ask for updates"]
            for sender, text, wanted, direct in _TALK:
                since = len(channel.said)
                mention = "" if direct or wanted is None else "@claw_bot "
                channel.post(sender, mention + text, direct=direct)
                if wanted is None:
                    time.sleep(2)  # the room's own talk, which nobody answers
                elif not channel.wait_for(wanted, since):
                    wrong.append(f"no {wanted!r} after {text[:40]!r}")
                    wrong.append(
                        f"said {channel.said[since:]} calls {channel.calls[-5:]}"
                    )
                    break
        return wrong

    return run


CASES = [
    Case(
        f"group-{wire}", "OpenClaw, group", wire,
        npm_version("openclaw", "openclaw"), group(wire), appends=False,
    )
    for wire in ("chat", "messages", "responses")
]  # fmt: skip
