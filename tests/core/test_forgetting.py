"""Whose conversations are forgotten, and what was begun before."""

from sidecar.core.forgetting import Epochs, Whose
from sidecar.core.prompt import Scope

MINE, YOURS = Scope("k", "mine", "t"), Scope("k", "yours", "t")


def test_whose_they_are() -> None:
    """By session, by key, by both; what is nobody's is nobody's."""
    whoever = Whose("mine", any_key=True)
    assert whoever.covers(MINE)
    assert not whoever.covers(YOURS)
    assert Whose(api_key="k").covers(YOURS)
    assert not Whose(api_key="other").covers(YOURS)
    assert Whose("mine", "k").covers(MINE)
    assert not Whose("mine", "other").covers(MINE)
    assert not Whose("mine").covers(MINE), "of clients without a key"
    assert Whose("mine").covers(Scope(None, "mine", "t"))
    assert not whoever.covers(None)
    assert not Whose(any_key=True).covers(None)


def test_what_was_begun_before_is_over_for_those_who_are_forgotten() -> None:
    epochs = Epochs()
    begun = epochs.now
    epochs.end(Whose("mine", "k"))
    assert not epochs.is_current(begun, MINE)
    assert epochs.is_current(begun, YOURS)
    assert epochs.is_current(begun, None)
    assert epochs.is_current(epochs.now, MINE)
    epochs.end(None)
    assert not epochs.is_current(begun, YOURS)
    assert not epochs.is_current(begun, None)
    assert epochs.is_current(epochs.now, YOURS)


def test_what_is_older_than_all_that_is_remembered_is_over() -> None:
    epochs = Epochs()
    for _ in range(256):
        epochs.end(Whose("mine", "k"))
    assert epochs.is_current(0, YOURS)
    epochs.end(Whose("mine", "k"))
    assert not epochs.is_current(0, YOURS)
    assert epochs.is_current(1, YOURS)
