"""Which checkpoints stay when a session has more than its share."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sidecar.core.conversation import Conversation
from sidecar.core.prompt import ModelIds
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv.eviction import KVBudget, Limits
from sidecar.kv.prefix_store import PrefixStore
from testkit.sequences import Running, joined, on_gpu, owned
from testkit.sequences import some_ids as ids_of

MAIN, SUBAGENT = owned("main"), owned("main", is_subagent=True)
SYSTEM_LEN = 40
END_OF_TURN = ModelIds((3001, 3002))  # what a template puts behind an answer


@pytest.fixture
def store(tiny_model: Callable[[str], LoadedModel]) -> PrefixStore:
    """A store of a model that needs checkpoints, sixteen a session."""
    limits = Limits(1 << 30, 1000, checkpoints_per_session=16)
    return PrefixStore(KVBudget(limits), tiny_model("hybrid").new_cache)


class Talk:
    """One conversation, a request a turn, with the checkpoints the engine takes."""

    def __init__(
        self, store: PrefixStore, seed: int, owner: Conversation = MAIN
    ) -> None:
        self._store, self._owner = store, owner
        self._seed = seed * 1000
        self._last_user = SYSTEM_LEN
        self.ids = ids_of(self._seed, SYSTEM_LEN)

    def turn(self, *, by_user: bool) -> int:
        """One more request, of the user or with a tool's result; what it reused."""
        self._seed += 1
        held = len(self.ids)
        if by_user:
            self._last_user = held + 2
        prompt = joined(self.ids, END_OF_TURN, ids_of(self._seed, 12))
        sequence = Running(self._store, prompt, self._owner)
        sequence.prefill((SYSTEM_LEN, 0), (self._last_user, 1), (held + 11, 2))
        sequence.decode(ids_of(-self._seed, 8)).finish()
        self.ids = ModelIds(sequence.ids)
        return sequence.cached_len - held

    def turn_with_vanishing_tail(self) -> int:
        """A request whose last message the next one does not have; what it reused."""
        self._seed += 1
        kept = joined(self.ids, END_OF_TURN, ids_of(self._seed, 12))
        has_own_turn = len(self.ids) > SYSTEM_LEN
        own_len = SYSTEM_LEN + 22 if has_own_turn else 0
        owner = replace(self._owner, own_len=own_len)
        prompt = joined(kept, ids_of(-self._seed, 30))
        sequence = Running(self._store, prompt, owner)
        sequence.prefill((SYSTEM_LEN, 0), (len(kept), 1))
        answer = ids_of(self._seed * 7, 8)
        sequence.decode(answer).finish()
        reused = sequence.cached_len - len(self.ids)
        self.ids = joined(kept, answer)
        return reused


@on_gpu
def test_a_long_chat_goes_on_where_it_ended(store: PrefixStore) -> None:
    """However many user messages there were, each with a checkpoint before it."""
    talk = Talk(store, 1)
    talk.turn(by_user=True)
    assert [talk.turn(by_user=True) for _ in range(30)] == [0] * 30


@on_gpu
def test_a_tool_loop_late_in_a_chat_goes_on_where_it_ended(store: PrefixStore) -> None:
    talk = Talk(store, 1)
    for _ in range(20):
        talk.turn(by_user=True)
    assert [talk.turn(by_user=False) for _ in range(20)] == [0] * 20


@on_gpu
def test_threads_of_one_session_all_go_on_where_they_ended(store: PrefixStore) -> None:
    """Four helpers take more checkpoints than a session may hold."""
    talks = [Talk(store, seed) for seed in range(1, 6)]
    for talk in talks:
        talk.turn(by_user=True)
    for _ in range(10):
        assert [talk.turn(by_user=False) for talk in talks] == [0] * 5


@on_gpu
def test_helpers_that_are_done_do_not_take_the_main_threads_last(
    store: PrefixStore,
) -> None:
    """Twenty sub-agents, each with a last checkpoint, and one main thread."""
    main = Talk(store, 1)
    main.turn(by_user=True)
    for seed in range(2, 22):
        Talk(store, seed, SUBAGENT).turn(by_user=True)
    assert main.turn(by_user=False) == 0


@on_gpu
def test_an_edited_last_message_is_a_small_loss(store: PrefixStore) -> None:
    """The checkpoint before the last user message outlives those of older ones."""
    talk = Talk(store, 1)
    for _ in range(25):
        talk.turn(by_user=True)
    before = joined(talk.ids, END_OF_TURN)
    talk.turn(by_user=True)
    assert store.match_len(joined(before, ids_of(7, 30))) == len(before)


