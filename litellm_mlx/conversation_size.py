"""
How much a body may hold beside the words of its conversation.

LiteLLM walks through all messages, parts and calls several times for a cloud model, on
the thread that serves everybody: 20,000 results of tools held it for 3 s. And what it
refuses it repeats, and looks through: a kind of 20 MB held it for 8 s.
"""

from collections.abc import Iterator, Mapping

import orjson

MAX_ITEMS = 10_000
MAX_FIELD_BYTES = 1 << 16
MAX_NAME_LEN = 2048
_LISTS = ("content", "parts", "tool_calls")  # of a message, and of a tool's result
_NAMES = ("role", "type", "server_label", "server_url")
_WORDS = frozenset({
    "messages", "input", "contents", "prompt", "system", "instructions",
    "systemInstruction", "system_instruction", "tools", "functions", "documents",
    "query", "response_format", "text", "output_config", "guided_json",
    "structured_outputs", "metadata", "litellm_metadata", "extra_body", "logit_bias",
    "generationConfig", "generation_config", "config", "fallbacks", "file", "image",
    "chat_template_kwargs", "client_metadata", "x_mlx", "mcp_servers", "prediction",
    "context_management",
})  # fmt: skip


def fits(conversation: object) -> bool:
    """Whether a list of messages holds few enough, of short kinds; else it is none."""
    if not isinstance(conversation, list):
        return True
    return all(
        number < MAX_ITEMS and _has_short_names(item)
        for number, item in enumerate(_items(conversation))
    )


def too_large_field(body: Mapping[str, object]) -> str | None:
    """The first field beside the words that is longer than any such needs to be."""
    for name, value in body.items():
        if name not in _WORDS and isinstance(value, str | list | dict):
            size = len(value) if isinstance(value, str) else len(orjson.dumps(value))
            if size > MAX_FIELD_BYTES:
                return name
    tools = body.get("tools")
    if isinstance(tools, list) and not all(map(_has_short_names, tools)):
        return "tools"
    return None


def _has_short_names(item: object) -> bool:
    if not isinstance(item, dict):
        return True
    names = (item.get(name) for name in _NAMES)
    return all(not isinstance(n, str) or len(n) <= MAX_NAME_LEN for n in names)


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
