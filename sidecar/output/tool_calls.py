"""Tool buffer -> tool calls and the text around them."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.core.json_bytes import check_depth
from sidecar.core.requests import Tool, ToolCall
from sidecar.output.tool_formats import FormatParser, ParsedCall, ToolSyntax


@dataclass(frozen=True, slots=True)
class Extracted:
    """
    The calls in order, and all text that was no call.

    Pieces between calls are joined by newlines; without any call it is the buffer.
    `is_cut` tells that the generation ended in the middle of the last block.
    """

    calls: tuple[ToolCall, ...]
    text: str
    is_cut: bool = False


def extract_calls(
    buffer: str, syntax: ToolSyntax, tools: Sequence[Tool], *, is_cut: bool
) -> Extracted:
    """
    Find the calls in a tool buffer.

    A block that parses to nothing stays in the text, as does an unclosed last block
    if the generation was cut off (`is_cut`) and no call stands before it: behind one it
    is left out. Otherwise it counts if its inside is complete. Each call gets a new id.
    """
    calls: list[ToolCall] = []
    pieces: list[str] = []
    is_open = False
    for before, block, inside, is_closed in _blocks(buffer, syntax):
        parsed: list[ParsedCall] = []
        is_open = is_open or (inside is not None and is_cut and not is_closed)
        if inside is not None and (is_closed or not is_cut):
            parsed = _parse(inside, syntax.formats, tools)
        pieces.append(before)
        if parsed:
            calls.extend(_with_id(call) for call in _distinct(parsed))
        elif not (calls and is_open):
            pieces.append(block)
    if not calls:
        return Extracted((), buffer.rstrip(), is_open)
    text = "\n".join(piece.strip() for piece in pieces if piece.strip())
    return Extracted(tuple(calls), text, is_open)


def is_complete_call(buffer: str, syntax: ToolSyntax, tools: Sequence[Tool]) -> bool:
    """Whether the text is closed, parsable calls and nothing else but white space."""
    blocks = list(_blocks(buffer, syntax))
    return len(blocks) > 1 and all(
        not before.strip()
        and (inside is None or (closed and _parse(inside, syntax.formats, tools)))
        and (inside is not None or not block.strip())
        for before, block, inside, closed in blocks
    )


# The library's parsers raise any of these on text that is not theirs.
_NOT_THIS_FORMAT = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
)

Block = tuple[str, str, str | None, bool]  # text before, whole block, inside, closed


def _blocks(buffer: str, syntax: ToolSyntax) -> list[Block]:
    """Cut a buffer at openers and closers (case does not matter); last: the rest."""
    blocks: list[Block] = []
    lower = _ascii_lower(buffer)
    opener, closer = _ascii_lower(syntax.opener), _ascii_lower(syntax.closer)
    at = 0
    while (start := lower.find(opener, at)) >= 0:
        inside_at = start + len(opener)
        end = lower.find(closer or opener, inside_at)
        is_closed = end >= 0 or not closer
        inside_end = end if end >= 0 else len(buffer)
        stop = inside_end + (len(closer) if end >= 0 else 0)
        inside = buffer[inside_at:inside_end]
        blocks.append((buffer[at:start], buffer[start:stop], inside, is_closed))
        at = stop
    blocks.append(("", buffer[at:], None, True))
    return blocks


def _ascii_lower(text: str) -> str:
    # str.lower() may change the length, and positions must stay those of the buffer.
    return text.translate(_LOWER)


_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


def _parse(
    inside: str, formats: Sequence[FormatParser], tools: Sequence[Tool]
) -> list[ParsedCall]:
    for parse in formats:
        try:
            calls = parse(inside, tools)
            for call in calls:
                _check(call)
            return calls
        except _NOT_THIS_FORMAT:
            continue
    return []


def _distinct(calls: list[ParsedCall]) -> list[ParsedCall]:
    kept: dict[tuple[str, str], ParsedCall] = {}
    for call in calls:
        kept.setdefault((call.name, json.dumps(call.arguments, sort_keys=True)), call)
    return [*kept.values()]


def _check(call: ParsedCall) -> None:
    """ValueError or TypeError for what cannot be sent as JSON, or read again."""
    call.name.encode()
    check_depth(call.arguments)
    json.dumps(call.arguments, allow_nan=False, sort_keys=True)


def _with_id(call: ParsedCall) -> ToolCall:
    arguments = _readable(json.dumps(call.arguments, ensure_ascii=False))
    return ToolCall(f"call_{secrets.token_hex(12)}", call.name, arguments)


def _readable(text: str) -> str:
    """
    U+FFFD for half a surrogate pair, which has no UTF-8.

    As an escape it would be JSON, but the parsers of clients refuse that.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
