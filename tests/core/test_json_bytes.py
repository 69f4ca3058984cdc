"""Bodies that orjson alone would refuse to read or to print."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.json_bytes import dump_bytes, load_bytes

_SIGNS = st.sampled_from(["a", "\\", '"', "\ud83d", "\ude00", "\U0001f600", "\n", "u"])


@given(st.text(_SIGNS))
def test_half_pairs_are_read_as_the_sign_for_what_cannot_be_read(text: str) -> None:
    """All else is what it was, escaped backslashes and whole pairs too."""
    found = load_bytes(json.dumps({"said": text}).encode())["said"]
    units = text.encode("utf-16", "surrogatepass")
    assert found == units.decode("utf-16", "replace")


@pytest.mark.parametrize("body", [b"{", b"\xff", b'"\\ud83d', b'"\\x"', b""])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"column|utf-8"):
        load_bytes(body)


@pytest.mark.parametrize("value", [10**20, -(2**70), "\ud83d", {"a": ["\ude00"]}])
def test_all_that_json_can_say_is_printed(value: Any) -> None:
    assert json.loads(dump_bytes([value])) == [value]


@pytest.mark.parametrize(
    "unit", [b"\\\\", b"\\n", b"\\", b"\\ud83d", b"\\ud83d\\ude00"]
)
def test_the_time_is_linear(unit: bytes) -> None:
    """Of ten megabytes that are no JSON; who sends them blocks all others."""
    body = b'["' + unit * (10_000_000 // len(unit)) + b'", \\ud800'
    started = time.process_time()
    with pytest.raises(ValueError, match="column"):
        load_bytes(body)
    assert time.process_time() - started < 10
