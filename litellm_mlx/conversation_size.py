"""
How many messages, parts and calls a body may hold.

LiteLLM walks through all of them several times for a cloud model, on the thread that
serves everybody: 20,000 results of tools held it for 3 s.
"""

from collections.abc import Iterator

MAX_ITEMS = 10_000
_LISTS = ("content", "parts", "tool_calls")  # of a message, and of a tool's result


def fits(conversation: object) -> bool:
    """Whether a list of messages holds few enough; any other value does."""
    if not isinstance(conversation, list):
        return True
    return all(number < MAX_ITEMS for number, _ in enumerate(_items(conversation)))


def _items(conversation: list[object]) -> Iterator[object]:
    for message in conversation:
        yield message
        for part in _inside(message):
            yield part
            yield from _inside(part)


def _inside(item: object) -> Iterator[object]:
    if isinstance(item, dict):
        for name in _LISTS:
            inner = item.get(name)
            if isinstance(inner, list):
                yield from inner
