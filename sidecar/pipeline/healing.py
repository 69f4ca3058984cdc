"""
Gives the model back its own words.

Clients echo visible text and parsed calls; the KV holds what the model really wrote,
with its thinking and its own call markup. A turn is found again by what the client
saw of it and by what came before it.
"""

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core.requests import Message, ToolCall
from sidecar.infra.lru import Lru
from sidecar.pipeline.canonical import MarkedMessage
from sidecar.pipeline.turns import Scope, is_implicit

_MOST_CANDIDATES = 8  # of one place


@dataclass(frozen=True, slots=True)
class Healed:
    """
    A turn as the model wrote it.

    Args:
        header: the assistant header it was written behind.
        vanishing: what its prompt was told last and the client does not keep: the
            canonical context that it stood behind, its text.
        raw_ids: what followed that header: the rest of the generation prompt and the
            sampled ids, without the stop token.
        raw_text: those ids as text. reasoning: what the client was sent of it.
        lead: the rest of the generation prompt, with which they begin.
    """

    header: str
    raw_ids: tuple[int, ...]
    raw_text: str
    reasoning: str
    vanishing: tuple[str, str] | None = None
    lead: str = ""

    @property
    def digest(self) -> str:
        """A short name, equal for equal ids."""
        return hashlib.sha256(array("I", self.raw_ids)).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Context:
    """What came before a turn: with sentinels for spans, and to the letter."""

    canonical: str
    literal: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    context: Context
    scope: Scope
    healed: Healed

    @property
    def num_bytes(self) -> int:
        return 8 * len(self.healed.raw_ids) + 4 * len(self.healed.raw_text) + 200


_Place = tuple[str, str, str | None]  # visible hash, canonical context, API key


