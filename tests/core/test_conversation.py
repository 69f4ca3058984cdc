"""Whose conversations are forgotten, and what was begun before."""

from dataclasses import replace

from sidecar.core.conversation import Conversation, ForgetFilter, Generations, unknown

MINE, YOURS = Conversation("k", "mine", "t"), Conversation("k", "yours", "t")


def since(conversation: Conversation, generation: int) -> Conversation:
    """A request of it that began then."""
    return replace(conversation, generation=generation)


def test_whose_they_are() -> None:
    """By session, by key, by both; what is nobody's is nobody's."""
    whoever = ForgetFilter("mine", any_key=True)
    assert whoever.covers(MINE)
    assert not whoever.covers(YOURS)
    assert ForgetFilter(api_key="k").covers(YOURS)
    assert not ForgetFilter(api_key="other").covers(YOURS)
    assert ForgetFilter("mine", "k").covers(MINE)
    assert not ForgetFilter("mine", "other").covers(MINE)
    assert not ForgetFilter("mine").covers(MINE), "of clients without a key"
    assert ForgetFilter("mine").covers(Conversation(None, "mine", "t"))
    assert not whoever.covers(unknown(0))
    assert not ForgetFilter(any_key=True).covers(unknown(0))


def test_what_was_begun_before_is_over_for_those_who_are_forgotten() -> None:
    generations = Generations()
    begun = generations.now
    generations.end(ForgetFilter("mine", "k"))
    assert not generations.is_current(since(MINE, begun))
    assert generations.is_current(since(YOURS, begun))
    assert generations.is_current(unknown(begun))
    assert generations.is_current(since(MINE, generations.now))
    generations.end(None)
    assert not generations.is_current(since(YOURS, begun))
    assert not generations.is_current(unknown(begun))
    assert generations.is_current(since(YOURS, generations.now))


def test_what_is_older_than_all_that_is_remembered_is_over() -> None:
    generations = Generations()
    for _ in range(256):
        generations.end(ForgetFilter("mine", "k"))
    assert generations.is_current(since(YOURS, 0))
    generations.end(ForgetFilter("mine", "k"))
    assert not generations.is_current(since(YOURS, 0))
    assert generations.is_current(since(YOURS, 1))
