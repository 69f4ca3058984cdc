"""
What agents do to a conversation, and how much of it a server must then reuse.

Bounds come from what the server said of earlier prompts and from counting words: a
word is at least one token, whatever the tokenizer and the chat template.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sidecar.cli.agent import (
    Agent,
    Turn,
    Volatile,
    new_name,
    num_words,
    system_around_order,
)
from sidecar.cli.picture import picture_part
from sidecar.cli.server import Json, Server

_MAIN_KEEPS = 0.97
_NUM_SUBAGENTS = 4
# An empty answer (cut off while thinking) is no turn the server could know again:
# the template prints it, and maybe another header than the one that was generated on.
_HEADER_LEN = 16
_UNFED_LEN = 2  # the end of an answer that no next prompt can contain


@dataclass(frozen=True, slots=True)
class Checked:
    """A turn and the least and the most of its prompt that may be reused."""

    turn: Turn
    low: int = 0
    high: int | None = None

    @property
    def is_good(self) -> bool:
        """Whether reuse lies within the bounds."""
        high = self.turn.prompt_len - 1 if self.high is None else self.high
        return self.low <= self.turn.cached_len <= high

    @property
    def expected(self) -> str:
        """The bounds, in words."""
        if self.low == self.high:
            return f"{self.low}"
        low = f">= {self.low}" if self.low else ""
        high = f"<= {self.high}" if self.high is not None else ""
        return " ".join(part for part in (low, high) if part)


@dataclass(frozen=True, slots=True)
class Setup:
    """
    Whom to ask and how.

    Args:
        asks: what every request holds. turns: requests of a scenario's main part.
        can_cut: KV can be reused up to any token, not only up to a checkpoint.
        can_splice: answers are known again to the token, whatever the client does.
        sees: the model takes pictures.
    """

    server: Server
    asks: Json
    turns: int
    can_cut: bool
    can_splice: bool
    sees: bool = False

    def kept(self, before: Turn) -> int:
        """
        The least that a prompt must share with the one it extends.

        A call that the limit cut off is closed by the template: it is written anew.
        """
        if not before.is_heard:
            return before.prompt_len - _HEADER_LEN
        if self.can_splice and not before.is_cut:
            return before.prompt_len + max(0, before.completion_len - _UNFED_LEN)
        return before.prompt_len

    def go_on(
        self, agent: Agent, labels: list[str], before: Turn | None
    ) -> Iterator[Checked]:
        """Append-only turns."""
        for label in labels:
            turn = agent.step(label)
            yield Checked(turn, self.kept(before) if before else 0)
            before = turn

    def agent(
        self, role: str, session: str | None = None, task: str = "Read notes.txt"
    ) -> Agent:
        """A new conversation, in a session of its own unless one is named."""
        name = new_name(role)
        asks = {**self.asks, "session_id": session or name}
        return Agent(self.server, asks, name, task)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What must be reused, in words, and the requests that show it."""

    expectation: str
    run: Callable[[Setup], Iterator[Checked]]


def _numbers(first: int, count: int) -> list[str]:
    return [str(number) for number in range(first, first + count)]


def _normal(setup: Setup) -> Iterator[Checked]:
    yield from setup.go_on(setup.agent("normal"), _numbers(1, setup.turns), None)


def _drift(setup: Setup) -> Iterator[Checked]:
    agent = setup.agent("drift")
    before = None
    for number in range(1, setup.turns + 1):
        agent.set_volatile(_at(number))
        turn = agent.step(str(number))
        yield Checked(turn, setup.kept(before) if before else 0)
        before = turn


def _at(number: int) -> Volatile:
    hour, minute = divmod(9 * 60 + 33 + number, 60)
    return Volatile(f"2026-11-20T{hour % 24:02}:{minute:02}:00Z", f"5f01{number:02x}")


def _semantic(setup: Setup) -> Iterator[Checked]:
    agent = setup.agent("semantic")
    yield from setup.go_on(agent, _numbers(1, setup.turns - 1), None)
    changed = Volatile(clock="2026-11-20T09:34:00Z", order="Touch prod.")
    agent.set_volatile(changed)
    turn = agent.step("changed")
    head, tail = system_around_order(agent.name, changed)
    behind = len(tail.split()) + num_words(agent.messages[1 : turn.num_messages])
    low = len(head.split()) if setup.can_cut else 0
    yield Checked(turn, low, turn.prompt_len - behind)
    yield from setup.go_on(agent, ["after"], turn)