class HealingStore:
    """
    Turns by their place, least recently used out first. Any thread.

    A place is the visible hash, what came before, and the key: an agent that answers
    "Done." a hundred times has a hundred places.

    Args:
        max_entries: places. max_bytes: of all turns.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._turns: OrderedDict[_Place, list[_Candidate]] = OrderedDict()
        self._num_bytes = 0
        self._calls: Lru[str, ToolCall] = Lru(
            4 * max_entries, max_bytes, lambda key, call: 200 + len(call.arguments)
        )
        self._scopes: Lru[str, Scope] = Lru(4 * max_entries, max_bytes, _weigh_scope)
        self._by_id: Lru[str, tuple[str, _Candidate]] = Lru(
            4 * max_entries, max_bytes, lambda key, item: item[1].num_bytes
        )
        self._lock = threading.Lock()
        self.num_ambiguous = 0

    def record(
        self,
        visible: str,
        context: Context,
        scope: Scope,
        healed: Healed,
        ids: Sequence[str] = (),
    ) -> None:
        """
        Keep a cleanly finished turn; the same place replaces an older one.

        Args:
            ids: random ones that were issued for it: the turn's own, its calls'.
        """
        candidate = _Candidate(context, scope, healed)
        for issued in ids:
            self._by_id.put(call_key(issued), (visible, candidate))
        with self._lock:
            place = (visible, context.canonical, scope.api_key)
            known = self._turns.setdefault(place, [])
            for old in [c for c in known if _same_place(c, candidate)]:
                known.remove(old)
                self._num_bytes -= old.num_bytes
            known.insert(0, candidate)
            self._num_bytes += candidate.num_bytes
            for old in known[_MOST_CANDIDATES:]:
                self._num_bytes -= old.num_bytes
            del known[_MOST_CANDIDATES:]
            self._turns.move_to_end(place)
            self._evict()

    def remember_calls(self, calls: Sequence[ToolCall], scope: Scope) -> None:
        """Keep what the model gave: clients add default arguments to their echo."""
        for call in calls:
            self._calls.put(call_key(call.id), call)
            self._scopes.put(call_key(call.id), scope)

    def continued(
        self, marked: Sequence[MarkedMessage], api_key: str | None, session: str
    ) -> tuple[int, Scope] | None:
        """
        The thread a conversation goes on with, told by the calls it carries.

        Whoever sends ids that were issued there continues that thread, whatever was
        done to its first message since. The index is that of the message.
        """
        for index, item in enumerate(marked):
            for call in item.message.tool_calls:
                scope = self._scopes.get(call_key(call.id)) if call.id else None
                if scope and (scope.api_key, scope.session) == (api_key, session):
                    return index, scope
        return None

    def issued(
        self, ids: Sequence[str], visible: str | None, api_key: str | None
    ) -> Healed | None:
        """
        The turn for which all these ids were issued, if it shows what it did then.

        Ids are random: whatever became of the messages before, it is that turn.
        """
        found = [self._by_id.get(call_key(i)) if i else None for i in ids]
        first = found[0] if found else None
        if first is None or any(item != first for item in found):
            return None
        known_visible, candidate = first
        is_whole = known_visible == visible and candidate.scope.api_key == api_key
        return candidate.healed if is_whole else None

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._turns.clear()
            self._num_bytes = 0
        for known in (self._calls, self._scopes, self._by_id):
            known.clear()

    def visible_hash(self, message: Message) -> str | None:
        """The visible hash of an echoed message, by what the model gave."""
        calls = [self._as_given(call) for call in message.tool_calls]
        return visible_hash(message.text, calls)

    def _as_given(self, echoed: ToolCall) -> ToolCall:
        """What the model gave, if the client did no more than add arguments."""
        known = self._calls.get(call_key(echoed.id))
        return known if known and _extends(echoed, known) else echoed

    def find(
        self, visible: str, context: Context, api_key: str | None, session: str | None
    ) -> Healed | None:
        """
        The turn behind an echoed message, of the same API key.

        Equal context within the session first, then a context equal to the letter
        (a turn may quote volatile values, and those never leave their thread).
        Anything else is ambiguous: None. A turn behind another context is never taken
        for the text alone: one thread's thinking stood behind another's "Done.".
        `session` is None if the client names none.
        """
        place = (visible, context.canonical, api_key)
        with self._lock:
            known = self._turns.get(place)
            if not known:
                return None
            self._turns.move_to_end(place)
            equal = [c for c in known if c.context == context]
            own = [c for c in known if _is_of(c.scope, session)]
            found = [c for c in equal if c in own] or own or equal
            if found:
                return found[0].healed
            self.num_ambiguous += 1
            return None

    def _evict(self) -> None:
        while self._turns and (
            len(self._turns) > self._max_entries or self._num_bytes > self._max_bytes
        ):
            _, gone = self._turns.popitem(last=False)
            self._num_bytes -= sum(c.num_bytes for c in gone)


def _weigh_scope(key: str, scope: Scope) -> int:
    return 200


def _same_place(a: _Candidate, b: _Candidate) -> bool:
    return a.context == b.context and a.scope == b.scope


def _is_of(scope: Scope, session: str | None) -> bool:
    return scope.session == session if session else is_implicit(scope.session)


def visible_hash(text: str, calls: Sequence[ToolCall]) -> str | None:
    """Hash of what a client was shown; None if that is nothing."""
    text = text.strip()
    if not text and not calls:
        return None
    shown = {"t": text, "c": [[call.name, _arguments(call)] for call in calls]}
    return _hash(json.dumps(shown, sort_keys=True, ensure_ascii=False))


def _extends(echoed: ToolCall, known: ToolCall) -> bool:
    given, now = _arguments(known), _arguments(echoed)
    if isinstance(given, dict) and isinstance(now, dict):
        given = {**now, **given}
    return echoed.name == known.name and given == now


def call_key(call_id: str) -> str:
    """A call id as clients return it: some drop the underscore."""
    return call_id.replace("_", "")


class ContextHasher:
    """SHA-256 chained over the messages so far."""

    def __init__(self) -> None:
        self._canonical = hashlib.sha256()
        self._literal = hashlib.sha256()

    @property
    def value(self) -> Context:
        """The hashes of all messages added."""
        return Context(self._canonical.hexdigest(), self._literal.hexdigest())

    def add(
        self, role: str, texts: tuple[str, str] | None, visible: str | None
    ) -> None:
        """Add a message: its canonical and literal text, or what was visible of it."""
        canonical, literal = texts or ("", "")
        self._canonical.update(_line(role, canonical, visible))
        self._literal.update(_line(role, literal, visible))


def is_edited(message: Message, healed: Healed) -> bool:
    """Whether the client echoes reasoning that is not what it was sent."""
    if message.reasoning is None or not message.reasoning.strip():
        return False
    return message.reasoning.strip() != healed.reasoning.strip()


def _line(role: str, text: str, visible: str | None) -> bytes:
    entry = json.dumps([role, text, visible], ensure_ascii=False)
    return entry.encode("utf-8", "surrogatepass") + b"\n"


def _arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments) if call.arguments.strip() else {}
    except (ValueError, RecursionError):  # not JSON, or nested beyond reason
        return {"__raw__": call.arguments}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
