"""
Commits a turn's lineage, healed turn and thread together, and forgets them so.

Four things explain each other, and are of use together only: the KV of what was
computed (held by handle: no arrays here), the lineage of finished prompts (which values
stand in that KV), the turns as the model wrote them, and each thread's last
conversation. So they are committed together at a turn's clean end, and forgotten
together. Eviction of KV alone is no forgetting: a prompt computed anew may still pin
and splice what it would have, and is the longer match for it; lineage and turns leave
by their own age and size.
"""

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sidecar.core.conversation import Conversation, ForgetFilter, conversation_of
from sidecar.core.ports import KVStore
from sidecar.core.prompt import ModelIds
from sidecar.core.requests import ClientInfo, ToolCall
from sidecar.infra.metrics import Counters
from sidecar.memory.healing_store import HealingStore, visible_hash
from sidecar.memory.known_turns import Healed, KnownTurn
from sidecar.memory.lineage import LineageIndex, LineageRecord
from sidecar.memory.session_turn_store import ToolNames, TurnStore
from sidecar.memory.tombstones import Context, Tombstones
from sidecar.memory.unwritten_turns import (
    Json,
    UnwrittenTurn,
    UnwrittenTurns,
    calls_json,
    calls_of,
    digest_of,
    lineage_of,
    turn_json,
    turn_of,
)
from sidecar.volatile.marked_message import SpanKey


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """
    How much is kept, and how long.

    Args:
        record_ttl_s: of lineage since its last use; 0: for ever. session_idle_s: the
            same of a session. healing_entries, healing_bytes: of turns.
        use_block_index: False scans all lineage, with the same result.
    """

    record_ttl_s: float
    session_idle_s: float
    healing_entries: int
    healing_bytes: int
    use_block_index: bool = True


@dataclass(frozen=True, slots=True)
class GenerationPrefix:
    """
    What a turn is written behind: the assistant header, and the rest of the generation
    prompt (the lead) as text and ids.
    """

    header: str
    lead: str
    lead_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """
    What will be remembered of a prompt if its answer ends cleanly.

    Args:
        turn: random id of the turn that is written.
        num_tokens: of the prompt. digests: of its messages (session_turn_store).
        context, values, vanishing: see healing_store.
        opening: None: the turn's ids cannot be put back.
        as_sent: whether the prompt says no more than the request does.
        ids: of the prompt.
        alike: digest of the first turn that looks so, by visible hash.
        behind: the turns that stand in the prompt (KnownTurn.behind).
        tools: that it offers.
    """

    record: LineageRecord
    turn: str
    num_tokens: int
    digests: tuple[str, ...]
    context: Context
    values: Mapping[SpanKey, str]
    vanishing: tuple[str, str] | None
    opening: GenerationPrefix | None
    as_sent: bool
    client: ClientInfo
    ids: ModelIds
    alike: Mapping[str, str] = field(default_factory=dict)
    behind: bytes = b""
    tools: ToolNames = ()

    @property
    def conversation(self) -> Conversation:
        """Who asked."""
        return self.record.conversation

    @property
    def shown_behind(self) -> Context:
        """What came before the answer, a message that no later prompt has included."""
        return self.context.behind(self.vanishing)


@dataclass(frozen=True, slots=True)
class AssistantOutput:
    """
    What a client was sent of a turn that ended cleanly.

    Args:
        sampled: its ids without the stop token; empty if they must not be put back
            (the turn ended at a stop string: nobody was shown all of it).
        others: visible hashes of the other choices, which are not remembered.
        started: ids of all calls that were begun, of all choices, ended or not.
    """

    text: str
    reasoning: str
    calls: Sequence[ToolCall]
    sampled: tuple[int, ...]
    others: tuple[str, ...] = ()
    started: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Forgotten:
    """
    What a `forget` let go: bytes of KV that came back, prompts, conversations.

    Args:
        num_slots, disk_bytes: files of KV on the disk.
    """

    kv_bytes: int = 0
    num_prompts: int = 0
    num_threads: int = 0
    num_slots: int = 0
    disk_bytes: int = 0

    def __add__(self, other: "Forgotten") -> "Forgotten":
        """Of both."""
        return Forgotten(
            self.kv_bytes + other.kv_bytes,
            self.num_prompts + other.num_prompts,
            self.num_threads + other.num_threads,
            self.num_slots + other.num_slots,
            self.disk_bytes + other.disk_bytes,
        )


