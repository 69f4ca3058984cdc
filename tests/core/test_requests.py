"""What is kept of a client's own names."""

from dataclasses import replace

from sidecar.core.requests import ClientInfo, short_id


def test_ids_are_bounded() -> None:
    """Those of usual length are kept as they are, others as hashes of their own."""
    usual = ClientInfo("s" * 256, "agent", "k" * 256)
    assert (usual.session, usual.api_key_id) == ("s" * 256, "k" * 256)
    long = ClientInfo("s" * 10_000_000, "a" * 10_000_000, "k" * 10_000_000)
    kept = (long.session, long.user_agent, long.api_key_id)
    assert all(one is not None and len(one) <= 256 for one in kept)
    assert long.session != replace(long, session="s" * 9_999_999).session
    assert long.session == replace(usual, session="s" * 10_000_000).session
    assert replace(long).session == long.session, "a hash is kept as it is"


def test_halves_of_characters_have_names_too() -> None:
    """What JSON allows and UTF-8 does not."""
    assert short_id("\ud800" * 300) != short_id("\udfff" * 300)
