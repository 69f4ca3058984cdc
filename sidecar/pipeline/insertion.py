"""Puts spans that a request no longer has back where they stood."""

from collections.abc import Sequence

from sidecar.pipeline.canonical import Span, SpanKey
from sidecar.pipeline.elements import Element


def put_back(elements: Sequence[Element], gone: Sequence[SpanKey]) -> list[Element]:
    """
    Insert empty spans at the canonical places of `gone`.

    A place that cannot be found again is left out: then M differs from what is
    stored, and reuse ends there.
    """
    result = list(elements)
    for key in reversed(gone):  # each goes before what stands at its place
        found = _find(result, key)
        if found is None:
            continue
        index, offset = found
        message, place, kind, nth = key
        is_quoted = _is_quoted(result, message)
        span = Span(kind, message, place, "", nth=nth, is_quoted=is_quoted)
        literal = result[index] if index < len(result) else ""
        if isinstance(literal, str) and 0 < offset < len(literal):
            result[index : index + 1] = [literal[:offset], span, literal[offset:]]
        else:
            result.insert(index + (1 if offset else 0), span)
    return result


def _find(elements: Sequence[Element], key: SpanKey) -> tuple[int, int] | None:
    """Element index and offset in it where canonical place `key` lies."""
    message, place = key[:2]
    first = next(
        (i for i, e in enumerate(elements)
         if isinstance(e, Span) and e.message == message),
        None,
    )  # fmt: skip
    if first is None:
        return None
    at = 0
    for index in range(first, len(elements)):
        element = elements[index]
        if isinstance(element, Span):
            if element.message != message:
                return None
            is_past_lead = index > first
            if at == place and is_past_lead:
                return index, 0
            at += len(element.sentinel)
        elif isinstance(element, str):
            if at <= place < at + len(element):
                return index, place - at
            at += len(element)
        else:
            return None
    return None


def _is_quoted(elements: Sequence[Element], message: int) -> bool:
    spans = (e for e in elements if isinstance(e, Span) and e.message == message)
    return any(span.is_quoted for span in spans)
