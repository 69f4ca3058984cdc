"""
Conversations for the oracle fuzzer: messages whose volatile stretches are known.

A message is literal text and slots; a slot says of which kind it is and what it holds
now. So what the model was given can be compared with what the client said.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from testkit.oracle_hostile import hostile, is_due

WORDS = [
    "the",
    "file",
    "of",
    "a",
    "model",
    "and",
    "its",
    "cache",
    "are",
    "read",
    "by",
    "one",
    "server",
    "for",
    "each",
    "turn",
    "while",
    "it",
    "runs",
    "in",
    "the",
    "folder",
    "with",
    "code",
    "to",
    "test",
]


@dataclass(frozen=True, slots=True)
class Slot:
    """A declared-volatile stretch (sidecar/volatile/rules.toml); "" if it is absent."""

    kind: str
    value: str


Part = str | Slot
GREETINGS = ["hi", "hello there"]


@dataclass(frozen=True, slots=True)
class Say:
    """
    What a client says in a message of its own.

    Args:
        lead, trail: white space around the parts.
        call_id: of the call that a tool message answers.
        is_hostile: its literal text may hold what looks volatile.
    """

    role: str
    parts: tuple[Part, ...]
    lead: str = ""
    trail: str = ""
    call_id: str | None = None
    is_hostile: bool = False

    @property
    def text(self) -> str:
        """As it is sent."""
        core = "".join(p if isinstance(p, str) else p.value for p in self.parts)
        return f"{self.lead}{core}{self.trail}"

    def entry(self) -> dict[str, Any]:
        """The wire form."""
        entry: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.call_id:
            entry["tool_call_id"] = self.call_id
        return entry


@dataclass(frozen=True, slots=True)
class Echo:
    """An assistant message: the model's own, edited, or another model's."""

    text: str
    reasoning: str | None = None
    call: tuple[str, str, str] | None = None  # id, name, arguments

    role = "assistant"

    def entry(self) -> dict[str, Any]:
        """The wire form."""
        entry: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            entry["reasoning_content"] = self.reasoning
        if self.call:
            call_id, name, arguments = self.call
            function = {"name": name, "arguments": arguments}
            entry["tool_calls"] = [
                {"id": call_id, "type": "function", "function": function}
            ]
        return entry


Spoken = Say | Echo


@dataclass
class Talk:
    """
    A conversation as a client keeps it.

    Args:
        session: None if the client names none. chat: whose it is then; forks of it
            are the same person's.
    """

    session: str | None
    messages: list[Spoken]
    thinking: bool = True
    asked: int = 0  # requests sent so far
    chat: str = ""

    @property
    def scope(self) -> str:
        """Within which values and turns may be lent."""
        return self.session or f"chat {self.chat}"

    def entries(self) -> list[dict[str, Any]]:
        """The wire form of all messages."""
        return [message.entry() for message in self.messages]

    def slots(self) -> list[tuple[int, int]]:
        """Message and part of all slots."""
        return [
            (i, k)
            for i, message in enumerate(self.messages)
            if isinstance(message, Say)
            for k, part in enumerate(message.parts)
            if isinstance(part, Slot)
        ]


def thread(messages: Sequence[Spoken]) -> str:
    """The first user message, as far as it is not volatile: a thread's name."""
    blocks = ("folder_tree", "date_reminder")
    for message in messages:
        if isinstance(message, Say) and message.role == "user":
            kept = [
                p if isinstance(p, str) else "" if p.kind in blocks else f"<{p.kind}>"
                for p in message.parts
            ]
            return "".join(kept).strip()
    return ""


def words(chance: random.Random, maximum: int) -> str:
    """Ordinary text."""
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, maximum)))


