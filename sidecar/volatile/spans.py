"""
Finds the volatile stretches of a conversation.

Input messages are never changed: what comes out is a list of pieces per message,
literal text and spans, that together are the message's own text.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from sidecar.core.requests import Image, Message, Part
from sidecar.volatile import rules as rules_module
from sidecar.volatile.marked_message import MarkedMessage, Span
from sidecar.volatile.rules import RuleSet

_MAX_FINDS = 16384  # in a conversation; what it holds beyond is ordinary text
_BLANK_ANSWERS = ("(no content)",)


def normalise(messages: Sequence[Message], ruleset: RuleSet | None) -> list[Message]:
    """
    What never was content leaves: blank assistant text, telemetry lines.

    Args:
        ruleset: None leaves all as it was sent.
    """
    if ruleset is None:
        return list(messages)
    cleaned = []
    for message in messages:
        if message.role == "assistant" and _is_blank(message):
            message = replace(message, parts=())
        elif message.role == "system":
            message = replace(message, parts=_without_telemetry(message, ruleset))
        cleaned.append(message)
    return cleaned


def mark(
    messages: Sequence[Message],
    ruleset: RuleSet | None,
    check: Callable[[], None] = lambda: None,
) -> list[MarkedMessage]:
    """
    Find the spans of every message.

    Args:
        ruleset: None finds none (canonicalisation is off).
        check: called before each message; what it raises ends the work.
    """
    marked = []
    left = _MAX_FINDS
    for index, message in enumerate(messages):
        check()
        if ruleset is None or message.role == "assistant":
            text = message.text
            marked.append(MarkedMessage(message, (text,) if text else ()))
            continue
        found = _found(message, ruleset, left) if message.role != "tool" else []
        left -= len(found)
        spans = [
            Span(kind, index, 0, value, sentinel) for kind, _, value, sentinel in found
        ]
        pieces = _cut(message.text, found, spans)
        if message.role in ("system", "user"):
            pieces = _cut_edges(pieces, index)
        if message.role == "tool":
            pieces = _cut_tail(pieces, index)
        if message.role in ("user", "tool"):
            pieces.append(Span("note", index, 0, ""))
        marked.append(MarkedMessage(message, _placed(pieces)))
    return marked


def _is_blank(message: Message) -> bool:
    text = message.text.strip()
    return not text or text in _BLANK_ANSWERS


def _without_telemetry(message: Message, ruleset: RuleSet) -> tuple[Part, ...]:
    dropping = [r for r in ruleset.rules if ruleset.policy(r.kind).differ == "drop"]
    parts: list[Part] = []
    for part in message.parts:
        if isinstance(part, Image):
            parts.append(part)
            continue
        finds = rules_module.find(dropping, message.role, part)
        starts = [0, *(end for _, (_, end) in finds)]
        ends = [*(start for _, (start, _) in finds), len(part)]
        kept = "".join(part[a:b] for a, b in zip(starts, ends, strict=True))
        if kept or not finds:
            parts.append(kept)
    return tuple(parts)


Found = tuple[str, tuple[int, int], str, str]  # kind, range, value, sentinel


def _found(message: Message, ruleset: RuleSet, maximum: int) -> list[Found]:
    """The first finds in the joined text, part by part: no rule looks across a part."""
    keeping = [
        rule
        for rule in ruleset.rules
        if ruleset.policy(rule.kind).differ != "drop" and not rule.vanishes
    ]
    text, offset = message.text, 0
    found: list[Found] = []
    for part in message.parts:
        if len(found) >= maximum:
            break
        if isinstance(part, Image):  # its mark names its content: no value in it varies
            offset = text.find(part.mark, offset) + len(part.mark)
            continue
        offset = text.find(part, offset) if part else offset
        for rule, (start, end) in rules_module.find(keeping, message.role, part):
            start, end = start + offset, end + offset
            owns_part = start == offset and end == offset + len(part)
            if owns_part and end > start and text[end : end + 1] == "\n":
                end += 1  # the seam goes with a part that may go
            found.append((rule.kind, (start, end), text[start:end], rule.sentinel))
        offset += len(part)
    return found[:maximum]


def _cut(text: str, found: Sequence[Found], spans: Sequence[Span]) -> list[str | Span]:
    pieces: list[str | Span] = []
    at = 0
    for (_, (start, end), _, _), span in zip(found, spans, strict=True):
        pieces += [text[at:start], span]
        at = end
    return [p for p in [*pieces, text[at:]] if p != ""]


def _cut_edges(pieces: list[str | Span], index: int) -> list[str | Span]:
    """White space at either end of the message is a span of its own."""

    def edge(value: str) -> Span:
        return Span("edge_ws", index, 0, value)

    lead = trail = ""
    if pieces and isinstance(pieces[0], str):
        stripped = pieces[0].lstrip()
        lead, pieces[0] = pieces[0][: len(pieces[0]) - len(stripped)], stripped
    if pieces and isinstance(pieces[-1], str):
        stripped = pieces[-1].rstrip()
        trail, pieces[-1] = pieces[-1][len(stripped) :], stripped
    inner = [p for p in pieces if p != ""]
    return [edge(lead), *inner, edge(trail)]


def _cut_tail(pieces: list[str | Span], index: int) -> list[str | Span]:
    """A tool's trailing white space is content, but a template may trim it."""
    text = pieces[0] if pieces else ""
    assert isinstance(text, str)
    kept = text.rstrip()
    if kept == text:
        return pieces
    tail = text[len(kept) :]
    return [p for p in (kept, Span("tail_ws", index, 0, tail, tail)) if p != ""]


def _placed(pieces: Sequence[str | Span]) -> tuple[str | Span, ...]:
    placed: list[str | Span] = []
    num_here: Counter[tuple[int, str]] = Counter()
    place = 0
    for piece in pieces:
        if isinstance(piece, str):
            placed.append(piece)
            place += len(piece)
        else:
            here = (place, piece.kind)
            placed.append(replace(piece, place=place, nth=num_here[here]))
            num_here[here] += 1
            place += len(piece.sentinel)
    return tuple(placed)
