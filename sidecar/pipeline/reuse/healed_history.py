"""
Which turns of a conversation are the model's own, and may be put back.

And where a last message stands that a client sends with each request and keeps in none.
OpenClaw tells its agent in this way what goes on: within a tool loop it says the same
each time, behind all that came since, and a prefix would end before it at every
request. So while it is unchanged it stays where it was first said, and the model reads
it once, there; when it says something else it stands where the client has put it. What
was said last is known by the model's last turn in the conversation: that turn's prompt
had it.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from sidecar.core.conversation import IMPLICIT, Conversation
from sidecar.core.requests import ChatRequest, ClientInfo, Message, Thought, text_of
from sidecar.core.turn_token import read_token
from sidecar.memory.healing_store import (
    ContextHasher,
    Defaults,
    HealingStore,
    TurnQuery,
    defaults_of,
    is_edited,
)
from sidecar.memory.known_turns import Asks, Healed, KnownTurn
from sidecar.memory.tombstones import Context
from sidecar.pipeline.template.chat_template import defined_tools
from sidecar.pipeline.template.turn_delimiters import TurnDelimiters
from sidecar.volatile.marked_message import MarkedMessage, Span, SpanKey, canonical_text
from sidecar.volatile.rules import SILENT_KINDS, RuleSet
from sidecar.volatile.spans import mark


def split_vanishing(
    messages: Sequence[Message], ruleset: RuleSet | None
) -> tuple[Sequence[Message], Message | None]:
    """The messages that will be kept, and the last one if it will not."""
    *kept, last = messages
    if ruleset is None or not kept or not ruleset.is_vanishing(last.role, last.text):
        return messages, None
    return kept, last


def place_of(text: str, last_turn: Healed | None, contexts: Sequence[Context]) -> int:
    """
    The message before which a vanishing message stands.

    Args:
        last_turn: the model's last turn in this conversation.
        contexts: before each message that is kept, and behind them all; the last
            one's index is the end.
    """
    end = len(contexts) - 1
    if last_turn is None or last_turn.vanishing is None:
        return end
    behind, said = last_turn.vanishing
    places = [i for i, context in enumerate(contexts) if context.canonical == behind]
    return places[0] if said == text and places else end


_PLACE = struct.Struct(">I8s")  # of a turn in a prompt: message index, digest
_SENDER = "conversation_info"  # the block by which a message names who sends it
_VANISHING: SpanKey = (-1, 0, "vanishing", 0)


@dataclass(frozen=True, slots=True)
class HealedHistory:
    """
    A conversation, and what is known of its past.

    Args:
        marked: all messages in the order in which the model reads them.
        kept: those that the client will send again.
        healed: the model's own turns, by index in `marked`.
        context: what all that is kept comes to.
        values: those that identify who asks, where and what.
        conversation: of the model's last turn in it, known by its ids if any is; None:
            there is none.
        proved_until: index of the last one that is known by ids, which were issued for
            it alone; -1: none is.
        earlier_values: the same values when the model's own turns were written.
        proofs: the same of each request for which an id was issued that stands in it.
        alike: the digest of the first turn that looks so, by visible hash.
        behind: the turns that are put back (`_packed`).
        in_place: indexes of those before which nothing has changed but volatile values.
        vanishing: the message that will not be sent again: the canonical context that
            it stands behind, its text.
    """

    marked: Sequence[MarkedMessage]
    kept: Sequence[MarkedMessage]
    healed: dict[int, Healed]
    context: Context
    values: Mapping[SpanKey, str]
    conversation: Conversation | None
    proved_until: int
    earlier_values: Mapping[SpanKey, str]
    proofs: Sequence[Mapping[SpanKey, str]]
    alike: Mapping[str, str]
    behind: bytes
    in_place: Collection[int]
    vanishing: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class _Past:
    """
    The model's own turns in a conversation.

    Args:
        answers: indexes of messages that an assistant wrote.
        turns: found again, by message index. issued: those of them that are known by
            their ids: their threads' other turns are this conversation's as well.
        contexts: before each message, and behind all.
        values: those that identify who asks, where and what.
        proofs: the same of each request for which an id was issued that stands in it.
    """

    answers: Sequence[int]
    turns: Mapping[int, KnownTurn]
    issued: Collection[int]
    contexts: Sequence[Context]
    values: Mapping[SpanKey, str]
    proofs: Sequence[Mapping[SpanKey, str]]

    @property
    def last(self) -> KnownTurn | None:
        """The last of them."""
        return self.turns[max(self.turns)] if self.turns else None

    @property
    def alike(self) -> dict[str, str]:
        """The digest of the first turn that looks so, by visible hash."""
        turns = [self.turns[index] for index in sorted(self.turns, reverse=True)]
        return {turn.visible: turn.alike or turn.healed.digest for turn in turns}

    @property
    def in_place(self) -> list[int]:
        """
        Indexes of those before which nothing has changed but volatile values.

        Behind a history that was cut, indexes of messages are others than they were.
        """
        contexts = self.contexts
        return [i for i in sorted(self.turns) if _is_at(self.turns[i], contexts[i])]

    @property
    def earlier_values(self) -> dict[SpanKey, str]:
        """The values that identified who asks in the requests that they answered."""
        turns = (self.turns[index] for index in self.in_place)
        return {key: value for turn in turns for key, value in turn.values.items()}

    @property
    def conversation(self) -> Conversation | None:
        """Of the last one that is known by its ids, else of the last one."""
        known = self.turns[max(self.issued)] if self.issued else self.last
        return known.conversation if known else None


def heal(
    store: HealingStore,
    request: ChatRequest,
    delimiters: TurnDelimiters | None,
    rulesets: tuple[RuleSet | None, RuleSet | None],
    check: Callable[[], None],
) -> HealedHistory:
    """
    Find the model's own turns, and where a vanishing message was first said.

    Args:
        request: its messages and template options as the model is to read them.
        rulesets: for spans, and for a message that may stand elsewhere than it was
            sent; None: there are none.
        check: called before each message; what it raises ends the work.
    """
    to_mark, to_move = rulesets
    kept, vanishing = split_vanishing(request.messages, to_move)
    marked = mark(kept, to_mark, check)
    past = _find_turns(store, marked, request, to_mark, frozenset())
    if unsure := _unsure(store, past, request.client):
        past = _find_turns(store, marked, request, to_mark, unsure)
    healed = {
        index: turn.healed
        for index, turn in past.turns.items()
        if delimiters is not None and turn.healed.header in delimiters.headers
    }
    found = HealedHistory(
        marked,
        marked,
        healed,
        past.contexts[-1],
        past.values,
        past.conversation,
        max(past.issued, default=-1),
        past.earlier_values,
        past.proofs,
        past.alike,
        _packed(past.turns),
        past.in_place,
    )
    if vanishing is None:
        return found
    last = past.last.healed if past.last else None
    at = place_of(vanishing.text, last, past.contexts)
    if at < len(kept) and kept[at].text == vanishing.text:
        at = len(kept)  # this client does keep it: it has said it again
    return replace(
        found,
        marked=mark([*kept[:at], vanishing, *kept[at:]], to_mark, check),
        healed={i + (i >= at): turn for i, turn in healed.items()},
        in_place=[i + (i >= at) for i in past.in_place],
        values={**past.values, _VANISHING: vanishing.text},  # no later request has it
        earlier_values=_moved(past.earlier_values, at),
        proofs=[_moved(values, at) for values in past.proofs],
        vanishing=(past.contexts[at].canonical, vanishing.text),
    )


def _moved(values: Mapping[SpanKey, str], at: int) -> dict[SpanKey, str]:
    """Values by the places of their spans where a message was put in."""
    return {
        (message + (message >= at), place, kind, nth): said
        for (message, place, kind, nth), said in values.items()
    }


def _find_turns(
    store: HealingStore,
    marked: Sequence[MarkedMessage],
    request: ChatRequest,
    ruleset: RuleSet | None,
    unsure: Collection[int],
) -> _Past:
    """
    The model's own turns.

    Args:
        unsure: indexes of messages that only their ids tell to be turns.
    """
    client, defaults = request.client, defaults_of(request.tools)
    hasher = ContextHasher(_around(request))
    found: dict[int, KnownTurn] = {}
    issued: set[int] = set()
    values: dict[SpanKey, str] = {}
    threads: set[Conversation] = set()
    proofs: list[Mapping[SpanKey, str]] = []
    contexts = [hasher.value]
    asked = 0  # where the question begins
    for index, item in enumerate(marked):
        message = item.message
        visible, turn = None, None
        if message.role == "assistant":
            visible = store.visible_hash(message, defaults)
            turn_query = TurnQuery(
                client.api_key_id,
                client.session,
                values,
                threads,
                max(issued, default=-1),
                proofs,
                lambda kind: ruleset is None or ruleset.policy(kind).tells,
            )
            turn, is_issued = _own_turn(
                store, message, visible, contexts[-1], turn_query, defaults
            )
            question, asked = marked[asked:index], index + 1
            is_by_place = turn is not None and not is_issued
            if is_by_place and (index in unsure or _is_of_another(turn, question)):
                turn = None
            if turn:
                found[index] = turn
            if turn and is_issued:
                issued.add(index)
                threads.add(turn.conversation)
            proofs += _proofs(store, message, client)
        telling = _telling(item, ruleset)
        values |= telling
        texts = (canonical_text(item.pieces), message.text)
        unseen = turn.healed.digest if turn else _reasoning(message)
        identity = _identity(telling, ruleset)
        hasher.add(message.role, None if visible else texts, visible, unseen, identity)
        contexts.append(hasher.value)
    answers = [i for i, item in enumerate(marked) if item.message.role == "assistant"]
    return _Past(answers, found, issued, contexts, values, proofs)


def _proofs(
    store: HealingStore, message: Message, client: ClientInfo
) -> list[Mapping[SpanKey, str]]:
    """The values of the request for which a message's ids were issued."""
    ids = _ids_of(message) if client.session is None else []
    proof = store.issued_any(ids, client.api_key_id)
    return [] if proof is None else [proof.values]


