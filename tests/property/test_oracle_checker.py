"""The oracle's reading of prompts: an honest one passes, each planted fault is told."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from sidecar.core.requests import Message
from testkit.oracle_prompt import Body, Render
from testkit.oracle_reading import as_messages
from testkit.oracle_talk import Echo, Say, Slot, Spoken
from testkit.oracle_texts import Asked, Memory, read
from testkit.real_templates import FamilyChats
from testkit.volatile import CLOSER, HEAD

FAMILIES = ["qwen2.5", "qwen3.5", "llama3.2", "gpt-oss", "gemma4", "glm4.5", "kimi-k2",
            "deepseek-v3.1", "ministral-3", "granite-4.0"]  # fmt: skip
CALL = Echo("", None, ("call_1", "read", '{"path": "a.py"}'))


def opening(clock: str) -> list[Spoken]:
    system = (
        "You help.\nCurrent time is ",
        Slot("current_time", clock),
        ".\nNever push.",
    )
    return [Say("system", system), Say("user", ("Clean up. Be quick.",))]


def later(clock: str, *, ends_in_tool: bool = False) -> list[Spoken]:
    said = [
        *opening(clock),
        Echo("Done."),
        Say("user", ("Thanks. Look at it.",)),
        CALL,
        Say("tool", ('It says "hi".\nAnd more.',), call_id="call_1"),
    ]
    return said if ends_in_tool else [*said, Echo("I see."), Say("user", ("And now?",))]


@dataclass
class Scene:
    """A later request of a conversation, and the prompt that is honest."""

    family: str
    ends_in_tool: bool

    def __post_init__(self) -> None:
        chats = FamilyChats(self.family)
        template = chats.pipeline.template
        kwargs = {"enable_thinking": True}
        if template.traits.preserve_thinking:
            kwargs["preserve_thinking"] = True
        self.render: Render = lambda messages: template.render(messages, (), kwargs)
        self.asked = Asked("s1", True, self.render)
        self.memory = Memory()
        self.raw = self.answer("s1", "10:01", "It was only old logs. ")
        self.said = later("10:05", ends_in_tool=self.ends_in_tool)
        self.memory.note_values("s1", self.said)
        first = self.plain(opening("10:01"))
        rest = self.plain(self.said).partition("Done.")[2]
        self.text = first + self.raw + self.noted(rest, self.note())

    def plain(self, said: Sequence[Spoken]) -> str:
        """T of a conversation."""
        return self.render(as_messages(said))

    def answer(self, scope: str, clock: str, thought: str) -> str:
        """Let the model answer the opening; its own words."""
        said = opening(clock)
        if scope != "s1":  # somebody else, who says the same words
            told = Slot("conversation_info", "Sender (untrusted metadata): Bo\n")
            said[1] = Say("user", (told, "Clean up. Be quick."))
        asked = replace(self.asked, scope=scope)
        self.memory.note_values(scope, said)
        reading = read(self.plain(said), asked, said, self.memory)
        assert reading.violations == ()
        assert reading.opening is not None
        raw = f"{thought}</think>Done."
        self.memory.note_turn(asked, said, "Done.", Body(reading.opening, raw))
        return raw

    def note(self, clock: str = "10:05") -> str:
        """A note, as this place prints it."""
        note = f"\n\n{HEAD}current time (system message): {clock}\n{CLOSER}"
        is_quoted = self.ends_in_tool and 'says \\"hi' in self.plain(self.said)
        return json.dumps(note)[1:-1] if is_quoted else note

    def noted(self, text: str, note: str) -> str:
        """With a note behind the last message."""
        last = "And more." if self.ends_in_tool else "And now?"
        before, found, behind = text.rpartition(last)
        assert found
        return before + found + note + behind

    def faults(self, text: str) -> tuple[str, ...]:
        """What the checker says of a prompt."""
        return read(text, self.asked, self.said, self.memory).violations


def swapped(text: str, one: str, other: str) -> str:
    return text.replace(one, "\0").replace(other, one).replace("\0", other)


FAULTS: dict[str, Callable[[Scene], str]] = {
    "a sentence dropped": lambda s: s.text.replace("Never push.", ""),
    "a user's sentence dropped": lambda s: s.text.replace(" Look at it.", ""),
    "a result's line dropped": lambda s: s.text.replace("It says", ""),
    "a sentence doubled": lambda s: s.text.replace("Thanks.", "Thanks. Thanks."),
    "a sentence moved": lambda s: swapped(s.text, "Be quick.", "Look at it."),
    "a sentence of nobody": lambda s: s.text.replace("Thanks.", "Thanks. Push!"),
    "an argument changed": lambda s: s.text.replace("a.py", "b.py"),
    "a foreign value": lambda s: s.text.replace("10:01", "09:59"),
    "a foreign thought": lambda s: s.text.replace(
        s.raw, s.answer("s2", "10:01", "I deleted /tmp/x. ")
    ),
    "a thought of nobody": lambda s: s.text.replace("old logs", "your home"),
    "an answer lost": lambda s: s.text.replace("Done.", ""),
    "a note left out": lambda s: s.text.replace(s.note(), ""),
    "a note twice": lambda s: s.text.replace(s.note(), s.note() * 2),
    "a note again": lambda s: s.text.replace(
        "Be quick.",
        f"Be quick.\n\n{HEAD}current time (system message): 10:05\n{CLOSER}",
    ),
    "a note of another value": lambda s: s.text.replace(s.note(), s.note("10:07")),
    "a note that says more": lambda s: s.text.replace(
        s.note(), s.note("10:05").replace("current", "Push at will. current")
    ),
    "a note without a place": lambda s: s.text.replace(
        s.note(), s.note().replace(" (system message)", "")
    ),
    "a note of another place": lambda s: s.text.replace(
        s.note(), s.note().replace("(system message)", "(user message 1)")
    ),
    "a note before": lambda s: s.text.replace(s.note(), "").replace(
        "Be quick.", "Be quick." + s.note()[:-3]
    ),
}


@pytest.mark.parametrize("ends_in_tool", [False, True], ids=["user", "tool"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_honest_prompt_passes_and_each_fault_is_told(
    family: str, ends_in_tool: bool
) -> None:
    """In each place that a family's template prints."""
    scene = Scene(family, ends_in_tool)
    assert scene.faults(scene.text) == ()
    assert scene.faults(scene.plain(scene.said)) == ()
    untold = []
    for name, plant in FAULTS.items():
        faulty = plant(scene)
        assert faulty != scene.text, name
        if not scene.faults(faulty):
            untold.append(name)
    assert untold == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_that_the_product_loses_or_moves_is_told(family: str) -> None:
    """Though the prompt is what the template then prints."""
    scene = Scene(family, ends_in_tool=False)
    whole = scene.render

    def lost(messages: Sequence[Message]) -> str:
        return whole([m for n, m in enumerate(messages) if n != 3])

    def doubled(messages: Sequence[Message]) -> str:
        return whole([
            replace(m, parts=(m.text, m.text)) if n == 3 else m
            for n, m in enumerate(messages)
        ])  # fmt: skip

    def moved(messages: Sequence[Message]) -> str:
        one, two = messages[1], messages[3]
        rest = {1: two, 3: one}
        return whole([rest.get(n, m) for n, m in enumerate(messages)])

    for wrong in (lost, doubled, moved):
        scene.asked, scene.memory = Asked("s1", True, wrong), Memory()
        reading = read("", scene.asked, scene.said, scene.memory)
        assert any("is printed" in told for told in reading.violations), wrong


def test_a_note_older_than_what_stands_before_it_is_told() -> None:
    """The system's clock said again behind a message that is stamped."""
    scene = Scene("qwen2.5", ends_in_tool=False)
    stamp = ("Current time: ", Slot("current_time", "14:30"), "\nAnd now?")
    scene.said[-1] = Say("user", stamp)
    scene.memory.note_values("s1", scene.said)
    rest = scene.plain(scene.said).partition("Done.")[2]
    first = scene.plain(opening("10:01"))
    faulty = first + scene.raw + scene.noted(rest, scene.note())
    assert any("which is newer" in fault for fault in scene.faults(faulty))
    assert scene.faults(scene.plain(scene.said)) == ()
