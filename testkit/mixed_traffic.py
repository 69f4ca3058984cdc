"""
Everything at once: conversations that drift, retries, cancels, disconnects, nonsense.

Each client is a thread that picks one thing after the other. Conversations are shared,
as between an agent and its sub-agents, and begin anew when they have grown long.
"""

import itertools
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from testkit.raw_http import CLOSED, Answer, connect, exchange, request
from testkit.raw_http import read_answer as read

CHAT = "/v1/chat/completions"
Json = dict[str, Any]
_MAX_MESSAGES = 40
_WORDS = [f"w{number}" for number in range(300)]
_NONSENSE = [
    b"{", b"[]", b'{"messages": 3}', b'{"messages": []}', b"\xff\xfe",
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -5}',
    b'{"messages": [{"role": "nobody", "content": "x"}]}',
]  # fmt: skip


@dataclass
class Conversation:
    """A history that grows; its clock and ids change with every request."""

    name: str
    messages: list[Json] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: Any = field(default_factory=itertools.count)

    def body(self, chance: random.Random) -> Json:
        """The request as it stands, with today's values."""
        number = next(self.numbers)
        clock = f"2026-11-21T10:{number // 60 % 60:02}:{number % 60:02}Z"
        head = f"You are {self.name}, a helper.\nCurrent time: {clock}\n" + " ".join(
            _WORDS[:80]
        )
        tag = f"[message_id: {chance.randrange(10**9):09}]\n"
        messages = [
            {**m, "content": tag + m["content"]} if m["role"] == "user" else m
            for m in self.messages
        ]
        return {"messages": [{"role": "system", "content": head}, *messages]}


class Traffic:
    """Eight clients' worth of it; counts what came of each kind of thing."""

    def __init__(self, port: int, seed: int, num_clients: int = 8) -> None:
        self.port = port
        self.outcomes = Counter[str]()
        self.wrong: list[str] = []
        self._until = 0.0
        self._talks = [Conversation(f"agent{i}") for i in range(3)]
        self._clients = [random.Random(f"{seed}/{i}") for i in range(num_clients)]

    def run(self, seconds: float) -> None:
        """Keep all clients busy that long, and wait for their last answers."""
        self._until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._client, args=(chance,), name="client")
            for chance in self._clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, chance: random.Random) -> None:
        things = [
            (6, self._turn), (2, self._one_off), (1, self._leave), (1, self._cancel),
            (2, self._nonsense), (1, self._half_a_body),
        ]  # fmt: skip
        weights = [weight for weight, _ in things]
        while time.monotonic() < self._until:
            ((_, thing),) = chance.choices(things, weights)
            try:
                outcome = thing(chance)
            except Exception as error:  # noqa: BLE001 - told at the end
                outcome = f"{type(error).__name__}: {error}"
                self.wrong.append(f"{thing.__name__}: {outcome}")
            self.outcomes[f"{thing.__name__[1:]}: {outcome}"] += 1

    def _turn(self, chance: random.Random) -> str:
        """The next turn of a conversation, now and then asked twice."""
        talk = chance.choice(self._talks)
        with talk.lock:
            if len(talk.messages) >= _MAX_MESSAGES:
                talk.messages.clear()
            talk.messages.append({"role": "user", "content": _text(chance)})
            body = talk.body(chance) | {"max_tokens": chance.randint(4, 40)}
            if chance.random() < 0.2:
                self._leave_after(body, chance.random() * 0.2)  # a time-out, then:
            answer = self._ask(body)
            if answer.status != 200:
                talk.messages.pop()
                return str(answer.status)
            message = answer.json["choices"][0]["message"]
            said = message.get("content") or ""
            reply: Json = {"role": "assistant", "content": said}
            if chance.random() < 0.5 and message.get("reasoning_content"):
                reply["reasoning_content"] = message["reasoning_content"]
            talk.messages.append(reply)
        return "200"

    def _one_off(self, chance: random.Random) -> str:
        body = {"messages": [{"role": "user", "content": _text(chance)}]}
        return str(self._ask(body | {"max_tokens": 8}).status)

    def _leave(self, chance: random.Random) -> str:
        """Close the connection in mid-prefill or mid-answer."""
        talk = chance.choice(self._talks)
        body = talk.body(chance)
        text = _text(chance, chance.choice([20, 1500]))
        body["messages"].append({"role": "user", "content": text})
        self._leave_after(body | {"max_tokens": 2000}, chance.random())
        return "left"

    def _leave_after(self, body: Json, seconds: float) -> None:
        data = json.dumps({**body, "stream": True}).encode()
        with connect(self.port) as connection:
            connection.sendall(request(CHAT, data))
            time.sleep(seconds)

    def _cancel(self, chance: random.Random) -> str:
        """POST /v1/cancel while it runs."""
        name = f"c{chance.randrange(10**12)}"
        body = {"messages": [{"role": "user", "content": _text(chance)}]}
        data = json.dumps({**body, "max_tokens": 3000}).encode()
        with connect(self.port) as connection:
            header = (f"X-Request-ID: {name}",)
            connection.sendall(request(CHAT, data, header))
            time.sleep(chance.random() * 0.3)
            exchange(self.port, request(f"/v1/cancel/{name}", method="POST"))
            with connection.makefile("rb") as stream:
                status = read(stream).status
        return self._checked(status, (499, 429))

    def _nonsense(self, chance: random.Random) -> str:
        data = chance.choice(_NONSENSE)
        return self._checked(
            exchange(self.port, request(CHAT, data)).status, (400, 422)
        )

    def _half_a_body(self, _chance: random.Random) -> str:
        whole = request(CHAT, json.dumps({"messages": ["x" * 100]}).encode())
        answer = exchange(self.port, whole[:-20], end=True)
        return self._checked(answer.status, (400, 408, CLOSED.status))

    def _ask(self, body: Json) -> Answer:
        answer = exchange(self.port, request(CHAT, json.dumps(body).encode()))
        self._checked(answer.status, (200, 429))
        return answer

    def _checked(self, status: int, good: tuple[int, ...]) -> str:
        if status not in good:
            self.wrong.append(f"status {status}, not one of {good}")
        return str(status)


def _text(chance: random.Random, maximum: int = 60) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.randint(3, maximum)))