def _is_of_another(turn: KnownTurn | None, question: Sequence[MarkedMessage]) -> bool:
    """Whether somebody else asked what a turn answered: his block stands here now."""
    return turn is not None and any(
        turn.values.get(span.key, span.value) != span.value
        for item in question
        if item.message.role == "user"
        for span in item.pieces
        if isinstance(span, Span) and span.kind == _SENDER
    )


def _is_at(turn: KnownTurn, context: Context) -> bool:
    """Whether a turn was said behind the same words."""
    return turn.context.canonical == context.canonical


def _unsure(store: HealingStore, past: _Past, client: ClientInfo) -> frozenset[int]:
    """
    Indexes of turns that are found by their place, where another may be meant.

    A client may cut its history, or delete from it: then the words of a later turn
    stand where an earlier one stood. So all is as it was in an earlier prompt. What no
    such prompt covers is put back only if nothing else was shown that looks so.
    """
    asked_by = Conversation(client.api_key_id, client.session or IMPLICIT)
    threads = {past.turns[i].conversation for i in past.issued}

    def asks(index: int) -> Asks:
        is_own = past.turns[index].conversation in threads
        in_thread = client.session is None and is_own
        return Asks(past.contexts[index], asked_by, in_thread)

    covered, until = _covered(store, past, asked_by, asks)
    found = _contradicted(past)
    for index in past.turns.keys() - past.issued - found:
        turn = past.turns[index]
        if index < until and covered.get(index) == _short_digest(turn):
            continue
        is_end = index == until and store.is_last(turn, asks(index))
        if not is_end and not store.is_once(turn, asks(index)):
            found.add(index)
    return frozenset(found)