def _insert(setup: Setup) -> Iterator[Checked]:
    agent = setup.agent("insert")
    turns = []
    for checked in setup.go_on(agent, _numbers(1, setup.turns - 1), None):
        turns.append(checked.turn)
        yield checked
    users = [i for i, m in enumerate(agent.messages) if m["role"] == "user"]
    at = users[len(users) // 2]
    agent.messages[at:at] = [
        {"role": "user", "content": "Somebody edited notes.txt while you worked."},
        {"role": "assistant", "content": "Noted."},
    ]
    turn = agent.step("inserted")
    last = [t for t in turns if t.num_messages < at]
    behind = num_words(agent.messages[at : turn.num_messages])
    low = setup.kept(last[-1]) if last and setup.can_cut else 0
    yield Checked(turn, low, turn.prompt_len - behind)
    yield from setup.go_on(agent, ["after"], turn)


def _branch(setup: Setup) -> Iterator[Checked]:
    one = setup.agent("branch")
    tip: Turn | None = None
    for checked in setup.go_on(one, _numbers(1, max(1, setup.turns - 2)), None):
        tip = checked.turn
        yield checked
    other = one.fork()
    one.say("Read left.txt")
    other.say("Read right.txt")
    for checked in setup.go_on(one, ["left 1", "left 2"], tip):
        left = checked.turn
        yield checked
    yield from setup.go_on(other, ["right 1", "right 2"], tip)
    yield from setup.go_on(one, ["left 3"], left)


def _subagents(setup: Setup) -> Iterator[Checked]:
    session = new_name("subagents")
    main = setup.agent("main", session)
    helpers = [
        setup.agent("helper", session, f"Read chapter{index}.txt")
        for index in range(1, _NUM_SUBAGENTS + 1)
    ]
    before: Turn | None = None
    for number in range(1, setup.turns + 1):
        turn = main.step(f"main {number}")
        low = math.ceil(_MAIN_KEEPS * setup.kept(before)) if before else 0
        yield Checked(turn, low)
        before = turn
        for index, helper in enumerate(helpers, 1):
            yield Checked(helper.step(f"helper {index}.{number}"))


def _retry(setup: Setup) -> Iterator[Checked]:
    agent = setup.agent("retry")
    before: Turn | None = None
    for number in range(1, max(2, setup.turns // 2) + 1):
        turn = agent.step(str(number))
        yield Checked(turn, setup.kept(before) if before else 0)
        del agent.messages[turn.num_messages :]
        before = agent.ask(f"{number} again")
        yield Checked(before, turn.prompt_len - 1, turn.prompt_len - 1)


def _images(setup: Setup) -> Iterator[Checked]:
    """A picture first, then words about it, then another."""
    agent = setup.agent("images")
    before: Turn | None = None
    for number in range(1, setup.turns + 1):
        if number % 3 == 1:
            name = f"{agent.name} {number}"
            agent.show("Look at this picture.", picture_part(name))
        else:
            agent.say("And what else is there to see in it?")
        turn = agent.ask(str(number))
        yield Checked(turn, setup.kept(before) if before else 0)
        before = turn


# Asked only of models that take pictures.
IMAGES = "images"
SCENARIOS = {
    "normal": Scenario(
        "messages are only appended: each turn reuses at least the prompt before it",
        _normal,
    ),
    "drift": Scenario(
        "clock and message ids change each turn: as much is reused as in normal", _drift
    ),
    "semantic": Scenario(
        "an order in the system prompt is reversed: reuse ends there", _semantic
    ),
    "insert": Scenario(
        "an exchange is put into the history: all before it is reused, no more", _insert
    ),
    "branch": Scenario(
        "two branches, then back to the first: each reuses all it shares", _branch
    ),
    "subagents": Scenario(
        f"four helpers in the main thread's session: it keeps {_MAIN_KEEPS:.0%}",
        _subagents,
    ),
    IMAGES: Scenario(
        "pictures among the tasks: each turn reuses at least the prompt before it",
        _images,
    ),
    "retry": Scenario(
        "the same request again: all but its last token is reused", _retry
    ),
}
