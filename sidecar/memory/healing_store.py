"""
The healing store: turns as the model wrote them, found by what a client echoes.

Clients echo visible text and parsed calls; the KV holds what the model really wrote,
with its thinking and its own call markup. A turn is found again by what the client
saw of it and by what came before it.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sidecar.core.conversation import (
    IMPLICIT,
    Conversation,
    ForgetFilter,
    is_implicit,
)
from sidecar.core.json_bytes import load_json
from sidecar.core.requests import Message, Tool, ToolCall, call_key
from sidecar.infra.lru import Lru
from sidecar.memory.known_turns import Asks, Healed, KnownTurn
from sidecar.memory.tombstones import (
    SEVERAL,
    Context,
    PlaceKeys,
    Tombstones,
    call_name,
    hash_text,
    place_keys,
)
from sidecar.volatile.marked_message import MarkedMessage, SpanKey

_MAX_CANDIDATES = 8  # of one place


@dataclass(frozen=True, slots=True)
class TurnQuery:
    """
    Who looks for a turn.

    Args:
        session: None if the client names none.
        values: what tells who asks, before the turn, as the client sends it now.
        threads: whose ids stand before the turn.
        proved_until: the index of the last message with such an id; -1: there is none.
        proofs: the values of the requests for which those ids were issued.
        tells: whether a kind of value tells who asks, where or what.
    """

    api_key: str | None
    session: str | None
    values: Mapping[SpanKey, str] = field(default_factory=dict)
    threads: Collection[Conversation] = ()
    proved_until: int = -1
    proofs: Sequence[Mapping[SpanKey, str]] = ()
    tells: Callable[[str], bool] = lambda kind: True

    def num_agreeing(self, turn: KnownTurn) -> int:
        """Values that stood in the turn's request and stand in this one."""
        return sum(self.values.get(k) == value for k, value in turn.values.items())

    @property
    def conversation(self) -> Conversation:
        """Who looks for it, whatever the thread."""
        return Conversation(self.api_key, self.session or IMPLICIT)

    def owns(self, turn: KnownTurn) -> bool:
        """
        Whether a turn was said in this conversation.

        By the client's own word, or, where it names no session, by turns before it that
        are known by ids. Others may have begun with the same ids (a copied example, a
        fork). So all that tells who asks is the same, or stood in a request for which
        one of the ids was issued.
        """
        if self.session is not None:
            return turn.conversation.session == self.session
        if turn.conversation not in self.threads:
            return False
        keys = self.values.keys() | turn.values.keys()
        changed = (k for k in keys if self.values.get(k) != turn.values.get(k))
        return all(self._may_have_been(k, turn.values.get(k, "")) for k in changed)

    def _may_have_been(self, key: SpanKey, value: str) -> bool:
        """Whether this conversation may have said a value that it says no more."""
        if key[0] > self.proved_until:
            return False
        return not self.tells(key[2]) or is_proved(self.proofs, key, value)

    def has_values_of(self, turn: KnownTurn) -> bool:
        """Whether all that identified who asked is the same, no more and no less."""
        return is_implicit(turn.conversation.session) and self.values == turn.values


@dataclass(frozen=True, slots=True)
class Continued:
    """
    The thread that a request goes on with, by the calls that it carries.

    Args:
        first, last: indexes of the messages with the first and the last of them.
    """

    conversation: Conversation
    first: int
    last: int


def is_proved(
    proofs: Sequence[Mapping[SpanKey, str]], key: SpanKey, value: str
) -> bool:
    """
    Whether a value stood in a request for which an id was issued that is sent now.

    Args:
        proofs: the values of those requests.
    """
    return any(values.get(key, "") == value for values in proofs)


Defaults = Mapping[str, Mapping[str, Any]]  # tool, argument -> value
_Place = tuple[str, str, str | None]  # visible hash, canonical context, API key