def _contradicted(past: _Past) -> set[int]:
    """Turns in whose place the next one that is known by its ids had another."""
    found = set()
    later: bytes | None = None  # what stood before that one
    for index in sorted(past.turns, reverse=True):
        turn = past.turns[index]
        if index in past.issued:
            later = turn.behind
        elif later is not None and _stood(later, index) != _short_digest(turn):
            found.add(index)
    return found


def _covered(
    store: HealingStore,
    past: _Past,
    asked_by: Conversation,
    asks: Callable[[int], Asks],
) -> tuple[Mapping[int, bytes], int]:
    """
    The turns of the earlier prompt that a request goes on from, and where that ended.

    It is that of the last turn here which is known by ids, or after which nothing was
    shown that looks like it; or one of the same letters (an answer was lost, or there
    were several), if it is where what looks like its turns was said last.
    """
    for index in (len(past.contexts) - 1, *sorted(past.answers, reverse=True)):
        turn = past.turns.get(index)
        if (
            turn is not None
            and _is_at(turn, past.contexts[index])
            and (index in past.issued or store.is_last(turn, asks(index)))
        ):
            return _unpacked(turn.behind), index
        behind = store.asked(past.contexts[index], asked_by)
        if behind is not None:
            return _said_last(store, past, _unpacked(behind), index, asks), index
    return {}, -1


def _said_last(
    store: HealingStore,
    past: _Past,
    behind: Mapping[int, bytes],
    until: int,
    asks: Callable[[int], Asks],
) -> Mapping[int, bytes]:
    """The turns of an earlier prompt whose last that looks so is in this one."""
    places = {past.contexts[i].literal for i in (*past.answers, until)}
    return {
        index: digest
        for index, digest in behind.items()
        if index in past.turns
        and store.last_place(past.turns[index], asks(index)) in places
    }


