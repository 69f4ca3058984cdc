"""Percent-encoded data URLs: decoded as the library does, in bounded memory."""

import base64
import tracemalloc
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Image
from sidecar.images import percent
from sidecar.images.percent import percent_decoded
from sidecar.images.reader import _decoded

ESCAPES = st.integers(0, 255).map(lambda byte: f"%{byte:02x}")
PLAIN = st.text(st.characters(exclude_characters="%", exclude_categories=["Cs"]))
ODD = st.sampled_from(["=", "=\n", " \n", "\r\n", "\t", "=3D", "_", "%0D%0A", "%3d"])


@given(st.lists(ESCAPES | PLAIN | ODD).map("".join), st.integers(3, 9))
def test_it_decodes_as_the_library_does(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(percent, "_PIECE", piece)
        assert percent_decoded(text) == urllib.parse.unquote_to_bytes(text)


def test_twenty_megabytes_take_little_more_than_their_image() -> None:
    """It took 59 s and 1.9 GB for 60 MB: objects for each escape."""
    image = bytes(range(256)) * (5 << 12)
    escaped = base64.b64encode(image).hex("%")
    source = Image(f"data:image/png;base64,%{escaped}", path="place")
    tracemalloc.start()
    try:
        assert _decoded(source, 20 << 20) == image
        maximum = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert maximum < 2 * len(source.source)


@pytest.mark.parametrize("body", ["%", "%4", "aGk%3", "%zz", "aGk=%"])
def test_a_broken_escape_is_refused(body: str) -> None:
    for head in ("data:image/png,", "data:image/png;base64,"):
        with pytest.raises(BadRequest, match="broken"):
            _decoded(Image(head + body, path="place"), 1 << 20)
