"""Spans that a request no longer has are put back where they stood, or not at all."""

from collections.abc import Sequence

import pytest

from sidecar.memory.known_turns import Healed
from sidecar.pipeline.reuse.gone_spans import put_back
from sidecar.pipeline.template.elements import Element, Splice
from sidecar.volatile.marked_message import Span, SpanKey

LEAD = Span("edge_ws", 1, 0, "")
CLOCK = Span("current_time", 1, 5, "10:05", "[T]")
TRAIL = Span("edge_ws", 1, 12, "\n", nth=0)
NOTE = Span("note", 1, 12, "")
NEXT = Span("note", 2, 3, "")
# Canonical text of message 1: `time [T] now`, 12 characters.
ELEMENTS: Sequence[Element] = (
    "<user>", LEAD, "time ", CLOCK, " now", TRAIL, NOTE, "<end><tool>out", NEXT,
    "<end>",
)  # fmt: skip


def key(message: int, place: int, kind: str = "block", nth: int = 0) -> SpanKey:
    return (message, place, kind, nth)


def shown(elements: Sequence[Element]) -> str:
    """Kinds in brackets between the words."""
    return "".join(
        e if isinstance(e, str)
        else f"[{e.kind}]" if isinstance(e, Span) else "[turn]"
        for e in elements
    )  # fmt: skip


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (0, "<user>[edge_ws][block]time [current_time] now[edge_ws][note]<end>"),
        (2, "<user>[edge_ws]ti[block]me [current_time] now[edge_ws][note]<end>"),
        (5, "<user>[edge_ws]time [block][current_time] now[edge_ws][note]<end>"),
        (8, "<user>[edge_ws]time [current_time][block] now[edge_ws][note]<end>"),
        (10, "<user>[edge_ws]time [current_time] n[block]ow[edge_ws][note]<end>"),
        (12, "<user>[edge_ws]time [current_time] now[block][edge_ws][note]<end>"),
    ],
)
def test_a_span_goes_back_to_its_canonical_place(place: int, expected: str) -> None:
    """Before, inside and behind literal text; sentinels count, values do not."""
    found = put_back(ELEMENTS, [key(1, place)])
    assert shown(found).startswith(expected)
    (span,) = [e for e in found if isinstance(e, Span) and e.kind == "block"]
    assert (span.key, span.value) == (key(1, place), "")


def test_several_go_back_in_order() -> None:
    """Two at one place too."""
    gone = [key(1, 0), key(1, 2, "a"), key(1, 2, "b"), key(1, 12)]
    found = shown(put_back(ELEMENTS, gone))
    assert found.startswith(
        "<user>[edge_ws][block]ti[a][b]me [current_time] now[block][edge_ws]"
    )


@pytest.mark.parametrize(
    ("elements", "gone"),
    [
        (ELEMENTS, key(7, 0)),
        (ELEMENTS[:6], key(1, 40)),
        (ELEMENTS, key(2, 40)),
        (ELEMENTS, key(1, 6)),
        (("<user>", LEAD, Splice(1, Healed("H", (1,), "x", ""))), key(1, 3)),
    ],
    ids=["no such message", "past the end", "past all", "in a sentinel", "in a turn"],
)
def test_a_place_that_is_not_found_is_left_out(
    elements: Sequence[Element], gone: SpanKey
) -> None:
    """Reuse ends there; nothing is guessed."""
    assert put_back(elements, [gone]) == list(elements)
