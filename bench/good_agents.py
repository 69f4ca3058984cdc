"""
Agents whose conversations grow, over LiteLLM: how long they wait, and what they hear.

Each conversation is learnt first: its answers with the server's memory of its own
turns, and cold, without any. A greedy model gives no others, whatever else it does.
"""

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.hostile_inputs import CHAT, MESSAGES, RESPONSES

_SILENCE_S = 120.0
_TOKENS = 24
_QUIET: dict[str, Any] = {"temperature": 0.0, "stream": True}
_NO_THINKING: dict[str, dict[str, Any]] = {
    CHAT: {"reasoning_effort": "none"},
    MESSAGES: {"thinking": {"type": "disabled"}},
    RESPONSES: {"reasoning": {"effort": "none"}},
}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Heard:
    """
    One answer, or why there is none. Times are of the system's monotonic clock.

    Args:
        text: None if the answer is not whole. first, ended: of the first text, and all.
        problem: the status or the error told; "" for a whole answer.
    """

    text: str | None
    started: float
    first: float
    ended: float
    problem: str = ""

    @property
    def wait_s(self) -> float:
        """From the send to the first text."""
        return self.first - self.started

    @property
    def whole_s(self) -> float:
        """From the send to the end."""
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, and the answers that are right."""

    body: Json
    warm: str
    cold: str


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation that was learnt: its route and its turns."""

    route: str
    turns: tuple[Turn, ...]


@dataclass
class Diary:
    """What the agents heard; any thread."""

    heard: list[Heard] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Asker:
    """Asks on one route, streamed."""

    def __init__(self, http: httpx.Client, route: str) -> None:
        self._http, self._route = http, route

    def ask(self, body: Json) -> Heard:
        """The answer, told by its first and its last word."""
        started = time.monotonic()
        reading = _Reading(self._route)
        try:
            with self._http.stream("POST", self._route, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    said = response.read()[:300].decode(errors="replace")
                    reading.problem = f"{response.status_code} {said}"
                else:
                    reading.read(response.iter_lines())
        except httpx.HTTPError as error:
            reading.problem = reading.problem or f"cut: {type(error).__name__}"
        ended = time.monotonic()
        if not (reading.is_whole or reading.problem):
            reading.problem = "ended without a word"
        text = None if reading.problem else "".join(reading.texts)
        first = reading.first or ended
        return Heard(text, started, first, ended, reading.problem)


class _Reading:
    """The events of one stream."""

    def __init__(self, route: str) -> None:
        self._texts_of = _TEXTS[route]
        self.texts: list[str] = []
        self.first = 0.0
        self.is_whole = False
        self.problem = ""

    def read(self, lines: Iterator[str]) -> None:
        for line in lines:
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("error") or event.get("type") in ("error", "response.failed"):
                self.problem = f"told in the stream: {line[:300]}"
                return
            if text := self._texts_of(event):
                self.first = self.first or time.monotonic()
                self.texts.append(text)
            self.is_whole = self.is_whole or _is_end(event)


def learn(
    http: httpx.Client, route: str, model: str, texts: Sequence[str], forget: Any
) -> Talk:
    """
    Hold the conversation once with the server's memory and once without.

    Args:
        forget: clears all that the server remembers.
    Raises:
        ValueError: an answer failed.
    """
    turn_query, history, bodies, warm = Asker(http, route), [], [], []
    forget()
    for text in texts:
        history.append({"role": "user", "content": text})
        bodies.append(_body(route, model, list(history)))
        warm.append(_whole(turn_query.ask(bodies[-1])))
        history.append({"role": "assistant", "content": warm[-1]})
    cold = []
    for body in bodies:
        forget()
        cold.append(_whole(turn_query.ask(body)))
    turns = (Turn(*turn) for turn in zip(bodies, warm, cold, strict=True))
    return Talk(route, tuple(turns))


class Agent:
    """
    Holds its conversations one after the other, again and again.

    Args:
        num_kills: how often the server has lost its memory so far.
    """

    def __init__(
        self, http: httpx.Client, talks: Sequence[Talk], diary: Diary, num_kills: Any
    ) -> None:
        self._http, self._talks = http, talks
        self._diary, self._num_kills = diary, num_kills

    def run(self, until: float, chance: random.Random) -> None:
        """Talk until then; a turn that failed ends its conversation."""
        while time.monotonic() < until:
            talk = chance.choice(self._talks)
            kills = self._num_kills()
            for number, turn in enumerate(talk.turns):
                if not self._turn(talk.route, turn, number) or time.monotonic() > until:
                    break
                if self._num_kills() != kills:
                    break  # it remembers some turns and others not: neither answer
                time.sleep(chance.uniform(0.05, 0.25))

    def _turn(self, route: str, turn: Turn, number: int) -> bool:
        heard = Asker(self._http, route).ask(turn.body)
        with self._diary.lock:
            self._diary.heard.append(heard)
            if heard.text is not None and heard.text not in (turn.warm, turn.cold):
                self._diary.wrong.append(
                    f"{route} turn {number}: {heard.text!r}, not {turn.warm!r} "
                    f"(cold {turn.cold!r}), at {heard.started:.1f}"
                )
        if heard.text is None:
            time.sleep(0.5)  # as agents do before they ask again
        # The cold answer is right, but not what the next turn holds.
        return heard.text == turn.warm


def make_texts(agent: str, number: int, num_turns: int) -> list[str]:
    """What a user says, turn by turn; the same for the same names."""
    chance = random.Random(f"{agent}/{number}")
    first = f"I am {agent}, and this is matter {number}. "
    return [
        (first if turn == 0 else "")
        + " ".join(f"w{chance.randrange(300)}" for _ in range(chance.randint(20, 60)))
        for turn in range(num_turns)
    ]


def _whole(heard: Heard) -> str:
    if heard.text is None:
        raise ValueError(f"no answer to learn: {heard.problem}")
    return heard.text


def _body(route: str, model: str, said: list[Json]) -> Json:
    asked: Json = {"input": said} if route == RESPONSES else {"messages": said}
    limit = "max_output_tokens" if route == RESPONSES else "max_tokens"
    return {"model": model, **asked, limit: _TOKENS, **_QUIET, **_NO_THINKING[route]}


def _chat_texts(event: Json) -> str:
    deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
    names = ("reasoning_content", "content")
    return "".join(delta.get(name) or "" for delta in deltas for name in names)


def _messages_texts(event: Json) -> str:
    delta = event.get("delta") or {}
    return str(delta.get("text") or delta.get("thinking") or "")


def _responses_texts(event: Json) -> str:
    is_text = str(event.get("type")).endswith("_text.delta")
    return str(event["delta"]) if is_text else ""


_TEXTS = {CHAT: _chat_texts, MESSAGES: _messages_texts, RESPONSES: _responses_texts}


def _is_end(event: Json) -> bool:
    ends = ("message_stop", "response.completed", "response.incomplete")
    finishes = [c.get("finish_reason") for c in event.get("choices") or ()]
    return event.get("type") in ends or any(finishes)
