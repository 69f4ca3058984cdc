"""
An agent's conversation with a model of each family, and what of it is reused.

`python -m testkit.real_talk [FAMILY..]` prints what holds for each.
"""

import json
import logging
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from sidecar.core.requests import Message, ToolCall
from testkit.chats import Client, Said, Turn, result, system, tool, user, words
from testkit.real_templates import BY_NAME, FAMILIES, FamilyChats

TOOLS = (tool("read"), tool("write"))
_ENDS = ("\n", "\n\n", "", " \n", "\n\n\n")


@dataclass(frozen=True, slots=True)
class Step:
    """One request: the messages it carried, how it was answered."""

    messages: tuple[Message, ...]
    turn: Turn
    raw: str
    opening: str

    @property
    def written(self) -> str:
        """What stands in later prompts in place of the turn, its header included."""
        return self.opening + self.raw


@dataclass
class Talk:
    """
    Two tasks with tool calls, and thanks: nine requests.

    Args:
        drifts: the system prompt tells the time, a new one in each request.
        is_plain: only what the template prints in the order of the messages: calls of
            one turn together, each turn's text before its calls.
    """

    chats: FamilyChats
    thinking: bool = True
    drifts: bool = False
    is_plain: bool = False
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = Client(tools=TOOLS, thinking=self.thinking)
        self.behind: list[Message] = [user("Fix the test.\n")]

    @property
    def messages(self) -> list[Message]:
        """What the client sends now; the clock is that of this request."""
        minute = len(self.steps) if self.drifts else 0
        clock = f"You are an agent.\nCurrent time is 10:{minute:02}.\n{words(60)}"
        return [system(clock), *self.behind]

    def run(self) -> list[Step]:
        """All of it."""
        self.call("I look.", "Where is it?", read(path="a.py", lines=[1, 2]))
        self.call("", "Not there.", read(path="b.py"))
        pair = (read(path="c.py"), write(path="d.py", text='x = "1"\ny'))
        self.call("Both.", "Two files.", *pair[: self.max_calls])
        self.call("", "", write(path="e.py", text="it's"))
        self.say("It is done.", "All is well.")
        self.behind.append(user("And the other?"))
        self.call("", "The other one.", read(path="f.py"))
        self.call("Hm.", "Once more.", read(path="g.py"))
        self.say("That is done too.", "Fine.")
        self.behind.append(user("Thanks \n"))
        self.say("Bye.")
        return self.steps

    @property
    def max_calls(self) -> int:
        """How many calls its model writes in a turn."""
        takes_two = self.chats.pipeline.template.traits.parallel_calls
        return (
            2 if self.chats.family.parallel and (takes_two or not self.is_plain) else 1
        )

    def call(self, text: str, reasoning: str, *calls: ToolCall) -> None:
        """A turn with calls, and their results."""
        if self.is_plain and self.chats.family.late_text:
            text = ""
        self._step(Said(text, self._thought(reasoning), calls))
        for call in calls:
            number = len(self.behind)
            said = f'out {number}: {{"ok": "東 \\"{call.name}\\""}}'
            ended = said + _ENDS[number % len(_ENDS)]
            self.behind.append(result(ended, call.id))

    def say(self, text: str, reasoning: str = "") -> None:
        """A turn in text."""
        self._step(Said(text, self._thought(reasoning)))

    def _thought(self, reasoning: str) -> str:
        return reasoning if self.thinking and self.chats.family.think else ""

    def _step(self, said: Said) -> None:
        messages = tuple(self.messages)
        turn = self.chats.turn(messages, said, self.client)
        start = turn.prompt.pending_turn.opening
        raw = self.chats.family.write(said, turn.text)
        opening = start.header + start.lead if start else ""
        self.steps.append(Step(messages, turn, raw, opening))
        compact = [reserialised(call) for call in said.calls]
        self.behind.append(Said(said.text, "", tuple(compact)).echo)


def read(**arguments: object) -> ToolCall:
    """A call of `read`."""
    return _call("read", arguments)


def write(**arguments: object) -> ToolCall:
    """A call of `write`."""
    return _call("write", arguments)


def _call(name: str, arguments: dict[str, object]) -> ToolCall:
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", name, text)


def reserialised(call: ToolCall) -> ToolCall:
    """As a client sends it back: the arguments written its own way."""
    value = json.loads(call.arguments)
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return ToolCall(call.id, call.name, text)


def lost(steps: Sequence[Step]) -> list[int]:
    """Steps that reuse less than prompt and completion before them - 2 tokens."""
    pairs = zip(steps, steps[1:], strict=False)
    return [
        number
        for number, (before, now) in enumerate(pairs, 1)
        if now.turn.reused < before.turn.kept - 2
    ]


def outside(step: Step, before: Sequence[Step]) -> list[str]:
    """A prompt's texts between the turns that stand in it as they were written."""
    rest, texts = step.turn.text, []
    for earlier in before:
        text, found, rest = rest.partition(earlier.written)
        assert found, earlier.written
        texts.append(text)
    return [*texts, rest.removesuffix(step.opening)]


def _row(name: str) -> str:
    cells = []
    for thinking in (True, False):
        for drifts in (False, True):
            steps = Talk(FamilyChats(name), thinking, drifts).run()
            cells.append("all" if not lost(steps) else f"not at {lost(steps)}")
    spliced = steps[-1].turn.prompt.report.num_spliced
    proved = all(step.turn.prompt.report.is_proved for step in steps)
    traits = FamilyChats(name).pipeline.template.traits
    lacks = [
        n for n in type(traits).__dataclass_fields__ if getattr(traits, n) is False
    ]
    told = ", ".join(n for n in lacks if n != "reasoning_effort")
    return (
        f"| {name} | {' | '.join(cells)} | {spliced} of {len(steps) - 1} "
        f"| {'yes' if proved else 'no'} | {traits.call_ids} | {told} |"
    )


def main() -> None:
    """Print the table."""
    print("| family | thinking | and drift | off | and drift | spliced | proved |"
          " call ids | lacks |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    logging.disable()
    for name in sys.argv[1:] or [family.name for family in FAMILIES]:
        print(_row(BY_NAME[name].name), flush=True)


if __name__ == "__main__":
    main()