def value_of(kind: str, chance: random.Random) -> str:
    """A value that the rules of that kind recognise."""
    number = chance.randint(0, 9)
    block = f'```json\n{{"chat": "c{chance.randint(0, 999)}"}}\n```\n\n'
    values = {
        "billing_header": f"x-anthropic-billing-header: cc=2.1; cch=a{number};\n",
        "current_time": f"10:{10 + number}" + chance.choice(["", " (Europe/Rome)"]),
        "inbound_context": "## Inbound Context (trusted metadata)\n" + block,
        "git_status": f"gitStatus: This is the status.\nM a{number}.py",
        "folder_tree": (
            "Here is the folder structure of the current working directories:\n\n/p/\n"
            f"├───a{number}.py\n"
        ),
        "date_reminder": (
            "<system-reminder>\nThe current date is: "
            f"{number} May.\n</system-reminder>\n"
        ),
        "conversation_info": "Sender (untrusted metadata):\n" + block,
        "message_id": chance.choice([f"m{number}", f"m{number}", f"order_of_{number}"]),
        "subagent_runtime": f"{number}m{number}s",
    }
    if kind in ("inbound_context", "date_reminder") and chance.random() < 0.3:
        return ""
    return values[kind]


def system(chance: random.Random) -> Say:
    """One of a few system prompts, so that conversations share beginnings."""
    style, long = chance.choice([0, 0, 1, 1, 2, 3]), chance.choice([12, 30, 60])
    same = random.Random(style * 1000 + long + chance.choice([0, 0, 100]))
    filler = words(same, long) + "."
    is_hostile = is_due(same)
    filler += hostile(same) if is_hostile else ""

    def slot(kind: str) -> Slot:
        return Slot(kind, value_of(kind, chance))

    parts: tuple[Part, ...] = (filler,)
    if style == 0:
        head = "You are an agent.\nCurrent time is "
        parts = (head, slot("current_time"), ".\n" + filler * 2)
    if style == 1:
        block = slot("inbound_context")
        rest = f"# Project Context\n{filler}\n\n"
        parts = ("You help.\n", block, rest + filler, "\n\n", slot("git_status"))
    if style == 2:
        parts = (slot("billing_header"), f"You code. {filler}")
    return Say("system", parts, is_hostile=is_hostile)


def question(chance: random.Random, *, is_first: bool) -> Say:
    """A user message, maybe with an id, a reminder, a report, white space around."""
    parts: list[Part] = []

    def slot(kind: str) -> Slot:
        return Slot(kind, value_of(kind, chance))

    if is_first and chance.random() < 0.2:
        parts += ["<system-reminder>\n", slot("folder_tree"), "</system-reminder>\n"]
    if chance.random() < 0.1:
        parts.append(slot("date_reminder"))
    if chance.random() < 0.25:
        parts += ["Current time: ", slot("current_time"), "\n"]
    if chance.random() < 0.4:
        parts += ['{"message_id": "', slot("message_id"), '"}\n']
    parts.append(words(chance, 25))
    if chance.random() < 0.15:
        parts += ["\nStats: runtime ", slot("subagent_runtime")]
        if chance.random() < 0.5:
            parts.append(f"\n{words(chance, 5)}")
    is_hostile = is_due(chance)
    if is_hostile:
        parts.insert(chance.choice([0, len(parts)]), hostile(chance))
    spaces = ["", "", "", " ", "\n"]
    lead, trail = chance.choice(spaces), chance.choice(spaces)
    return Say("user", tuple(parts), lead, trail, is_hostile=is_hostile)


def sender(chance: random.Random) -> tuple[Part, ...]:
    """Who writes, as one client puts it before the newest message only."""
    if chance.random() < 0.3:
        return ()
    return (Slot("conversation_info", value_of("conversation_info", chance)),)


def without_senders(talk: Talk) -> None:
    """Drop who wrote the messages that the model has answered."""
    for at, message in enumerate(talk.messages[:-1]):
        if isinstance(message, Say):
            gone = Slot("conversation_info", "")
            kept = tuple(gone if _is_sender(p) else p for p in message.parts)
            talk.messages[at] = replace(message, parts=kept)