def _packed(turns: Mapping[int, KnownTurn]) -> bytes:
    """Which turns stand in a prompt: message indexes and the beginnings of digests."""
    return b"".join(_PLACE.pack(i, _short_digest(turns[i])) for i in sorted(turns))


def _unpacked(behind: bytes) -> dict[int, bytes]:
    """The beginnings of digests by message index."""
    whole = len(behind) // _PLACE.size * _PLACE.size
    return dict(_PLACE.iter_unpack(behind[:whole]))


def _stood(behind: bytes, index: int) -> bytes | None:
    """The beginning of the digest at a message index."""
    places = range(0, len(behind) - _PLACE.size + 1, _PLACE.size)
    at = bisect_left(places, index, key=lambda i: _PLACE.unpack_from(behind, i)[0])
    if at == len(places):
        return None
    found, digest = _PLACE.unpack_from(behind, places[at])
    return bytes(digest) if found == index else None


def _short_digest(turn: KnownTurn) -> bytes:
    return bytes.fromhex(turn.healed.digest[:16])


def _around(request: ChatRequest) -> str:
    """What a prompt says besides its messages."""
    options = sorted(request.template_kwargs.items())
    return "".join(repr(tool.raw) for tool in defined_tools(request)) + repr(options)


def _reasoning(message: Message) -> str:
    """What a client says that the model thought; it may stand in the prompt."""
    return f"reasoning: {message.reasoning}" if message.reasoning else ""


def _telling(item: MarkedMessage, ruleset: RuleSet | None) -> dict[SpanKey, str]:
    """
    The values of a message by which conversations of equal words are distinguished.

    A clock too: that of another conversation shows another time.
    """
    if ruleset is None:
        return {}
    spans = [piece for piece in item.pieces if isinstance(piece, Span)]
    return {s.key: s.value for s in spans if s.value and s.kind not in SILENT_KINDS}


def _identity(telling: Mapping[SpanKey, str], ruleset: RuleSet | None) -> list[str]:
    """Values that tell who asks; what gets newer with time (a git status) does not."""
    if ruleset is None:
        return []
    policies = {key: ruleset.policy(key[2]) for key in telling}
    return [telling[key] for key, p in policies.items() if p.tells and not p.newer]


def _own_turn(
    store: HealingStore,
    message: Message,
    visible: str | None,
    context: Context,
    turn_query: TurnQuery,
    defaults: Defaults,
) -> tuple[KnownTurn | None, bool]:
    """
    The turn that a message echoes: by its tokens, its calls' ids, its text.

    And whether it is known by ids.
    """
    if visible is None:
        return None, False
    if any(thought.token for thought in message.thoughts):
        turns = [_turn_of(thought) for thought in message.thoughts]
        ids = [turn for turn in turns if turn is not None]
        if len(ids) < len(turns):
            return None, False  # thinking of somebody else's, or edited
        issued = _issued(store, ids, message, visible, turn_query.api_key, defaults)
        return issued, True
    ids = [call.id for call in message.tool_calls]
    issued = _issued(store, ids, message, visible, turn_query.api_key, defaults)
    api_key = turn_query.api_key
    if issued is None and (
        store.issued_any(ids, api_key) or store.is_dropped(ids, api_key)
    ):
        return None, False  # a part of that turn: it is no older one that looks so
    turn = issued or store.find(visible, context, turn_query)
    if turn is None or is_edited(message, turn.healed):
        return None, False
    return turn, issued is not None


def _issued(
    store: HealingStore,
    ids: Sequence[str],
    message: Message,
    visible: str,
    api_key: str | None,
    defaults: Defaults,
) -> KnownTurn | None:
    turn = store.issued(ids, visible, api_key)
    if turn is None and len(message.parts) > 1:
        # Its text may have come in several blocks, with thinking between them.
        whole = replace(message, parts=("".join(map(text_of, message.parts)),))
        turn = store.issued(ids, store.visible_hash(whole, defaults), api_key)
    return turn


def _ids_of(message: Message) -> list[str]:
    """Those that were issued for a turn, as its client sends them back."""
    turns = [_turn_of(thought) for thought in message.thoughts if thought.token]
    return [*filter(None, turns), *(call.id for call in message.tool_calls)]


def _turn_of(thought: Thought) -> str | None:
    """The turn that a piece of thinking is of, if it comes back as it was sent."""
    token = read_token(thought.token)
    if token is None:
        return None
    is_whole = not thought.text.strip() or token.is_of(thought.text)
    return token.turn if is_whole else None