class HealingStore:
    """
    Turns by their place, least recently used out first. Any thread.

    Args:
        max_entries: places. max_bytes: of all turns.
    """

    def __init__(
        self, max_entries: int, max_bytes: int, tombstones: Tombstones | None = None
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._turns: OrderedDict[_Place, list[KnownTurn]] = OrderedDict()
        self._num_bytes = 0
        self._calls: Lru[str, tuple[ToolCall, Conversation]] = Lru(
            4 * max_entries, max_bytes, lambda key, known: 400 + len(known[0].arguments)
        )
        self._by_id: Lru[str, KnownTurn] = Lru(
            4 * max_entries, max_bytes, lambda key, turn: turn.num_bytes
        )
        self._asked: Lru[str, bytes] = Lru(
            4 * max_entries, max_bytes, lambda key, behind: 100 + len(behind)
        )
        self._last_places: Lru[str, tuple[str, str]] = Lru(
            4 * max_entries, 4 * max_entries, lambda *_: 1
        )
        self._lock = threading.Lock()
        self.tombstones = Tombstones() if tombstones is None else tombstones
        self.num_ambiguous = 0

    def record(self, turn: KnownTurn, ids: Sequence[str] = ()) -> KnownTurn:
        """
        Keep a cleanly finished turn, at its time; the same place replaces an older one.

        Args:
            ids: random ones that were issued for it: the turn's own, its calls'.
        """
        turn = replace(turn, time=self.tombstones.now())
        self._add(turn, ids)
        return turn

    def load(self, turn: KnownTurn, ids: Sequence[str]) -> None:
        """
        Know a turn again that comes from a file; `find` asks what else was shown.
        """
        self.tombstones.see(turn.time)
        self._add(turn, ids)

    def _add(self, turn: KnownTurn, ids: Sequence[str]) -> None:
        """Keep a turn among those of its place, the newest first."""
        self.tombstones.shown(turn.keys, turn.time, turn.healed.digest, turn.alike)
        self._note_place(turn.keys, turn.healed.digest, turn.context)
        for issued in ids:
            self._by_id.put(call_key(issued), turn)
        with self._lock:
            place = (turn.visible, turn.context.canonical, turn.conversation.tenant)
            known = self._turns.setdefault(place, [])
            same = [other for other in known if _same_place(other, turn)]
            if any(other.time > turn.time for other in same):
                return
            self._remove(known, same)
            known.append(turn)
            known.sort(key=lambda other: -other.time)  # stable
            self._num_bytes += turn.num_bytes
            self._remove(known, known[_MAX_CANDIDATES:])
            self._turns.move_to_end(place)
            self._evict()

    def drop(self, visible: str, context: Context, conversation: Conversation) -> None:
        """
        Put back no turn of a conversation that looks like this one.

        What was shown there is not kept, and a turn that looks like it may not be what
        the client goes on from, though the clock said something else.
        """
        keys = place_keys(visible, context, conversation)
        self.tombstones.shown_unkept(keys)
        self._note_place(keys, SEVERAL, context)

    def _note_place(self, keys: PlaceKeys, words: str, context: Context) -> None:
        """Know what came before the last turn that looks so."""
        for key in keys.shown_last.names:
            self._last_places.put(key, (words, context.literal))

    def drop_ids(self, ids: Iterable[str], conversation: Conversation) -> None:
        """
        Put back no turn for calls of which these were the ids.

        What they were issued for is not kept, and its client may have completed it.
        """
        tenant = conversation.tenant
        self.tombstones.bury(call_name(tenant, issued) for issued in ids if issued)

    def is_dropped(self, ids: Iterable[str], api_key: str | None) -> bool:
        """Whether one of these ids was issued for what is not kept."""
        names = (call_name(api_key, issued) for issued in ids if issued)
        return any(self.tombstones.is_marked(name) for name in names)

    def answer_begun(self, context: Context, conversation: Conversation) -> None:
        """
        Put back no turn behind such a prompt while an answer is given there.

        Its client may go away and go on from what it was shown, before that is known.
        """
        self.tombstones.answer_begun(place_keys("", context, conversation))

    def answer_ended(self, context: Context, conversation: Conversation) -> None:
        """Go by what is known again; called once for each that was begun."""
        self.tombstones.answer_ended(place_keys("", context, conversation))

    def drop_all(self, context: Context, conversation: Conversation) -> None:
        """Put back no turn behind a prompt whose answer broke off: any may be read."""
        self.tombstones.bury(place_keys("", context, conversation).broken_off)

    def remember_calls(
        self, calls: Sequence[ToolCall], conversation: Conversation
    ) -> None:
        """Keep what the model gave: clients add default arguments to their echo."""
        for call in calls:
            self._calls.put(call_key(call.id), (call, conversation))

    def continued(
        self, marked: Sequence[MarkedMessage], api_key: str | None, session: str
    ) -> "Continued | None":
        """
        The thread a conversation goes on with, known by the calls it carries.

        Whoever sends ids that were issued there continues that thread, whatever was
        done to its first message since.
        """
        continued: Continued | None = None
        for index, item in enumerate(marked):
            for call in item.message.tool_calls:
                known = self._calls.get(call_key(call.id)) if call.id else None
                if known is None or known[1].tenant != api_key:
                    continue
                found = known[1]
                both_unnamed = is_implicit(found.session) and is_implicit(session)
                if continued is None and (found.session == session or both_unnamed):
                    continued = Continued(found, index, index)
                elif continued is not None and found == continued.conversation:
                    continued = replace(continued, last=index)
        return continued

    def issued(
        self, ids: Sequence[str], visible: str | None, api_key: str | None
    ) -> KnownTurn | None:
        """
        The turn for which all these ids were issued, if it shows what it did then.
        """
        found = [self._by_id.get(call_key(i)) if i else None for i in ids]
        first = found[0] if found else None
        if first is None or any(item != first for item in found):
            return None
        is_whole = first.visible == visible and first.conversation.tenant == api_key
        return first if is_whole else None

    def issued_any(self, ids: Sequence[str], api_key: str | None) -> KnownTurn | None:
        """The first turn for which one of these ids was issued, whatever it showed."""
        found = (self._by_id.get(call_key(i)) for i in ids if i)
        own = (turn for turn in found if turn and turn.conversation.tenant == api_key)
        return next(own, None)

    def forget(self, forget_filter: ForgetFilter | None) -> None:
        """Forget everything, or some conversations."""
        is_gone = forget_filter.covers if forget_filter else lambda _: True
        with self._lock:
            for place, turns in list(self._turns.items()):
                self._remove(turns, [t for t in turns if is_gone(t.conversation)])
                if not turns:
                    del self._turns[place]
        self._calls.pop_if(lambda _, known: is_gone(known[1]))
        self._by_id.pop_if(lambda _, turn: is_gone(turn.conversation))

    def visible_hash(self, message: Message, defaults: Defaults) -> str | None:
        """The visible hash of an echoed message, by what the model gave."""
        calls = [self._as_given(call, defaults) for call in message.tool_calls]
        return visible_hash(message.text, calls)

    def _as_given(self, echoed: ToolCall, defaults: Defaults) -> ToolCall:
        """What the model gave, if the client did no more than add defaults."""
        known, _ = self._calls.get(call_key(echoed.id)) or (None, None)
        if known is None or known.name != echoed.name:
            return echoed
        is_same = _extends(echoed, known, defaults.get(echoed.name, {}))
        return known if is_same else echoed

    def find(
        self, visible: str, context: Context, turn_query: TurnQuery
    ) -> KnownTurn | None:
        """
        The turn behind an echoed message, of the same API key.

        The conversation's own behind the same canonical context, those that its ids
        prove first, and of these one behind the very same prompt, else the one whose
        values fit best; else one of another conversation behind the very same prompt,
        in which nothing else stood. Where the client names no session, only ids tell
        that a turn is its own. All else is another conversation's, and must have had
        the same values besides. If turns that differ were shown to who asks,
        none: nothing tells a try that was replaced from a sub-agent of equal words, and
        a guess would be a lie. A turn behind another context is never taken for its
        text alone: one thread's thinking stood behind another's "Done.".
        """
        place = (visible, context.canonical, turn_query.api_key)
        with self._lock:
            known = self._turns.get(place)
            if not known:
                return None
            self._turns.move_to_end(place)
            hides = self.tombstones.hides
            shown = [turn for turn in known if not hides(turn.keys, turn.time)]
            own = [turn for turn in shown if turn_query.owns(turn)]
            proved = [turn for turn in own if turn.conversation in turn_query.threads]
            candidates = proved or own or self._of_others(shown, context, turn_query)
            equal = [turn for turn in candidates if turn.context == context]
            found = equal or (_best(candidates, turn_query) if own else [])
            if len({turn.healed.digest for turn in found}) == 1:
                turn = found[0]
                if self._is_only_one(turn, context if own else None):
                    return turn
            self.num_ambiguous += 1
            return None

    def note_asked(
        self, context: Context, asked_by: Conversation, behind: bytes
    ) -> None:
        """Know which turns stood in a prompt (KnownTurn.behind)."""
        self._asked.put(_prompt_key(context, asked_by), behind)

    def asked(self, context: Context, asked_by: Conversation) -> bytes | None:
        """The turns that stood in an earlier prompt of the same letters."""
        return self._asked.get(_prompt_key(context, asked_by))

    def is_last(self, turn: KnownTurn, asks: Asks) -> bool:
        """Whether nothing that looks like a turn was shown after it to who asks."""
        return self._is_it(asks.last(turn), turn)

    def is_once(self, turn: KnownTurn, asks: Asks) -> bool:
        """Whether nothing else that looks like a turn was shown to who asks."""
        return self._is_it(asks.once(turn), turn)

    def last_place(self, turn: KnownTurn, asks: Asks) -> str | None:
        """What came, to the letter, before the last turn that looks like one."""
        key = asks.last(turn)
        digest, literal = self._last_places.get(key) or (SEVERAL, None)
        return literal if self.tombstones.is_only(key, digest) else None

    def _is_it(self, key: str, turn: KnownTurn) -> bool:
        is_only = self.tombstones.is_only(key, turn.healed.digest)
        is_marked = self.tombstones.is_marked(key)
        return is_only and (is_marked or not self.tombstones.has_lost_marks)

    def _is_only_one(self, turn: KnownTurn, asked_at: Context | None) -> bool:
        """
        Whether no other turn was shown that its client may go on from.

        Args:
            asked_at: where its own conversation asks for it; None: another one does.
        """
        digest, is_only = turn.healed.digest, self.tombstones.is_only
        if asked_at is None:
            return is_only(turn.keys.anybody, digest)
        is_named = not is_implicit(turn.conversation.session)
        # A chat may have been copied, and go on under another name.
        if is_named and not is_only(turn.keys.prompt, digest):
            return False
        if is_only(turn.keys.conversation, digest):
            return True
        is_same = turn.context.identity == asked_at.identity
        return is_same and is_only(turn.keys.identity, digest)

    def _of_others(
        self, shown: Sequence[KnownTurn], context: Context, turn_query: TurnQuery
    ) -> list[KnownTurn]:
        """
        Turns of one place that may be put back in a conversation not their own.

        None where whoever asks may have been shown something else: an answer broke off
        there, or the same words were thought otherwise anywhere in its session. Its own
        turn may stand behind another text by now (a date of which no rule knows), and
        its mark may be among those that too many newer ones have pushed out.
        """
        asked_at = place_keys("", context, turn_query.conversation)
        if self.tombstones.has_broken_off(asked_at):
            return []
        if turn_query.session is not None and self.tombstones.has_lost_marks:
            return []
        return [
            turn
            for turn in shown
            if turn.as_sent
            and (turn_query.session is not None or turn_query.has_values_of(turn))
            and self._may_be_of(turn, turn_query)
        ]

    def _may_be_of(self, turn: KnownTurn, turn_query: TurnQuery) -> bool:
        asked_at = place_keys(turn.visible, turn.context, turn_query.conversation)
        digest = turn.alike or turn.healed.digest
        return self.tombstones.is_only(asked_at.session, digest)

    def _remove(self, known: list[KnownTurn], gone: Sequence[KnownTurn]) -> None:
        """Take turns out of a place; holds the lock."""
        for turn in gone:
            known.remove(turn)
            self._num_bytes -= turn.num_bytes

    def _evict(self) -> None:
        while self._turns and (
            len(self._turns) > self._max_entries or self._num_bytes > self._max_bytes
        ):
            _, gone = self._turns.popitem(last=False)
            self._num_bytes -= sum(turn.num_bytes for turn in gone)


def _prompt_key(context: Context, asked_by: Conversation) -> str:
    session = IMPLICIT if is_implicit(asked_by.session) else asked_by.session
    return hash_text(json.dumps([asked_by.tenant, session, context.literal]))


def _same_place(a: KnownTurn, b: KnownTurn) -> bool:
    return a.context == b.context and a.conversation == b.conversation


def _best(turns: Sequence[KnownTurn], turn_query: TurnQuery) -> list[KnownTurn]:
    """Those that agree with the request in most values."""
    maximum = max(map(turn_query.num_agreeing, turns), default=0)
    return [turn for turn in turns if turn_query.num_agreeing(turn) == maximum]


def visible_hash(text: str, calls: Sequence[ToolCall]) -> str | None:
    """Hash of what a client was shown; None if that is nothing."""
    text = text.strip()
    if not text and not calls:
        return None
    shown = {"t": text, "c": [[call.name, _arguments(call)] for call in calls]}
    return hash_text(json.dumps(shown, sort_keys=True, ensure_ascii=False))


def defaults_of(tools: Sequence[Tool]) -> Defaults:
    """The default values that the tools' schemas name."""
    found = {}
    for tool in tools:
        properties = tool.parameters.get("properties")
        schemas = properties.items() if isinstance(properties, dict) else ()
        found[tool.name] = {
            name: schema["default"]
            for name, schema in schemas
            if isinstance(schema, dict) and "default" in schema
        }
    return found


def _extends(echoed: ToolCall, known: ToolCall, defaults: Mapping[str, Any]) -> bool:
    """Whether all that was added are defaults: anything else the model must read."""
    given, now = _arguments(known), _arguments(echoed)
    if isinstance(given, dict) and isinstance(now, dict):
        added = {name: now[name] for name in now if name not in given}
        if any(_json(defaults.get(name, ...)) != _json(added[name]) for name in added):
            return False
        given = {**now, **given}
    return _json(given) == _json(now)


def _json(value: Any) -> str:
    """Text that tells 1 from true and from 1.0; "" for what is no JSON."""
    return "" if value is ... else json.dumps(value, sort_keys=True)


class ContextHasher:
    """
    SHA-256 chained over the messages so far.

    Args:
        around: what the prompt says besides its messages, such as the tools that it
            offers, as text; of the letter only.
    """

    def __init__(self, around: str = "") -> None:
        self._canonical = hashlib.sha256()
        self._literal = hashlib.sha256(around.encode("utf-8", "surrogatepass"))
        self._identity = hashlib.sha256()
        self._channel = hashlib.sha256()
        self._sender = ""

    @property
    def value(self) -> Context:
        """The hashes of all messages added."""
        return Context(
            self._canonical.hexdigest(),
            self._literal.hexdigest(),
            self._identity.hexdigest(),
            self._channel.hexdigest(),
            self._sender,
        )

    def add(
        self,
        role: str,
        texts: tuple[str, str] | None,
        visible: str | None,
        unseen: str = "",
        identity: Sequence[str] = (),
    ) -> None:
        """
        Add a message: its canonical and literal text, or what was visible of it.

        Args:
            unseen: what stands in the prompt besides, such as the thinking of its turn;
                of the letter only.
            identity: its values that tell who asks.
        """
        canonical, literal = texts or ("", "")
        self._canonical.update(_line(role, canonical, visible))
        literal = f"{literal}\0{unseen}" if unseen else literal
        self._literal.update(_line(role, literal, visible))
        for value in identity:
            self._identity.update(_line(role, value, None))
            if role == "system":
                self._channel.update(_line(role, value, None))
            else:
                self._sender = hash_text(f"{self._sender} {value}")
        if role == "assistant":
            self._sender = ""


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
        return load_json(call.arguments) if call.arguments.strip() else {}
    except ValueError:  # not JSON, or nested beyond reason
        return {"__raw__": call.arguments}