@on_gpu
def test_idle_sessions_leave_room_for_one_that_is_used(store: PrefixStore) -> None:
    """Twenty took all there is; what a live one needs for a step back still stays."""
    for seed in range(1, 21):
        idle = Talk(store, seed, owned(f"idle {seed}"))
        idle.turn(by_user=True)
        idle.turn(by_user=True)
    live = Talk(store, 40, owned("live"))
    places = []
    for _ in range(4):
        live.turn(by_user=True)
        places.append(live.ids)
    assert idle.turn(by_user=True) == 0
    for ids in places:  # branches from any of its turns
        assert store.match_len(joined(ids, END_OF_TURN, ids_of(99, 9))) >= len(ids)


@on_gpu
def test_ends_that_were_superseded_do_not_crowd_out_those_in_use(
    store: PrefixStore,
) -> None:
    """
    Each request of an agent ends in a leaf that none goes on from.

    Another conversation of the same session still goes on where it ended.
    """
    other = Talk(store, 2)
    other.turn(by_user=True)
    agent = Talk(store, 1)
    for _ in range(40):
        agent.turn_with_vanishing_tail()
    # what it said last was behind a message that is gone: the message before counts
    assert agent.turn_with_vanishing_tail() == 0 - 8
    assert other.turn(by_user=False) == 0


def superseded_ends(store: PrefixStore) -> set[int]:
    """Depths at which ends lie that nobody goes on from."""
    return {row["end"] for row in store.rows() if row["superseded"]}


@on_gpu
def test_who_goes_back_to_an_older_end_makes_it_the_one_in_use(
    store: PrefixStore,
) -> None:
    """Only behind the model's own first turn: before it they are two conversations."""
    shared, own = ids_of(1, 60), owned("main", own_len=40)
    first, second = joined(shared, ids_of(2, 30)), joined(shared, ids_of(3, 31))
    for prompt in (first, second):
        Running(store, prompt, own).prefill().decode(ids_of(4, 1)).finish()
    assert superseded_ends(store) == {89, 91}
    again = joined(first, ids_of(4, 1), ids_of(5, 9))
    Running(store, again, own).prefill().decode(ids_of(6, 1)).finish()
    assert superseded_ends(store) == {90, 92}
    stranger = joined(ids_of(1, 30), ids_of(7, 50))
    Running(store, stranger, owned("main", own_len=35)).prefill().finish()
    assert superseded_ends(store) == {90, 92}


@on_gpu
def test_no_cap_a_session_unless_one_is_set(
    tiny_model: Callable[[str], LoadedModel],
) -> None:
    """Chats without a session id of their own share one."""
    limits = Limits(1 << 30, 1000, checkpoints_in_all=64)
    store = PrefixStore(KVBudget(limits), tiny_model("hybrid").new_cache)
    talks = [Talk(store, seed) for seed in range(1, 31)]
    for talk in talks:
        talk.turn(by_user=True)
    assert [talk.turn(by_user=True) for talk in talks] == [0] * 30


@on_gpu
def test_what_saves_the_fewest_tokens_goes_first(
    tiny_model: Callable[[str], LoadedModel],
) -> None:
    """Deep, but close behind another: little is computed again without it."""
    limits = Limits(1 << 30, 1000, checkpoints_in_all=3)
    store = PrefixStore(KVBudget(limits), tiny_model("hybrid").new_cache)
    ids = ids_of(1, 300)
    Running(store, ids).prefill((100, 3), (240, 3), (250, 3), (290, 2)).finish()
    held = sorted(n.end for n in store._tree.nodes() if n.checkpoint is not None)
    assert held == [240, 290, 299]  # 250 saves 10 tokens, 100 a hundred, 240 more


@on_gpu
def test_what_parts_right_behind_the_first_own_turn_is_superseded(
    tiny_model: Callable[[str], LoadedModel],
) -> None:
    """The place where that turn ends is behind it; one token less is not."""
    for own_len, is_superseded in ((50, True), (51, False)):
        store = PrefixStore(
            KVBudget(Limits(1 << 30, 1000)), tiny_model("dense").new_cache
        )
        trunk = ids_of(1, 50)
        Running(store, joined(trunk, ids_of(2, 20))).prefill().finish()
        owner = owned("main", own_len=own_len)
        Running(store, joined(trunk, ids_of(3, 20)), owner).prefill().finish()
        (old,) = [n for n in store._tree.leaves if n.session != (None, "main")]
        assert old.is_superseded is is_superseded
