"""Which turns of a conversation are the model's own, and may be put back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sidecar.core.requests import ClientInfo, Message, Thought
from sidecar.core.turn_token import read_token
from sidecar.pipeline.canonical import MarkedMessage, canonical_text, mark
from sidecar.pipeline.healing import (
    Context,
    ContextHasher,
    Healed,
    HealingStore,
    is_edited,
)
from sidecar.pipeline.rules import RuleSet
from sidecar.pipeline.splicing import Frame
from sidecar.pipeline.vanishing import place_of, split_vanishing


@dataclass(frozen=True, slots=True)
class Recalled:
    """
    A conversation, and what is known of its past.

    Args:
        marked: all messages in the order in which the model reads them.
        kept: those that the client will send again.
        healed: the model's own turns, by index in `marked`.
        context: what all that is kept comes to.
        vanishing: the message that will not be sent again: the canonical context that
            it stands behind, its text.
    """

    marked: Sequence[MarkedMessage]
    kept: Sequence[MarkedMessage]
    healed: dict[int, Healed]
    context: Context
    vanishing: tuple[str, str] | None = None


def recall(
    store: HealingStore,
    messages: Sequence[Message],
    client: ClientInfo,
    frame: Frame | None,
    rulesets: tuple[RuleSet | None, RuleSet | None],
) -> Recalled:
    """
    Find the model's own turns, and where a vanishing message was first said.

    Args:
        rulesets: for spans, and for a message that may stand elsewhere than it was
            sent; None: there are none.
    """
    to_mark, to_move = rulesets
    kept, vanishing = split_vanishing(messages, to_move)
    marked = mark(kept, to_mark)
    own, contexts = find_turns(store, marked, client)
    healed = {
        index: turn
        for index, turn in own.items()
        if frame is not None and turn.header in frame.headers
    }
    if vanishing is None:
        return Recalled(marked, marked, healed, contexts[-1])
    last_turn = own[max(own)] if own else None
    at = place_of(vanishing.text, last_turn, contexts)
    moved = mark([*kept[:at], vanishing, *kept[at:]], to_mark)
    healed = {i + (i >= at): turn for i, turn in healed.items()}
    said = (contexts[at].canonical, vanishing.text)
    return Recalled(moved, marked, healed, contexts[-1], said)


def find_turns(
    store: HealingStore, marked: Sequence[MarkedMessage], client: ClientInfo
) -> tuple[dict[int, Healed], list[Context]]:
    """Turns found again, by message index; contexts before each, and behind all."""
    hasher = ContextHasher()
    found: dict[int, Healed] = {}
    contexts = [hasher.value]
    for index, item in enumerate(marked):
        message = item.message
        visible = None
        if message.role == "assistant":
            visible = store.visible_hash(message)
            turn = _own_turn(store, message, visible, (contexts[-1], client))
            if turn:
                found[index] = turn
        texts = (canonical_text(item.pieces), message.text)
        hasher.add(message.role, None if visible else texts, visible)
        contexts.append(hasher.value)
    return found, contexts


def _own_turn(
    store: HealingStore,
    message: Message,
    visible: str | None,
    asked: tuple[Context, ClientInfo],
) -> Healed | None:
    """The turn that a message echoes: by its tokens, its calls' ids, its text."""
    context, client = asked
    if visible is None:
        return None
    if any(thought.token for thought in message.thoughts):
        turns = [_turn_of(thought) for thought in message.thoughts]
        ids = [turn for turn in turns if turn is not None]
        if len(ids) < len(turns):
            return None  # thinking of somebody else's, or edited
        return _issued(store, ids, message, (visible, client))
    ids = [call.id for call in message.tool_calls]
    turn = _issued(store, ids, message, (visible, client))
    turn = turn or store.find(visible, context, client.api_key_id, client.session)
    return None if turn is None or is_edited(message, turn) else turn


def _issued(
    store: HealingStore,
    ids: Sequence[str],
    message: Message,
    asked: tuple[str, ClientInfo],
) -> Healed | None:
    visible, client = asked
    turn = store.issued(ids, visible, client.api_key_id)
    if turn is None and len(message.parts) > 1:
        # Its text may have come in several blocks, with thinking between them.
        whole = replace(message, parts=("".join(message.parts),))
        turn = store.issued(ids, store.visible_hash(whole), client.api_key_id)
    return turn


def _turn_of(thought: Thought) -> str | None:
    """The turn that a piece of thinking is of, if it comes back as it was sent."""
    token = read_token(thought.token)
    if token is None:
        return None
    is_whole = not thought.text.strip() or token.is_of(thought.text)
    return token.turn if is_whole else None
