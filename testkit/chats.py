"""
Conversations through the real pipeline, without a model.

The store is a plain list of what was kept; the "model" says what the test decides.
"""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sidecar.core.conversation import Conversation, ForgetFilter, Generations
from sidecar.core.prompt import Hit, ModelIds
from sidecar.core.requests import (
    ChatRequest,
    ClientInfo,
    Message,
    Thinking,
    Tool,
    ToolCall,
)
from sidecar.memory import conversation_memory
from sidecar.memory.conversation_memory import ConversationMemory, MemoryLimits
from sidecar.pipeline.prepare import Pipeline, PipelineSettings, PreparedPrompt
from sidecar.volatile.rules import RuleSet, load_rules
from testkit.chat_templates import tokenizer_of

SETTINGS = PipelineSettings(
    default_thinking=True,
    preserve_thinking=True,
    canonicalize=True,
    pinning=True,
    splicing=True,
    min_gain=64,
)
LIMITS = MemoryLimits(
    record_ttl_s=0, session_idle_s=0, healing_entries=2000, healing_bytes=64 << 20
)


class StoredPrompts:
    """A KV store without KV: every stored sequence, compared id by id."""

    def __init__(self) -> None:
        self.sequences: list[tuple[int, ...]] = []
        self._generations = Generations()

    @property
    def generation(self) -> int:
        """How often something was forgotten."""
        return self._generations.now

    def add(self, ids: Sequence[int]) -> None:
        """Keep a sequence."""
        self.sequences.append(tuple(ids))

    def new_generation(self, forget_filter: ForgetFilter | None) -> None:
        """What is stored is still there."""
        self._generations.end(forget_filter)

    def is_current(self, conversation: Conversation) -> bool:
        """Whether nothing of a conversation was forgotten since."""
        return self._generations.is_current(conversation)

    def forget(self, forget_filter: ForgetFilter | None) -> int:
        """Keep none: nobody knows whose they are."""
        self._generations.end(forget_filter)
        self.sequences.clear()
        return 0

    def lookup(self, model_ids: ModelIds, conversation: Conversation) -> Hit:
        """What of a prompt is stored."""
        return Hit(self.match_len(model_ids, conversation.salt))

    def match_len(self, model_ids: ModelIds, salt: str = "") -> int:
        """Length of the longest stored prefix; one id is always left to compute."""
        longest = max((common_len(s, model_ids) for s in self.sequences), default=0)
        return min(longest, max(0, len(model_ids) - 1))


