"""Which turns of a conversation are the model's own, and may be put back."""

from collections.abc import Sequence

from sidecar.core.requests import ClientInfo, Message
from sidecar.pipeline.canonical import MarkedMessage, canonical_text
from sidecar.pipeline.healing import (
    Context,
    ContextHasher,
    Healed,
    HealingStore,
    is_edited,
)
from sidecar.pipeline.splicing import Frame


def find_turns(
    store: HealingStore,
    marked: Sequence[MarkedMessage],
    client: ClientInfo,
    frame: Frame | None,
) -> tuple[dict[int, Healed], Context]:
    """Turns found again, by message index; the context behind all messages."""
    hasher = ContextHasher()
    found: dict[int, Healed] = {}
    for index, item in enumerate(marked):
        message = item.message
        visible = None
        if message.role == "assistant":
            visible = store.visible_hash(message)
            turn = visible and store.find(
                visible, hasher.value, client.api_key_id, client.session
            )
            if turn and _may_splice(message, turn, frame):
                found[index] = turn
        texts = (canonical_text(item.pieces), message.text)
        hasher.add(message.role, None if visible else texts, visible)
    return found, hasher.value


def _may_splice(message: Message, turn: Healed, frame: Frame | None) -> bool:
    return (
        frame is not None
        and turn.header == frame.header
        and not is_edited(message, turn)
    )
