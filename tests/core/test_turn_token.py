"""The token that a client keeps beside a piece of thinking."""

import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.turn_token import make_token, read_token


@given(st.text(max_size=200))
def test_a_token_names_its_turn_and_knows_its_text(thinking: str) -> None:
    """White space at the ends counts for nothing: clients trim it."""
    token = read_token(make_token("t1", thinking))
    assert token is not None
    assert (token.turn, token.text) == ("t1", None)
    assert token.is_of(thinking)
    assert token.is_of(f"\n{thinking} ")
    assert not token.is_of(thinking + "x")


def test_it_carries_the_text_where_the_client_is_not_shown_it() -> None:
    token = read_token(make_token("t1", "so", with_text=True))
    assert token is not None
    assert token.text == "so"


@pytest.mark.parametrize(
    "foreign",
    [None, "", "sig-of-somebody", "mlx1.", "mlx1..", "mlx1.!!!.x", "mlx1.é.é"],
)
def test_what_is_not_ours_says_nothing(foreign: str | None) -> None:
    assert read_token(foreign) is None


def test_a_token_cut_short_says_nothing() -> None:
    whole = make_token("t1", "so " * 500, with_text=True)
    assert read_token(whole[: len(whole) // 2]) is None


def test_what_a_client_changed_says_nothing() -> None:
    """Another turn's id, another text: the MAC is over all of it."""
    made = make_token("t1", "so", with_text=True)
    prefix, body, mac = made.split(".")
    other = make_token("t2", "other", with_text=True).split(".")[1]
    assert read_token(f"{prefix}.{other}.{mac}") is None
    assert read_token(f"{prefix}.{body}.{mac[:-1]}") is None
    assert read_token(made) is not None


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor anything else that this process did not make."""

    def unpack(data: bytes) -> bytes:
        raise AssertionError("unpacked")

    monkeypatch.setattr(zlib, "decompress", unpack)
    packed = base64.urlsafe_b64encode(zlib.compress(b"a" * (64 << 20))).decode()
    assert read_token(f"mlx1.{packed}.{'0' * 64}") is None