class ConversationMemory:
    """
    The memory of one loaded model. Any thread.

    Args:
        kv: where the KV is. clear: lets go of some of it, or of all (None); the bytes
            that came back.
        decode: ids -> text. lineage_key: names what lineage is valid for: the model,
            and the rules by which its values were found.
        unwritten_turns: what is to be written to the disk; None: nothing is.
        tombstones: of all models that answer the same clients; None: it has its own.
    """

    def __init__(
        self,
        kv: KVStore,
        clear: Callable[[ForgetFilter | None], int],
        decode: Callable[[Sequence[int]], str],
        lineage_key: str,
        limits: MemoryLimits,
        unwritten_turns: UnwrittenTurns | None = None,
        tombstones: Tombstones | None = None,
    ) -> None:
        self.counters = Counters(("turn_write_refused",))
        self.lineage = LineageIndex(
            lineage_key,
            limits.record_ttl_s,
            use_blocks=limits.use_block_index,
        )
        self.healing = HealingStore(
            limits.healing_entries, limits.healing_bytes, tombstones
        )
        self.turns = TurnStore(limits.session_idle_s)
        self.lock = threading.RLock()  # what is kept and forgotten is so in one go
        self.unwritten_turns = unwritten_turns
        if unwritten_turns is not None:
            self.healing.tombstones.keep_log()
        self._kv = kv
        self._clear = clear
        self._lineage_key = lineage_key
        self._decode = decode
        self._texts: list[Callable[[], None]] = []

    @property
    def generation(self) -> int:
        """How often something was forgotten; what is read now is that new."""
        with self.lock:
            return self._kv.generation

    def commit(self, pending_turn: PendingTurn, said: AssistantOutput) -> None:
        """Remember a cleanly finished turn, if nothing was forgotten since."""
        with self.lock:
            if self.is_current(pending_turn):
                self._commit(pending_turn, said)
            else:
                self.note_unkept(pending_turn, said)

    def _commit(self, pending_turn: PendingTurn, said: AssistantOutput) -> None:
        self.lineage.add(pending_turn.record)
        conversation = pending_turn.conversation
        parents, num_tokens = pending_turn.client.parents, pending_turn.num_tokens
        if not self.turns.advance(
            conversation, pending_turn.digests, num_tokens, parents, pending_turn.tools
        ):
            self.counters.add("turn_write_refused")
        self.healing.remember_calls(said.calls, conversation)
        visible = visible_hash(said.text, said.calls)
        turn, ids = None, [pending_turn.turn, *(call.id for call in said.calls)]
        context = pending_turn.shown_behind
        lost = list(said.others)
        if visible is not None and pending_turn.opening is not None and said.sampled:
            turn = self._turn(visible, pending_turn, pending_turn.opening, said)
            turn = self.healing.record(turn, ids)
            if said.calls and (text_alone := visible_hash(said.text, ())):
                lost.append(text_alone)  # its client may leave a refused call out
        elif visible is not None:
            lost.append(visible)
        own_ids = {call.id for call in said.calls} if turn else set()
        self.healing.drop_ids(set(said.started) - own_ids, conversation)
        for shown in lost:
            self.healing.drop(shown, context, conversation)
        if self.unwritten_turns is not None:
            fields = {
                "scope": conversation.as_json(),
                "lineage_key": self._lineage_key,
                "thread": [list(pending_turn.digests), num_tokens, list(parents)],
                "calls": calls_json(said.calls),
                "said": turn_json(turn, ids) if turn else None,
            }
            kept = UnwrittenTurn(
                num_tokens, digest_of(pending_turn.ids), pending_turn.record, fields
            )
            self.unwritten_turns.add(pending_turn.turn, kept)

    def save(self, ids: ModelIds, salt: str) -> tuple[list[Json], np.ndarray]:
        """
        What was said on a path of KV and is not written yet.

        Returns:
            Turns as JSON, oldest first; canonical ids of the last one's prompt.
        """
        if self.unwritten_turns is None:
            return [], np.empty(0, np.uint32)
        return self.unwritten_turns.of_path(ids, salt)

    @property
    def tombstones(self) -> Tombstones:
        """What hides turns that were saved before."""
        return self.healing.tombstones

    def saved(self, kept: Sequence[Json]) -> None:
        """These were written."""
        if self.unwritten_turns is not None:
            self.unwritten_turns.drop([fields["turn"] for fields in kept])

    def load(self, kept: Sequence[Json], canonical: np.ndarray) -> None:
        """
        Know again what was saved with a path.

        Raises:
            KeyError, ValueError, TypeError: it is not what was saved.
        """
        with self.lock:
            for fields in kept:
                self._load(fields)
            if not kept or "lineage" not in kept[-1]:
                return
            if kept[-1].get("lineage_key") == self._lineage_key:
                self.lineage.add(lineage_of(kept[-1]["lineage"], canonical))

    def _load(self, fields: Json) -> None:
        conversation = conversation_of(fields["scope"])
        digests, num_tokens, parents = fields["thread"]
        names, known = tuple(map(str, parents)), list(map(str, digests))
        self.turns.advance(conversation, known, int(num_tokens), names)
        self.healing.remember_calls(calls_of(fields["calls"]), conversation)
        if fields["said"] is not None:
            self.healing.load(*turn_of(fields["said"]))

    def answer_begun(self, pending_turn: PendingTurn) -> None:
        """Know that an answer is given; `answer_ended` once it is kept, or noted."""
        context, asked_by = pending_turn.shown_behind, pending_turn.conversation
        self.healing.note_asked(pending_turn.context, asked_by, pending_turn.behind)
        self.healing.answer_begun(context, asked_by)

    def answer_ended(self, pending_turn: PendingTurn) -> None:
        """Know that it is given no more."""
        self.healing.answer_ended(pending_turn.shown_behind, pending_turn.conversation)

    def note_unkept(self, pending_turn: PendingTurn, said: AssistantOutput) -> None:
        """
        Know that a client was shown what will not be remembered.

        If it goes on from there, an older turn that looks like it is not meant.
        """
        visible = visible_hash(said.text, said.calls)
        context = pending_turn.shown_behind
        conversation = pending_turn.conversation
        shown = [visible] if visible is not None else []
        with self.lock:
            self.healing.drop_ids(said.started, conversation)
            for unkept in (*shown, *said.others):
                self.healing.drop(unkept, context, conversation)
            if shown or said.others:  # any beginning of it may be what its client kept
                self.healing.drop_all(context, conversation)

    def keep_past(self, pending_turn: PendingTurn) -> None:
        """
        Remember what a prompt looked like whose answer was broken off.

        Some of it may have been computed: asked again with a new clock, it goes on.
        """
        with self.lock:
            if self.is_current(pending_turn):
                self.lineage.add(pending_turn.record)

    def is_current(self, pending_turn: PendingTurn) -> bool:
        """Whether nothing was forgotten since a prompt was begun."""
        return self._kv.is_current(pending_turn.conversation)

    def reopen(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Serve the same model, loaded again; other places are to be named anew."""
        with self.lock:
            self._decode = decode
            self._texts = []

    def also_forget(self, clear: Callable[[], None]) -> None:
        """Name another place that holds text of conversations."""
        self._texts.append(clear)

    def forget(self, forget_filter: ForgetFilter | None = None) -> Forgotten:
        """
        Forget everything, or some conversations: KV, lineage, turns, threads, at once.

        What was begun before goes on, and leaves nothing behind. What other
        conversations said of these, or go on from, stays theirs.
        """
        with self.lock:
            self._kv.new_generation(forget_filter)
            found = self.lineage.forget(forget_filter), self.turns.forget(forget_filter)
            self.healing.forget(forget_filter)
            if self.unwritten_turns is not None:
                self.unwritten_turns.forget(forget_filter)
            for clear in self._texts:
                clear()
        return Forgotten(self._clear(forget_filter), *found)

    def _turn(
        self,
        visible: str,
        pending_turn: PendingTurn,
        opening: GenerationPrefix,
        said: AssistantOutput,
    ) -> KnownTurn:
        raw = (*opening.lead_ids, *said.sampled)
        turn = Healed(
            opening.header,
            raw,
            self._decode(raw),
            said.reasoning,
            pending_turn.vanishing,
            opening.lead,
        )
        context = pending_turn.shown_behind
        conversation = pending_turn.conversation
        return KnownTurn(
            visible,
            context,
            conversation,
            turn,
            pending_turn.values,
            pending_turn.as_sent,
            alike=pending_turn.alike.get(visible, ""),
            behind=pending_turn.behind,
        )


def new_turn() -> str:
    """A random id for a turn that will be written."""
    return secrets.token_hex(16)