def as_another_says_it(talk: Talk, chance: random.Random) -> list[Spoken]:
    """The same words of somebody else, who was given the same answers elsewhere."""
    messages = list(talk.messages)
    for at, part in talk.slots():
        message = messages[at]
        assert isinstance(message, Say)
        messages[at] = changed(message, part, chance)
    return [replace(m, reasoning=None) if isinstance(m, Echo) else m for m in messages]


def _is_sender(part: Part) -> bool:
    return isinstance(part, Slot) and part.kind == "conversation_info"


def result(chance: random.Random, call_id: str) -> Say:
    """What a tool says."""
    if is_due(chance):
        text = hostile(chance) + words(chance, 8) + hostile(chance)
        return Say("tool", (text,), call_id=call_id, is_hostile=True)
    trail = chance.choice(["\n", "\n", "", "  \n"])
    return Say("tool", (words(chance, 20),), "", trail, call_id)


def foreign_call(chance: random.Random) -> list[Spoken]:
    """A call that another model made, and its results."""
    call_id = f"call_{chance.randrange(10**6)}"
    arguments = json.dumps({"path": chance.choice(WORDS)})
    if is_due(chance):
        named = {"path": hostile(chance), "deep": [{"x": None, "y": 1.5}]}
        arguments = chance.choice([json.dumps(named), hostile(chance)])
    said = words(chance, 5) if chance.random() < 0.5 else ""
    if said and is_due(chance):
        said += hostile(chance)
    return [Echo(said, None, (call_id, "read", arguments)), result(chance, call_id)]


def changed(message: Say, part: int, chance: random.Random) -> Say:
    """With another value in one of its slots."""
    slot = message.parts[part]
    assert isinstance(slot, Slot)
    parts = list(message.parts)
    parts[part] = Slot(slot.kind, value_of(slot.kind, chance))
    return replace(message, parts=tuple(parts))


@dataclass(frozen=True, slots=True)
class Op:
    """One thing a client does; all its chances come from its own seed."""

    name: str
    seed: str

    def chance(self) -> random.Random:
        """The same each time."""
        return random.Random(self.seed)


# How often each comes, of all.
OPS = {
    "append": 30, "volatile": 14, "edit": 7, "insert": 5, "delete": 5, "branch": 8,
    "retry": 5, "regenerate": 6, "tool": 7, "cancel_prefill": 6, "cancel_decode": 4,
    "crash": 3, "evict": 6, "pair": 8, "new": 8, "session": 2,
}  # fmt: skip


def plan(seed: str, length: int) -> list[Op]:
    """The ops of one sequence."""
    chance = random.Random(seed)
    names = chance.choices(list(OPS), list(OPS.values()), k=length)
    return [Op(name, f"{seed}/{number}") for number, name in enumerate(names)]


@dataclass
class Cast:
    """The conversations of one sequence."""

    talks: list[Talk] = field(default_factory=list)

    def pick(self, chance: random.Random) -> Talk:
        """One of them, mostly the latest; a new one if there is none."""
        if not self.talks:
            return self.open(chance)
        return self.talks[-1] if chance.random() < 0.6 else chance.choice(self.talks)

    def open(self, chance: random.Random) -> Talk:
        """Begin one, in a session of its own or beside others."""
        shared = self.talks and chance.random() < 0.4
        session = self.talks[0].session if shared else f"s{len(self.talks)}"
        chat = f"c{len(self.talks)}"
        opening = system(chance)
        if self.talks and chance.random() < 0.6:  # the same agent, now
            before = self.talks[-1].messages[0]
            opening = before if isinstance(before, Say) else opening
            for part, item in enumerate(opening.parts):
                if isinstance(item, Slot):
                    opening = changed(opening, part, chance)
        thinking = chance.random() < 0.8
        unnamed = [t for t in self.talks if t.session is None and len(t.messages) > 2]
        if unnamed and chance.random() < 0.5:
            messages = as_another_says_it(chance.choice(unnamed), chance)
            self.talks.append(Talk(None, messages, thinking, chat=chat))
        elif chance.random() < 0.4:  # of somebody whose client names no session
            first = Say("user", (*sender(chance), chance.choice(GREETINGS)))
            self.talks.append(Talk(None, [opening, first], thinking, chat=chat))
        else:
            self.talks.append(Talk(session, [opening], thinking, chat=chat))
        return self.talks[-1]

    def fork(self, talk: Talk, chance: random.Random) -> Talk:
        """Go on from the middle of one, leaving it as it is."""
        cut = chance.randint(1, len(talk.messages))
        if is_call(talk.messages[cut - 1]):
            cut -= 1  # a call stays with its result
        session = talk.session if chance.random() < 0.7 else f"s{len(self.talks)}"
        messages = talk.messages[:cut]
        self.talks.append(Talk(session, messages, talk.thinking, chat=talk.chat))
        return self.talks[-1]


