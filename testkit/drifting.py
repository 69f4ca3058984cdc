"""
Conversations whose volatile values drift, and a reader who checks what a model read.

The reader knows every literal word of a request, so he can take a prompt of the
built-in template apart: each volatile place holds some value, notes may stand at the
ends of user and tool messages, and turns may be the model's own words. Reading from
top to bottom, what is said last about each place must be what the client said now.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from sidecar.core.requests import Message, ToolCall
from testkit.chats import Chats, Client, Said, system, user, words
from testkit.volatile import CLOSER, OPENER

RESTATED = ("current_time", "message_id", "subagent_runtime", "inbound_context",
            "activation", "git_status")  # fmt: skip
LENT = ("current_time",)
_LABEL = re.compile(
    "(" + "|".join(k if k == "message_id" else k.replace("_", " ") for k in RESTATED)
    + r")(?: #(\d+))? \([a-z]+ message(?: \d+)?\):(?: (.*))?"
)  # fmt: skip
_NOTES = rf"((?:\n\n{OPENER}\n(?s:.*?){CLOSER})*)"
_EDGE = r"[ \n\t]*"
_NONE = "(none now)"
Place = tuple[str, int]  # kind, ordinal


@dataclass(frozen=True, slots=True)
class Slot:
    """A volatile place and the request's own value; "" if there is none now."""

    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Turned:
    """A turn of the model: what it said, and what the client made of it."""

    said: Said
    echo: Message


@dataclass(slots=True)
class Entry:
    """A message but the model's: its words, and the values between them."""

    role: str
    pieces: list[str | Slot]
    call_id: str | None = None

    @property
    def text(self) -> str:
        """As the client sends it."""
        return "".join(p if isinstance(p, str) else p.value for p in self.pieces)