def common_len(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


@dataclass(frozen=True, slots=True)
class Said:
    """An answer of the model, as the client is shown it."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def raw(self) -> str:
        """As the built-in model writes it."""
        parts = [f"<think>\n{self.reasoning}\n</think>\n"] if self.reasoning else []
        parts += [self.text] if self.text else []
        parts += [
            f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n'
            "</tool_call>"
            for call in self.calls
        ]
        return "\n".join(parts)

    @property
    def echo(self) -> Message:
        """The turn as a client sends it back: without its thinking."""
        parts = (self.text,) if self.text else ()
        return Message("assistant", parts, None, self.calls)


@dataclass(slots=True)
class Client:
    """Who asks: what a request says besides its messages."""

    session: str | None = "s"
    key: str | None = "k"
    agent: str | None = None
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = True
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = sys.maxsize


class Chats:
    """
    A pipeline, its memory and its store.

    Args:
        kind: whose tokenizer and template. tokenizer: another than that kind's.
        settings: what differs from SETTINGS.
    """

    def __init__(
        self,
        kind: str = "builtin",
        *,
        policy: Mapping[str, str] | None = None,
        rules: RuleSet | None = None,
        tokenizer: Any = None,
        limits: MemoryLimits | None = None,
        **settings: Any,
    ) -> None:
        self.tokenizer = tokenizer or tokenizer_of(kind)
        self.is_lossless = kind != "spm"  # its decoder adds and takes spaces
        self.store = StoredPrompts()
        self.settings = replace(SETTINGS, **settings)
        self.memory = ConversationMemory(
            self.store, self.store.forget, self.tokenizer.decode, kind, limits or LIMITS
        )
        self.pipeline = Pipeline(
            self.tokenizer, "<think>", rules or load_rules(None, policy),
            self.settings, self.memory, self.store.lookup,
        )  # fmt: skip

    def ask(
        self, messages: Sequence[Message], client: Client | None = None
    ) -> PreparedPrompt:
        """Prepare a request; what comes out is what it says it is."""
        prompt = self.prepare(messages, client or Client())
        self.check(prompt)
        return prompt

    def prepare(self, messages: Sequence[Message], client: Client) -> PreparedPrompt:
        """Prepare a request, and no more."""
        request = ChatRequest(
            "r",
            "m",
            tuple(messages),
            tools=client.tools,
            thinking=Thinking(client.thinking),
            template_kwargs=client.kwargs,
            client=ClientInfo(client.session, client.agent, client.key),
        )
        return self.pipeline.prepare(request, "", client.max_tokens)

    def check(self, prompt: PreparedPrompt) -> None:
        """Ids and text are the same; marks never leak; boundaries are in place."""
        assert "\ue000" not in prompt.text
        if self.is_lossless:
            assert self.decode(prompt.model_ids) == prompt.text
        depths = [b.depth for b in prompt.model.boundaries]
        assert depths == sorted(set(depths))
        assert all(0 < depth <= len(prompt.model_ids) for depth in depths)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, nothing cleaned up; without a start token put before it."""
        return str(self.tokenizer.decode(list(ids)))

    def reuse(self, prompt: PreparedPrompt) -> int:
        """How much of a prompt the store holds, in tokens."""
        return self.store.match_len(prompt.model_ids)

    def answer(
        self,
        prompt: PreparedPrompt,
        said: Said,
        *,
        raw: str | None = None,
        sampled: Sequence[int] | None = None,
    ) -> tuple[int, ...]:
        """Finish a turn: it is remembered, its KV is kept; returns the sampled ids."""
        raw = said.raw if raw is None else raw
        ids = tuple(self.sample(raw) if sampled is None else sampled)
        shown = conversation_memory.AssistantOutput(
            said.text, said.reasoning, said.calls, ids
        )
        self.memory.answer_begun(prompt.pending_turn)
        self.memory.commit(prompt.pending_turn, shown)
        self.memory.answer_ended(prompt.pending_turn)
        self.store.add((*prompt.model_ids, *ids))
        return ids

    def sample(self, raw: str) -> tuple[int, ...]:
        """Ids of a text, not as a tokenizer would cut it but as a model may."""
        cuts = sorted(random.Random(raw).sample(range(len(raw) + 1), len(raw) // 8))
        pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        ids: list[int] = []
        for piece in pieces:
            ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return tuple(ids)

    def turn(
        self,
        messages: Sequence[Message],
        said: Said | str = "Fine.",
        client: Client | None = None,
    ) -> "Turn":
        """Ask and answer."""
        prompt = self.ask(messages, client)
        reused = self.reuse(prompt)
        said = Said(said) if isinstance(said, str) else said
        sampled = self.answer(prompt, said)
        return Turn(prompt, reused, sampled, said)

    def plain_text(
        self, messages: Sequence[Message], client: Client | None = None
    ) -> str:
        """T: what the template makes of the messages alone, without the pipeline."""
        client = client or Client()
        kwargs: dict[str, Any] = {"enable_thinking": bool(client.thinking)}
        if self.settings.preserve_thinking:
            kwargs["preserve_thinking"] = True
        return str(
            self.tokenizer.apply_chat_template(
                [_entry(m) for m in messages],
                tools=[dict(t.raw) for t in client.tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **{**kwargs, **client.kwargs},
            )
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished turn: its prompt, what of it was reused, what was sampled."""

    prompt: PreparedPrompt
    reused: int
    sampled: tuple[int, ...]
    said: Said

    @property
    def issued(self) -> str:
        """The random id that was issued for it."""
        return self.prompt.pending_turn.turn

    @property
    def text(self) -> str:
        """What the model read."""
        return self.prompt.text

    @property
    def kept(self) -> int:
        """Tokens kept of this turn."""
        return len(self.prompt.model_ids) + len(self.sampled)


def _entry(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [
            {"id": c.id, "type": "function",
             "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.tool_calls
        ]  # fmt: skip
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def system(*parts: str) -> Message:
    """A system message."""
    return Message("system", parts)


def user(*parts: str) -> Message:
    """A user message."""
    return Message("user", parts)


def assistant(text: str, *calls: ToolCall, reasoning: str | None = None) -> Message:
    """A turn as a client sends it."""
    return Message("assistant", (text,) if text else (), reasoning, calls)


def result(text: str, call_id: str = "call_1") -> Message:
    """A tool's result."""
    return Message("tool", (text,), tool_call_id=call_id)


def tool(name: str) -> Tool:
    """An offered function without parameters."""
    parameters = {"type": "object", "properties": {}}
    function = {"name": name, "description": "x", "parameters": parameters}
    return Tool(name, parameters, {"type": "function", "function": function})


def words(count: int, seed: int = 0) -> str:
    """That many words, about as many tokens or more."""
    rng = random.Random(seed)
    known = "the file of a model and its cache are read by one server for each turn"
    return " ".join(rng.choice(known.split()) for _ in range(count))
