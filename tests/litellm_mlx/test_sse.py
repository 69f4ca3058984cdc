"""Bytes to events, however the bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litellm_mlx.sse import EventDecoder, ServerEvent

TABLE = [
    ("one event", b"data: a\n\n", ["a"]),
    ("two events", b"data: a\n\ndata: b\n\n", ["a", "b"]),
    ("CR LF", b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
    ("CR", b"data: a\r\rdata: b\r\r", ["a", "b"]),
    ("mixed line ends", b"data: a\r\n\ndata: b\n\r\n", ["a", "b"]),
    ("several data lines", b"data: a\ndata: b\n\n", ["a\nb"]),
    ("no space after the colon", b"data:a\n\n", ["a"]),
    ("only one space is taken off", b"data:  a\n\n", [" a"]),
    ("colons in the data", b'data: {"a":"b:c"}\n\n', ['{"a":"b:c"}']),
    ("field without a colon", b"data\n\n", [""]),
    ("comments", b": hi\n\ndata: a\n: ho\ndata: b\n\n:\n\n", ["a\nb"]),
    ("other fields", b"id: 7\nretry: 9\nfoo: x\ndata: a\n\n", ["a"]),
    ("blank lines", b"\n\n\ndata: a\n\n\n\n", ["a"]),
    ("a byte order mark", b"\xef\xbb\xbfdata: a\n\n", ["a"]),
    ("characters of several bytes", "data: né 🦙\n\n".encode(), ["né 🦙"]),
    ("a line separator is text", "data: a\u2028b\x85c\n\n".encode(), ["a\u2028b\x85c"]),
    ("the last event is cut off", b"data: a\n\ndata: b\n", ["a"]),
    ("nothing", b"", []),
]


def decoded(pieces: list[bytes]) -> list[ServerEvent]:
    decoder = EventDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


@pytest.mark.parametrize(
    ("stream", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_events_do_not_depend_on_the_cuts(stream: bytes, expected: list[str]) -> None:
    """Whole, byte by byte and with empty pieces between, the events are the same."""
    single = [stream[i : i + 1] for i in range(len(stream))]
    spaced = [piece for byte in single for piece in (byte, b"")]
    for pieces in ([stream], single, spaced):
        assert [event.data for event in decoded(pieces)] == expected


def test_an_event_type_counts_for_one_event() -> None:
    """The type stands at its event and is gone at the next."""
    events = decoded([b"event: error\ndata: a\n\ndata: b\n\n"])
    assert events == [ServerEvent("a", "error"), ServerEvent("b")]


def test_an_event_that_ends_in_cr_is_not_held_back() -> None:
    """A CR ends the line at once, and a following LF is not a second line end."""
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\r\n\r") == [ServerEvent("a")]
    assert decoder.feed(b"\ndata: b\r\n") == []
    assert decoder.feed(b"\r\n") == [ServerEvent("b")]


def test_broken_utf8_does_not_end_the_stream() -> None:
    """A bad byte becomes a replacement character."""
    assert decoded([b"data: a\xffb\n\n"]) == [ServerEvent("a\ufffdb")]


TEXTS = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))


@given(st.lists(TEXTS), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data())
def test_decoding_inverts_encoding(
    texts: list[str], line_end: bytes, data: st.DataObject
) -> None:
    """Any texts, any line end, any two cuts: the same texts come out."""
    blocks = [b"data: " + text.encode() + line_end * 2 for text in texts]
    stream = b"".join(blocks)
    cuts = sorted(data.draw(st.integers(0, len(stream))) for _ in range(2))
    pieces = [stream[: cuts[0]], stream[cuts[0] : cuts[1]], stream[cuts[1] :]]
    assert [event.data for event in decoded(pieces)] == texts