@dataclass(slots=True)
class Thread:
    """A conversation and its values so far."""

    name: str
    client: Client
    rng: random.Random = field(default_factory=random.Random)
    history: list[Entry | Turned] = field(default_factory=list)
    system: Entry = field(default_factory=lambda: Entry("system", []))
    used: dict[str, set[str]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    def act(self, action: str, seed: int) -> None:
        """Let the client do something, and let values drift."""
        self.rng.seed(seed)
        getattr(self, f"_{action}")()
        self.system = self._system()
        for entry in self.history:
            if isinstance(entry, Entry):
                entry.pieces = [self._drifted(p) for p in entry.pieces]
        if not any(isinstance(e, Entry) and e.role == "user" for e in self.history):
            self._say()

    def messages(self) -> list[Message]:
        """The request's messages."""
        telemetry = f"x-anthropic-billing-header: cch={next(self.numbers):05x};"
        messages = [system(telemetry, self.system.text)]
        for entry in self.history:
            if isinstance(entry, Turned):
                messages.append(entry.echo)
            elif entry.role == "tool":
                text = (entry.text,)
                messages.append(Message("tool", text, tool_call_id=entry.call_id))
            else:
                make = user if entry.role == "user" else system
                messages.append(make(entry.text))
        return messages

    def answer(self) -> Said:
        """What the model says next."""
        number = next(self.numbers)
        text = self.rng.choice(["OK", "", f"Answer {self.name}{number}, {words(9)}."])
        calls = (ToolCall(f"call_{self.name}{number}", "look", f'{{"n": {number}}}'),)
        if text and self.rng.random() < 0.6:
            calls = ()
        said = Said(text, f"I think {self.name}{number}.", calls)
        self.history.append(Turned(said, said.echo))
        return said

    def _value(self, kind: str, value: str) -> Slot:
        self.used.setdefault(kind, {""}).add(value)
        return Slot(kind, value)

    def _fresh(self, kind: str) -> str:
        number = next(self.numbers)
        tag = f"{self.name}{number}"
        return {
            "current_time": f"2026-11-20T{number // 60 % 24:02}:{number % 60:02}:00Z",
            "message_id": f"m-{tag}",
            "subagent_runtime": f"{number}ms",
            "inbound_context": "## Inbound Context (trusted metadata)\nWho.\n```json\n"
            f'{{"chat": "{tag}"}}\n```\n\n',
            "activation": f"You are in a room {tag}.\n",
            "git_status": f"gitStatus: This is the status.\nStatus:\nM {tag}",
            "conversation_info": "Sender (untrusted metadata):\n```json\n"
            f'{{"id": "{tag}"}}\n```\n\n',
        }[kind]

    def _drifted(self, piece: str | Slot) -> str | Slot:
        if isinstance(piece, str) or self.rng.random() < 0.7:
            return piece
        if piece.kind == "edge_ws":
            return Slot("edge_ws", self.rng.choice(["", " ", "\n", "\n\n"]))
        known = sorted(self.used[piece.kind] - {""})
        options = {"conversation_info": ["", piece.value]}.get(piece.kind)
        fresh = self._fresh(piece.kind)
        return self._value(piece.kind, self.rng.choice(options or [fresh, *known[-2:]]))

    def _system(self) -> Entry:
        old = {p.kind: p for p in self.system.pieces if isinstance(p, Slot)}

        def slot(kind: str, may_go: float) -> Slot:
            known = old.get(kind) or self._value(kind, self._fresh(kind))
            if self.rng.random() < may_go:
                return Slot(kind, "")
            if not known.value or self.rng.random() < 0.2:
                return self._value(kind, self._fresh(kind))
            return known

        block = slot("inbound_context", 0.2)
        told = slot("activation", 0.2) if block.value else Slot("activation", "")
        return Entry("system", [
            self._edge(), f"You are X. {words(40)}\nCurrent time: ",
            slot("current_time", 0), f"\n{words(40)}\nWorking directory: /home/p\n",
            block, told, Slot("activation", ""),
            f"# Project Context\n{words(60)}\n", slot("git_status", 0),
        ])  # fmt: skip

    def _edge(self) -> Slot:
        return Slot("edge_ws", self.rng.choice(["", "", "", " ", "\n"]))

    def _say(self) -> None:
        if self.rng.random() < 0.2:
            self.history.append(
                Entry("system", ["Note.\nCurrent time: ", self._new("current_time"),
                                 f"\n{words(20)}"])
            )  # fmt: skip
        asked = f"Question {words(self.rng.randint(1, 40))}\n"
        pieces: list[str | Slot] = [asked]
        if self.rng.random() < 0.4:
            pieces.insert(0, self._new("conversation_info"))
        if self.rng.random() < 0.5:
            pieces += ['{"message_id": "', self._new("message_id"), '"}\nThen']
        if self.rng.random() < 0.3:
            pieces += ["\nStats: runtime ", self._new("subagent_runtime"), "\nthen"]
        pieces += [f" go on {self.name}{next(self.numbers)}.", self._edge()]
        self.history.append(Entry("user", pieces))

    def _new(self, kind: str) -> Slot:
        return self._value(kind, self._fresh(kind))

    def _results(self) -> None:
        """Send what the called functions gave, if any were called."""
        last = self.history[-1] if self.history else None
        if not isinstance(last, Turned) or not last.echo.tool_calls:
            return self._say()
        for call in last.echo.tool_calls:
            text = f"  Current time: 10:05\n{words(30)} {self.name}\n"
            self.history.append(Entry("tool", [text], call.id))
        return None

    def _again(self) -> None:
        """Ask the same again: the answer is not kept."""
        if self.history and isinstance(self.history[-1], Turned):
            self.history.pop()

    def _rewind(self) -> None:
        """Go back to before some user message."""
        users = [i for i, e in enumerate(self.history)
                 if isinstance(e, Entry) and e.role == "user"]  # fmt: skip
        if users:
            del self.history[self.rng.choice(users) :]
        self._say()

    def _edit(self) -> None:
        """Change a word of an earlier message."""
        entries = [e for e in self.history if isinstance(e, Entry)]
        if entries:
            pieces = self.rng.choice(entries).pieces
            at = max(i for i, p in enumerate(pieces) if isinstance(p, str))
            pieces[at] = f"{str(pieces[at]).rstrip()} edited"
        self._say()

    def _edit_answer(self) -> None:
        """Change what the model said, or its thinking."""
        turns = [i for i, e in enumerate(self.history) if isinstance(e, Turned)]
        if turns:
            at = self.rng.choice(turns)
            said = self.history[at].said  # type: ignore[union-attr]
            texts = (f"{said.text} edited".strip(),)
            changed = Message("assistant", texts, None, said.calls)
            if self.rng.random() < 0.5:
                changed = Message("assistant", said.echo.parts, "mine", said.calls)
            self.history[at] = Turned(said, changed)
        self._say()


class Reader:
    """Reads prompts of one thread, with what others may have lent it."""

    def __init__(self, thread: Thread, lenders: list[Thread]) -> None:
        self._thread = thread
        self._lenders = lenders
        self._places: list[Place] = []
        self._own: dict[Place, str] = {}
        self._order: list[Place | None] = []  # None: notes

    def read(self, text: str) -> dict[Place, str]:
        """
        What the prompt states last, by place.

        Raises:
            AssertionError: a word is missing, changed, added, moved or another's.
        """
        pattern = self._pattern()
        match = re.fullmatch(pattern, text)
        assert match, f"{text}\n--- is not ---\n{pattern}"
        stated: dict[Place, str] = {}
        for place, found in zip(self._order, match.groups(), strict=True):
            if place is None:
                stated |= self._noted(found)
            else:
                stated[place] = found
        return stated

    @property
    def own(self) -> dict[Place, str]:
        """What the client said, by place."""
        return self._own

    def _pattern(self) -> str:
        self._order, self._own, self._places = [], {}, []
        pieces = [self._message("system", self._thread.system)]
        for entry in self._thread.history:
            if isinstance(entry, Turned):
                pieces.append(self._turn(entry))
            else:
                pieces.append(self._message(entry.role, entry))
        text = "".join(pieces).replace(_RUN_END + _RUN_START, "")
        text = text.replace(_RUN_START, _USER).replace(_RUN_END, _CLOSE)
        return text + re.escape("<|im_start|>assistant\n")

    def _message(self, role: str, entry: Entry) -> str:
        inner = "".join(self._piece(p) for p in entry.pieces)
        if role == "tool":
            self._order.append(None)
            shown = re.escape("\n<tool_response>\n") + inner + _NOTES
            return _RUN_START + shown + re.escape("\n</tool_response>") + _RUN_END
        if role == "user":
            self._order.append(None)
        notes = _NOTES if role == "user" else ""
        return re.escape(f"<|im_start|>{role}\n") + inner + notes + _CLOSE

    def _piece(self, piece: str | Slot) -> str:
        if isinstance(piece, str):
            return re.escape(piece)
        if piece.kind == "edge_ws":
            return _EDGE
        number = sum(kind == piece.kind for kind, _ in self._places)
        place = (piece.kind, number)
        self._places.append(place)
        self._order.append(place)
        self._own[place] = piece.value
        lenders = self._lenders if piece.kind in LENT else [self._thread]
        values = {v for t in lenders for v in t.used.get(piece.kind, {""})}
        if piece.kind not in ("inbound_context", "activation", "conversation_info"):
            values -= {""}
        if piece.kind == "conversation_info" and piece.value:
            values = {piece.value}
        options = sorted(map(re.escape, values | {piece.value}), reverse=True)
        return f"({'|'.join(options)})"

    def _turn(self, turned: Turned) -> str:
        echo, said = turned.echo, turned.said
        thought = (echo.reasoning or "").strip("\n")
        shown = Said(echo.text, "", echo.tool_calls).raw
        options = [f"<think>\n{thought}\n</think>\n\n{shown}"]
        if echo == said.echo:
            options.append(said.raw)
        either = "|".join(map(re.escape, options))
        return re.escape("<|im_start|>assistant\n") + f"(?:{either})" + _CLOSE

    def _noted(self, notes: str) -> dict[Place, str]:
        stated: dict[Place, str] = {}
        place: Place | None = None
        for line in notes.splitlines():
            label = _LABEL.fullmatch(line)
            if label:
                place = (label[1].replace(" ", "_"), int(label[2] or 1) - 1)
                assert place in self._places, line
                stated[place] = label[3] or ""
            elif line in (OPENER, CLOSER):
                place = None
            elif place is not None:
                stated[place] += f"\n{line}"
        return {p: "" if v == _NONE else v for p, v in stated.items()}


_RUN_START, _RUN_END = "\ue010", "\ue011"  # a run of tool results is one user message
_USER = re.escape("<|im_start|>user")
_CLOSE = re.escape("<|im_end|>\n")


def check(thread: Thread, lenders: list[Thread], text: str) -> None:
    """Invariant II: nothing hidden, nothing added, and what is said last is true."""
    reader = Reader(thread, lenders)
    stated = reader.read(text)
    for place, own in reader.own.items():
        if place[0] in RESTATED:
            told = stated[place].strip("\n")
            assert told == own.strip("\n"), f"{place} in:\n{text}"


def step(chats: Chats, thread: Thread, lenders: list[Thread]) -> tuple[str, int]:
    """One turn; returns the prompt's text and the tokens reused by pinning."""
    prompt = chats.ask(thread.messages(), thread.client)
    check(thread, lenders, prompt.text)
    chats.answer(prompt, thread.answer())
    report = prompt.report
    return prompt.text, report.reused_len - report.strict_len
