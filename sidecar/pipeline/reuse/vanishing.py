"""
A last message that a client sends with each request and keeps in none.

OpenClaw tells its agent in this way what goes on. Within a tool loop it says the same
each time, behind all that came since: a prefix would end before it at every request.
So while it is unchanged it stays where it was first said, and the model reads it once,
there; when it says something else it stands where the client has put it. What was said
last is known by the model's last turn in the conversation: that turn's prompt had it.
"""

from collections.abc import Sequence

from sidecar.core.requests import Message
from sidecar.memory.healing_store import Context, Healed
from sidecar.volatile.rules import RuleSet


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