def ask(talk: Talk, chance: random.Random) -> None:
    """End a conversation with something the model can answer."""
    while talk.messages and isinstance(talk.messages[-1], Say):
        if talk.messages[-1].role == "user":
            talk.messages.pop()
        else:
            break
    is_first = not any(m.role == "user" for m in talk.messages)
    talk.messages.append(question(chance, is_first=is_first))


def is_call(message: Spoken) -> bool:
    """Whether results belong behind it."""
    return isinstance(message, Echo) and message.call is not None


def rearrange(talk: Talk, name: str, chance: random.Random) -> None:
    """Edit, insert or delete in what was said before."""
    inner = range(1, len(talk.messages))
    if not inner:
        return
    at = chance.choice(inner)
    message = talk.messages[at]
    if name == "insert":
        at -= is_call(talk.messages[at - 1])  # a call stays with its result
        note = Say("user", (f"<system-reminder>{words(chance, 5)}</system-reminder>",))
        typed = hostile(chance) if is_due(chance) else ""
        # The template of gpt-oss refuses an answer that names a channel.
        typed = typed.replace("<|channel|>", "<|channel")
        echo = Echo(words(chance, 6) + typed)
        talk.messages.insert(at, chance.choice([note, echo]))
    elif name == "delete":
        at -= is_call(talk.messages[at - 1])
        end = at + 1 + is_call(talk.messages[at])
        if at > 1 or not any(map(is_call, talk.messages[end : end + 1])):
            del talk.messages[at:end]  # no client begins with a call
    elif isinstance(message, Echo):
        talk.messages[at] = replace(message, text=f"{message.text} {words(chance, 3)}")
    else:
        is_hostile = is_due(chance)
        added = hostile(chance) if is_hostile else f" {words(chance, 4)}"
        talk.messages[at] = replace(
            message, parts=(*message.parts, added),
            is_hostile=message.is_hostile or is_hostile,
        )  # fmt: skip


def regenerate(talk: Talk, chance: random.Random) -> None:
    """Ask for the last answer once more, maybe with newer values."""
    while len(talk.messages) > 1 and isinstance(talk.messages[-1], Echo):
        talk.messages.pop()
    if chance.random() < 0.6:
        turn_a_value(talk, chance)


def turn_a_value(talk: Talk, chance: random.Random) -> None:
    """Change one or two volatile values, or white space."""
    for _ in range(chance.choice([1, 1, 2])):
        slots = talk.slots()
        if slots:
            at, part = chance.choice(slots)
            message = talk.messages[at]
            assert isinstance(message, Say)
            talk.messages[at] = changed(message, part, chance)
    users = [i for i, m in enumerate(talk.messages) if m.role in ("user", "system")]
    if users and chance.random() < 0.3:
        at = chance.choice(users)
        message = talk.messages[at]
        assert isinstance(message, Say)
        talk.messages[at] = replace(message, trail=chance.choice(["", " ", "\n\n"]))


def kinds_in_order(messages: Sequence[Spoken]) -> list[tuple[int, int, Slot]]:
    """All slots that stay in the prompt, in order: message, part, slot."""
    return [
        (i, k, part)
        for i, message in enumerate(messages)
        if isinstance(message, Say)
        for k, part in enumerate(message.parts)
        if isinstance(part, Slot) and part.kind != "billing_header"
    ]
