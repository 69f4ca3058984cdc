"""The KV store: lend and take back, copy, split, fail; what is kept is exact."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from sidecar.core.conversation import Conversation, ForgetFilter, unknown
from sidecar.core.prompt import Hit, ModelIds, Retreat
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv import kv_layers
from sidecar.kv.eviction import KVBudget, Limits
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.prefix_tree import Node, RadixTree
from testkit.sequences import (
    NOBODY,
    ROOMY,
    Running,
    forward,
    joined,
    on_gpu,
    owned,
    run,
)
from testkit.sequences import some_ids as ids_of
from testkit.told_kv import faults

TinyModel = Callable[[str], LoadedModel]
KINDS = ["dense", "hybrid", "sliding"]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def store(tiny_model: TinyModel) -> PrefixStore:
    """A roomy store of the dense model."""
    return PrefixStore(KVBudget(ROOMY), tiny_model("dense").new_cache)


def objects(cache: Sequence[object]) -> list[mx.array]:
    """The very array objects of the sliceable layers."""
    return [a for leaves in kv_layers.sliceable_leaves(list(cache)) for a in leaves]


def counted(store: PrefixStore, name: str) -> int:
    return store.counters[name]


def assert_sound(store: PrefixStore) -> None:
    assert store.check_integrity() == []


# Lend and take back


@on_gpu
def test_a_lent_path_moves_the_array_objects_and_back(store: PrefixStore) -> None:
    """No copy either way: the same objects, no memory beside them, bytes accounted."""
    prompt = ids_of(1, 300)
    first = Running(store, prompt).prefill().decode(ids_of(2, 5))
    before = objects(first.cache)
    first.finish()
    stored = store.num_bytes
    assert stored == sum(a.nbytes for a in before)

    memory = mx.get_active_memory()
    again = Running(store, joined(first.ids, ids_of(3, 10)))
    after = objects(again.cache)
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert mx.get_active_memory() == memory
    assert again.cached_len == len(first.ids)
    assert store.num_bytes == 0
    assert_sound(store)

    again.end_at(again.cached_len)
    assert store.num_bytes == stored
    assert mx.get_active_memory() == memory
    held = objects(Running(store, joined(first.ids, (1,))).cache)
    assert all(a is b for a, b in zip(held, before, strict=True))
    assert (counted(store, "lent"), counted(store, "copied")) == (2, 0)


@on_gpu
def test_a_second_request_on_a_lent_path_copies_from_the_row(
    store: PrefixStore,
) -> None:
    """Both then go on by themselves, and both are kept."""
    run(store, ids_of(1, 100), ids_of(2, 5))
    path = joined(ids_of(1, 100), ids_of(2, 5))
    one = Running(store, joined(path, ids_of(3, 20))).prefill()
    other = Running(store, joined(path, ids_of(4, 20)))
    assert other.cached_len == len(path)
    assert faults(other.cache, path) == []
    assert (counted(store, "lent"), counted(store, "copied")) == (1, 1)
    other.prefill().decode(ids_of(5, 3))
    one.decode(ids_of(6, 3))
    for sequence in (one, other):
        assert faults(sequence.cache, sequence.ids) == []
        assert_sound(store)
        sequence.finish()
    for sequence in (one, other):
        back = Running(store, joined(sequence.ids, (1,)))
        assert back.cached_len == len(sequence.ids)
        assert faults(back.cache, sequence.ids) == []
        back.end_at(back.cached_len)


@on_gpu
def test_a_request_copies_what_a_running_one_has_computed(store: PrefixStore) -> None:
    """Nothing was stored before: the first of two equal prompts still runs."""
    prompt = ids_of(1, 90)
    one = Running(store, prompt).prefill()
    one.decode(ids_of(2, 4))
    other = Running(store, prompt)
    assert other.cached_len == 89
    assert faults(other.cache, prompt[:89]) == []
    one.finish()
    other.prefill().decode(ids_of(2, 4)).finish()
    assert_sound(store)
    assert len(store.rows()) == 2  # the prompt but its last token, and the rest
    assert store.match_len(joined(one.ids, (1,))) == len(one.ids)


@on_gpu
def test_a_partial_lend_leaves_the_tail_stored(store: PrefixStore) -> None:
    """The tail moves into arrays of its own, and can still be matched."""
    long = ids_of(1, 400)
    run(store, long)
    branch = Running(store, joined(long[:350], ids_of(2, 10)))
    assert branch.cached_len == 350
    assert counted(store, "lent") == 1
    assert faults(branch.cache, long[:350]) == []
    per_token = sum(a.nbytes // a.shape[-2] for a in objects(branch.cache))
    assert store.num_bytes == 50 * per_token
    assert_sound(store)

    both = Running(store, joined(long, (1, 2)))
    assert both.cached_len == 400
    assert faults(both.cache, long) == []
    both.end_at(both.cached_len)
    branch.prefill().finish()
    assert_sound(store)
    assert store.match_len(joined(long, (1,))) == 400


@on_gpu
def test_a_small_part_of_a_long_path_is_copied_not_lent(store: PrefixStore) -> None:
    """Copying the part that stays would cost more."""
    run(store, ids_of(1, 400))
    stored = store.num_bytes
    sub = Running(store, joined(ids_of(1, 400)[:100], ids_of(2, 10)))
    assert sub.cached_len == 100
    assert (counted(store, "lent"), counted(store, "copied")) == (0, 1)
    assert store.num_bytes == stored
    assert faults(sub.cache, ids_of(1, 400)[:100]) == []


@on_gpu
def test_the_path_of_a_running_request_is_not_lent_twice(store: PrefixStore) -> None:
    """A copy holds a lease on what it was copied from as well."""
    long = ids_of(1, 300)
    run(store, long)
    copying = Running(store, joined(long[:100], (1,)))
    again = Running(store, joined(long, (1,)))
    assert again.cached_len == 300
    assert counted(store, "lent") == 0
    copying.end_at(100)
    again.end_at(300)
    assert Running(store, joined(long, (2,))).cached_len == 300
    assert counted(store, "lent") == 1


@on_gpu
def test_a_stored_array_is_never_shared_with_a_running_row(store: PrefixStore) -> None:
    """A row that copied writes into arrays of its own."""
    base = ids_of(1, 200)
    run(store, base)
    run(store, joined(base[:150], ids_of(2, 80)))  # two buffers: the next one copies
    sub = Running(store, joined(base[:150], ids_of(2, 79), ids_of(3, 9)))
    kept = {id(a) for n in store._tree.nodes() if n.buffer for a in _flat(n.buffer)}
    assert not kept & {id(a) for a in objects(sub.cache)}
    sub.prefill().decode(ids_of(4, 300))
    for ids in (base[:199], joined(base[:150], ids_of(2, 79))):
        back = Running(store, joined(ids, (1,)))
        assert faults(back.cache, ids) == []
        back.end_at(len(ids))


def _flat(buffer: object) -> list[mx.array]:
    return [a for leaves in buffer.arrays for a in leaves]  # type: ignore[attr-defined]


# Copy and split


@on_gpu
def test_a_split_shares_the_buffer(store: PrefixStore) -> None:
    """Inserting a branch in the middle of a run copies nothing of the run."""
    long = ids_of(1, 400)
    run(store, long)
    before = store.num_bytes
    branch = joined(long[:100], ids_of(2, 60))
    run(store, branch)
    rows = store.rows()
    assert sorted((r["start"], r["end"]) for r in rows) == [
        (0, 100), (100, 159), (100, 399), (159, 160), (399, 400),
    ]  # fmt: skip
    per_token = before / 512
    assert store.num_bytes - before == 60 * per_token
    assert store.match_len(joined(branch, (1,))) == 160
    assert store.match_len(joined(long, (1,))) == 400
    assert_sound(store)


@on_gpu
def test_a_path_through_several_buffers_is_put_together(store: PrefixStore) -> None:
    base, path = ids_of(1, 300), ids_of(1, 300)[:50]
    run(store, base)
    for number in range(5):
        path = joined(path, ids_of(10 + number, 40))
        run(store, joined(path, (1,)))
        run(store, joined(path[:-7], ids_of(20 + number, 15)))
    back = Running(store, joined(path, (2,)))
    assert back.cached_len == len(path)
    assert faults(back.cache, path) == []
    assert_sound(store)


@on_gpu
def test_a_branch_longer_than_what_it_shares_is_lent_too(store: PrefixStore) -> None:
    """Its arrays hold the shared part as well, if that is an eighth at most."""
    system = ids_of(1, 100)
    run(store, joined(system, ids_of(2, 300)))
    path = joined(system, ids_of(3, 900))
    run(store, path)
    assert (counted(store, "lent"), counted(store, "copied")) == (0, 1)
    for turn in range(3):
        sequence = Running(store, joined(path, ids_of(10 + turn, 9))).prefill()
        assert counted(store, "lent") == turn + 1
        assert store.match_len(joined(system, ids_of(2, 300), (1,))) == 400
        assert faults(sequence.cache, sequence.prompt[:-1]) == []
        other = Running(store, joined(path[:500], (1, 2)))  # from the running row
        assert faults(other.cache, path[:500]) == []
        other.end_at(500)
        sequence.decode(ids_of(20 + turn, 3)).finish()
        assert_sound(store)
        path = sequence.ids
    back = Running(store, joined(system, ids_of(2, 300), (1,)))
    assert faults(back.cache, joined(system, ids_of(2, 300))) == []


@on_gpu
def test_a_conversation_in_several_buffers_is_in_one_after_a_turn(
    store: PrefixStore,
) -> None:
    """A turn that ran beside another left its end in a buffer of its own."""
    path = ids_of(1, 300)
    run(store, path)
    one = Running(store, joined(path, ids_of(2, 9))).prefill()
    twin = Running(store, joined(path, ids_of(2, 9))).prefill().decode(ids_of(3, 5))
    twin.finish()
    one.decode(ids_of(3, 5)).finish()
    path = joined(path, ids_of(2, 9), ids_of(3, 5))
    bytes_before, borrowed = store.num_bytes, counted(store, "lent")
    third = Running(store, joined(path, (1, 2)))
    assert faults(third.cache, path) == []
    third.prefill().decode((4,)).finish()
    assert_sound(store)
    fourth = Running(store, joined(third.ids, (1, 2)))
    assert counted(store, "lent") == borrowed + 1
    assert faults(fourth.cache, third.ids) == []
    fourth.end_at(fourth.cached_len)
    assert store.num_bytes <= bytes_before + 512 * 256
    assert len({id(n.buffer) for n in store._tree.nodes()}) == 1


@on_gpu
def test_a_lent_path_is_not_stored_as_well(store: PrefixStore) -> None:
    """Its last buffer holds it all, so what was stored of it before is let go."""
    system = ids_of(1, 100)
    run(store, system)
    path = joined(system, ids_of(2, 900))
    beside = Running(store, joined(system, (7, 8)))  # so that the long one copies
    run(store, path)
    beside.end_at(beside.cached_len)
    assert len({id(n.buffer) for n in store._tree.nodes()}) == 2
    again = Running(store, joined(path, (1, 2))).prefill()
    assert counted(store, "lent") > 0
    assert store.num_bytes == 0
    assert faults(again.cache, again.prompt[:-1]) == []
    again.decode((3,)).finish()
    assert_sound(store)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@on_gpu
def test_under_pressure_all_that_is_stored_can_go(
    kind: str, tiny_model: TinyModel
) -> None:
    """Running sequences hold what they restored: its copies in the store go, too."""
    store = PrefixStore(KVBudget(ROOMY), tiny_model(kind).new_cache)
    trunk = ids_of(1, 300)
    Running(store, joined(trunk, ids_of(2, 400))).prefill((300, 1)).finish()
    running = [
        Running(store, joined(trunk, ids_of(10 + number, 40))).prefill()
        for number in range(3)
    ]
    assert [sequence.cached_len for sequence in running] == [300] * 3
    assert store.num_bytes > 0
    store.budget.evict_bytes(store.num_bytes)
    assert store.num_bytes == 0
    assert_sound(store)
    assert store.match_len(joined(trunk, (1,))) == 300 * (kind == "dense")
    for sequence in running:
        assert faults(sequence.cache, sequence.prompt[:-1]) == []
        sequence.decode((5,)).finish()
        assert_sound(store)
    for sequence in running:
        back = Running(store, joined(sequence.ids, (1,)))
        assert back.cached_len == len(sequence.ids)
        assert faults(back.cache, sequence.ids) == []
        back.end_at(back.cached_len)


@on_gpu
def test_one_token_is_always_left_to_compute(store: PrefixStore) -> None:
    """Its logits are needed: an exact repeat reuses all but the last."""
    prompt = ids_of(1, 50)
    assert run(store, prompt, ids_of(2, 10)) == 0
    assert run(store, prompt, ids_of(2, 10)) == 49
    assert store.match_len(prompt[:1]) == 0
    assert Running(store, prompt[:1]).cached_len == 0
    assert Running(store, ids_of(3, 1)).cached_len == 0


@every_kind
@on_gpu
def test_match_len_says_what_restore_gives(kind: str, tiny_model: TinyModel) -> None:
    """The pipeline chooses by the one, the engine does the other."""
    store = PrefixStore(KVBudget(ROOMY), tiny_model(kind).new_cache)
    base = ids_of(1, 200)
    run(store, base, ids_of(2, 9))
    run(store, joined(base[:120], ids_of(3, 40)))
    for cut in (1, 60, 119, 120, 121, 150, 199, 200, 205):
        prompt = joined(joined(base, ids_of(2, 9))[:cut], ids_of(4, 7))
        said = store.match_len(prompt)
        got = Running(store, prompt)
        assert got.cached_len == said
        assert faults(got.cache, prompt[:said]) == []
        got.end_at(got.cached_len)
        assert_sound(store)


# Layers that cannot be cut


@pytest.mark.parametrize("kind", ["hybrid", "sliding"])
@on_gpu
def test_reuse_ends_at_the_deepest_checkpoint(kind: str, tiny_model: TinyModel) -> None:
    """Not where the ids part, and never a made-up token."""
    store = PrefixStore(KVBudget(ROOMY), tiny_model(kind).new_cache)
    prompt = ids_of(1, 200)
    Running(store, prompt).prefill((60, 0), (150, 1)).decode(ids_of(2, 5)).finish()
    ends = {150: 150, 180: 150, 60: 60, 100: 60, 59: 0, 199: 199, 204: 199}
    for shared, wanted in ends.items():
        asked = joined(joined(prompt, ids_of(2, 5))[:shared], ids_of(3, 5))
        assert store.match_len(asked) == wanted
        lost = shared - wanted
        retreat = Retreat("hybrid_trim_miss", lost) if lost else None
        assert store.lookup(asked, "") == Hit(wanted, retreat=retreat)
    assert store.match_len(prompt) == 199  # B4: an exact repeat
    assert store.match_len(joined(prompt, ids_of(2, 5), (1,))) == 205
    assert counted(store, "hybrid_trim_miss") == 0
    short = Running(store, joined(prompt[:59], ids_of(4, 5)))
    assert short.cached_len == 0
    assert counted(store, "hybrid_trim_miss") == 1
    assert counted(store, "hybrid_trim_miss_tokens") == 59


@pytest.mark.parametrize("kind", ["hybrid", "sliding"])
@on_gpu
def test_a_checkpoint_serves_again_and_again(kind: str, tiny_model: TinyModel) -> None:
    """Whoever resumes from it advances a copy."""
    store = PrefixStore(KVBudget(ROOMY), tiny_model(kind).new_cache)
    system = ids_of(1, 80)
    Running(store, joined(system, ids_of(2, 30))).prefill((80, 0)).finish()
    for number in range(4):
        sub = Running(store, joined(system, ids_of(10 + number, 90)))
        assert sub.cached_len == 80
        assert faults(sub.cache, system) == []
        sub.prefill().decode(ids_of(20 + number, 4))
        assert faults(sub.cache, sub.ids) == []
        sub.finish()
        assert_sound(store)


@on_gpu
def test_layers_that_disagree_on_the_depth_are_not_kept(
    tiny_model: TinyModel,
) -> None:
    """Depth is read, not assumed: what nobody can vouch for is a miss later."""
    store = PrefixStore(KVBudget(ROOMY), tiny_model("sliding").new_cache)
    sequence = Running(store, ids_of(1, 50)).prefill().decode(ids_of(2, 3))
    kv_layers.set_leaves(
        sequence.cache[1], kv_layers.leaves(sequence.cache[1]), sequence.done - 1
    )
    with pytest.raises(ValueError, match="layers hold 52 and 53 tokens"):
        sequence.finish()
    sequence.fail()
    assert store.match_len(ids_of(1, 50)) == 0
    assert_sound(store)


@on_gpu
def test_a_sequence_shorter_than_it_says_is_refused(store: PrefixStore) -> None:
    sequence = Running(store, ids_of(1, 50)).prefill()
    sequence.done = 50
    with pytest.raises(ValueError, match="caches hold 49 tokens, not 50"):
        sequence.finish()
    sequence.fail()
    assert list(store.rows()) == []


@on_gpu
def test_a_model_without_any_attention_is_served_from_checkpoints() -> None:
    """All layers recurrent: there are no arrays to lend, only states."""
    store = PrefixStore(KVBudget(ROOMY), lambda: [ArraysCache(2)])
    prompt = ids_of(1, 50)
    run(store, prompt, ids_of(2, 5))
    path = joined(prompt, ids_of(2, 5))
    for number in range(3):
        again = Running(store, joined(path, ids_of(3 + number, 10)))
        assert again.cached_len == 55
        assert faults(again.cache, path) == []
        again.prefill().decode((7,)).finish()
        assert_sound(store)


@on_gpu
def test_a_restore_that_fails_is_a_miss(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never an error to the client, and nothing stays lent to nobody."""
    prompt = ids_of(1, 50)
    run(store, prompt)

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(kv_layers, "rebuild", broken)
        cold = Running(store, joined(prompt, (1, 2)))
        assert cold.cached_len == 0
    assert_sound(store)
    cold.prefill().decode((3,)).finish()
    assert store.match_len(joined(prompt, (1, 2, 3, 4))) == 53


@on_gpu
def test_a_checkpoint_of_another_depth_is_a_miss(tiny_model: TinyModel) -> None:
    """Where its layers count tokens, they must agree with the rest."""
    store = PrefixStore(KVBudget(ROOMY), tiny_model("sliding").new_cache)
    sequence = Running(store, ids_of(1, 50)).prefill().decode((1, 2, 3))
    sequence.checkpoints[52] = (2, kv_layers.take_checkpoint(sequence.cache))
    sequence.end_at(53)
    assert Running(store, joined(sequence.ids[:52], (9, 9))).cached_len == 0
    assert_sound(store)


# Ends


@on_gpu
def test_a_cancelled_prefill_is_kept_as_far_as_it_got(store: PrefixStore) -> None:
    prompt = ids_of(1, 300)
    sequence = Running(store, prompt)
    sequence.advance(200)
    sequence.end_at(200)
    retry = Running(store, prompt)
    assert retry.cached_len == 200
    assert faults(retry.cache, prompt[:200]) == []


@on_gpu
def test_a_failure_takes_what_was_lent_and_all_below_it(store: PrefixStore) -> None:
    """The KV went with the row; branches that stood on it cannot be reached."""
    system, other = ids_of(1, 200), ids_of(9, 60)
    run(store, other)
    run(store, joined(system, ids_of(2, 20)))
    failing = Running(store, joined(system, ids_of(2, 19), ids_of(4, 9))).prefill()
    run(store, joined(system, ids_of(3, 20)))
    sub = Running(store, joined(system, ids_of(5, 9))).prefill()
    assert store.match_len(joined(system, ids_of(3, 20))) == 219
    failing.fail()
    assert_sound(store)
    assert store.match_len(joined(system, ids_of(3, 20))) == 0
    assert store.match_len(other) == 59
    sub.decode(ids_of(6, 4)).finish()  # it had copied, and lives on
    assert_sound(store)
    back = Running(store, joined(sub.ids, (1,)))
    assert back.cached_len == len(sub.ids)
    assert faults(back.cache, sub.ids) == []


@on_gpu
def test_a_failure_after_a_copy_loses_nothing_stored(store: PrefixStore) -> None:
    base = ids_of(1, 300)
    run(store, base)
    sub = Running(store, joined(base[:100], ids_of(2, 20))).prefill()
    sub.fail()
    assert_sound(store)
    assert store.match_len(base) == 299
    assert store.match_len(joined(base[:100], ids_of(2, 20))) == 100


@on_gpu
def test_a_sequence_ends_once(store: PrefixStore) -> None:
    sequence = Running(store, ids_of(1, 50)).prefill().decode((5,))
    cache = sequence.cache
    sequence.finish()
    rows = [(r["start"], r["end"], r["leases"]) for r in store.rows()]
    sequence.cache = cache
    sequence.end_at(10)
    sequence.fail()
    assert [(r["start"], r["end"], r["leases"]) for r in store.rows()] == rows


@on_gpu
def test_a_sequence_that_failed_gives_nothing_back(store: PrefixStore) -> None:
    """Whoever still holds its caches cannot vouch for them."""
    sequence = Running(store, ids_of(1, 50)).prefill()
    cache = sequence.cache
    sequence.fail()
    sequence.cache = cache
    sequence.finish()
    assert list(store.rows()) == []


@on_gpu
def test_clearing_forgets_all_and_spares_what_runs(store: PrefixStore) -> None:
    """What runs goes on to its end, and leaves nothing: it was part of all that."""
    run(store, ids_of(1, 100))
    running = Running(store, joined(ids_of(1, 100), ids_of(2, 9))).prefill()
    stored = store.num_bytes
    assert store.forget() >= stored
    assert store.num_bytes == 0
    assert store.match_len(ids_of(1, 100)) == 0
    running.decode(ids_of(3, 4))
    assert faults(running.cache, running.ids) == []
    running.finish()
    assert_sound(store)
    assert store.rows() == []
    run(store, ids_of(1, 100))
    assert store.match_len(ids_of(1, 100)) == 99


@on_gpu
def test_what_was_begun_before_a_clearing_gets_and_shows_nothing(
    store: PrefixStore,
) -> None:
    """It restores nothing, its path is not registered, and it gives nothing back."""
    begun = unknown(store.generation)
    store.forget()
    run(store, ids_of(1, 100))
    late = store.restore(joined(ids_of(1, 100), ids_of(2, 9)), begun)
    assert late.cached_len == 0
    rows = store.rows()
    store.share(late.lease, lambda: late.cache)
    store.register(late.lease, ids_of(3, 50))
    assert store.rows() == rows
    assert_sound(store)


@on_gpu
def test_what_ends_between_a_generation_and_its_clearing_leaves_the_store_sound(
    store: PrefixStore,
) -> None:
    """What was lent to it is gone with it: nobody is sent there for KV."""
    run(store, ids_of(1, 100))
    running = Running(store, joined(ids_of(1, 100), ids_of(2, 9))).prefill()
    store.new_generation()
    running.finish()
    assert_sound(store)
    back = Running(store, joined(ids_of(1, 100), ids_of(2, 9)))
    assert back.cached_len == 0


@on_gpu
@every_kind
def test_a_turn_walks_through_nothing_that_is_kept(
    kind: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what leaves for it: all that a turn asks of a tree is counted."""
    limits = Limits(max_bytes=1 << 30, max_leaves=3, ttl_s=60.0)
    store = PrefixStore(KVBudget(limits), tiny_model(kind).new_cache)
    for number in range(5):
        run(store, joined(ids_of(1, 60), ids_of(9 + number, 60)))

    def walked(_: RadixTree) -> Iterator[Node]:
        raise AssertionError("all nodes were walked through")

    monkeypatch.setattr(RadixTree, "nodes", walked)
    for number in range(5):
        prompt = joined(ids_of(1, 60), ids_of(13, 60), ids_of(20 + number, 9))
        assert run(store, prompt) > 0
    monkeypatch.undo()
    assert len(store._tree.leaves) == 3
    assert_sound(store)


@on_gpu
def test_what_is_counted_is_compared_with_what_is_there(store: PrefixStore) -> None:
    """Else a wrong count would be found by nobody."""
    run(store, ids_of(1, 100))
    assert_sound(store)
    store._tree.num_bytes += 1
    assert "bytes are counted" in store.check_integrity()[0]
    store._tree.num_bytes -= 1
    assert_sound(store)
    store._tree.leaves.clear()
    assert store.check_integrity() == ["other nodes are counted as leaves"]


@on_gpu
def test_one_conversation_is_forgotten(store: PrefixStore) -> None:
    """What another goes on from stays, and is its own then."""
    common, one, other = ids_of(1, 600), owned("one"), owned("other")
    first, second = joined(common, ids_of(2, 400)), joined(common, ids_of(3, 400))
    for ids, owner in ((first, one), (second, other)):
        Running(store, ids, owner).prefill().finish()
    before = store.num_bytes
    store.forget(ForgetFilter("one"))
    assert store.num_bytes < 0.85 * before, "of 1,400 tokens 400 are gone"
    assert store.match_len(first) == 600
    assert store.match_len(joined(second, (7,))) == 999
    store.forget(ForgetFilter("other"))
    assert store.rows() == []
    assert store.num_bytes == 0
    assert_sound(store)


@on_gpu
def test_what_two_have_said_alike_is_both_of_theirs(store: PrefixStore) -> None:
    """To its very end: whoever goes last takes it along."""
    ids = ids_of(1, 60)
    for session in ("one", "other"):
        Running(store, ids, owned(session)).prefill().finish()
    store.forget(ForgetFilter("one"))
    assert store.match_len(joined(ids, (7,))) == 59
    store.forget(ForgetFilter("other"))
    assert store.rows() == []
    assert_sound(store)


@on_gpu
@pytest.mark.parametrize("how", ["said", "brought back"])
def test_what_others_said_alone_is_not_of_those_who_said_its_beginning(
    how: str, store: PrefixStore
) -> None:
    """However the stored runs were cut before."""
    common, owner = ids_of(1, 60), owned("other")
    whole = joined(common, ids_of(2, 40))
    Running(store, whole, owned("one")).prefill().finish()
    if how == "said":
        prompt = ModelIds(common[:50])
        Running(store, prompt, owner).prefill().decode(common[50:]).finish()
    else:
        assert store.insert(common, owner, [], [])
    store.forget(ForgetFilter("one"))
    assert store.survey(whole, "").depth == 60
    assert store.match_len(joined(common, (7,))) == 60
    assert_sound(store)


@on_gpu
@pytest.mark.parametrize("forgotten", [["heir"], ["heir", "first"], ["first", "heir"]])
def test_whoever_is_forgotten_while_one_goes_on_from_another(
    forgotten: list[str], store: PrefixStore
) -> None:
    """Nothing stays that is nobody's; what stays is heard of as the other's."""
    ended: list[tuple[int, str]] = []

    def note(ids: ModelIds, owner: Conversation) -> None:
        ended.append((len(ids), owner.session))

    store.on_kept = note
    first = ids_of(1, 60)
    Running(store, first, owned("first")).prefill().finish()
    running = Running(store, joined(first[:-1], ids_of(2, 40)), owned("heir")).prefill()
    for name in forgotten:
        store.forget(ForgetFilter(name))
    running.decode(ids_of(3, 3)).finish()
    assert ended == [(59, "first")] * (1 if "first" in forgotten else 2)
    assert store.survey(first, "").depth == (0 if "first" in forgotten else 59)
    users = {user.session for n in store._tree.nodes() for user in n.users}
    assert users == {"first"} - set(forgotten)
    assert_sound(store)


@on_gpu
def test_what_very_many_began_with_goes_with_the_last_of_them(
    store: PrefixStore,
) -> None:
    """Though not all of their names are kept with it."""
    common, names = ids_of(1, 60), [f"s{number}" for number in range(20)]
    for number, name in enumerate(names, 2):
        ids = joined(common, (number,), ids_of(number, 5))
        Running(store, ids, owned(name)).prefill().finish()
    for name in reversed(names):
        assert store.match_len(joined(common, (1, 1))) == 60
        store.forget(ForgetFilter(name))
    assert store.rows() == []


@on_gpu
@pytest.mark.parametrize("is_forgotten", [True, False])
@every_kind
def test_what_runs_of_a_forgotten_conversation_leaves_nothing(
    kind: str, is_forgotten: bool, tiny_model: TinyModel
) -> None:
    """No checkpoint either; but what it was lent by others, who lose nothing."""
    store = PrefixStore(KVBudget(ROOMY), tiny_model(kind).new_cache)
    theirs = ids_of(1, 60)
    Running(store, theirs, owned("other")).prefill((59, 1)).finish()
    before = store.num_bytes
    mine = joined(theirs[:-1], ids_of(2, 400))
    running = Running(store, mine, owned("one"))
    assert running.cached_len == 59
    store.register(running.lease, mine)
    running.prefill((200, 1))
    store.forget(ForgetFilter("one" if is_forgotten else "nobody"))
    running.decode(ids_of(4, 3)).finish()
    assert store.match_len(theirs) == 59
    assert (store.survey(mine, "").depth == 59) is is_forgotten
    assert (store.num_bytes <= before) is is_forgotten
    users = {user.session for n in store._tree.nodes() for user in n.users}
    assert users == ({"other"} if is_forgotten else {"one", "other"})
    assert_sound(store)


@on_gpu
@pytest.mark.parametrize("how", ["clear", "fail"])
def test_memory_comes_back_at_once(store: PrefixStore, how: str) -> None:
    """Nodes know their parents and children: a cycle waits for the collector."""
    base = ids_of(1, 100)
    run(store, base)
    running = Running(store, joined(base, ids_of(2, 9))).prefill()
    run(store, joined(running.ids[:-1], ids_of(3, 40)))  # below what is lent
    nodes = list(store._tree.nodes())
    held = [weakref.ref(node) for node in nodes]
    held += [weakref.ref(node.buffer) for node in nodes if node.buffer is not None]
    del nodes
    gc.disable()
    try:
        store.forget() if how == "clear" else running.fail()
        if how == "clear":
            running.finish()
            store.forget()
        assert store.num_bytes == 0 == len(list(store.rows()))
        assert [ref() for ref in held if ref() is not None] == []
    finally:
        gc.enable()


@on_gpu
def test_a_prompt_cancelled_before_its_first_chunk_leaves_nothing(
    store: PrefixStore,
) -> None:
    sequence = Running(store, ids_of(1, 50))
    sequence.end_at(0)
    assert list(store.rows()) == []
    assert_sound(store)


# Exact on real forward passes


@every_kind
@pytest.mark.parametrize("way", ["lend", "partial lend", "copy", "running row", "cut"])
@on_gpu
def test_logits_after_reuse_are_those_of_a_fresh_prefill(
    kind: str, way: str, tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant III on real models: every way to get KV, delta 0 or rounding."""
    caplog.set_level(logging.ERROR)
    model = tiny_model(kind).model
    work = forward(model)
    store = PrefixStore(KVBudget(ROOMY), tiny_model(kind).new_cache)
    base, stop = ids_of(1, 150), 90
    first = Running(store, base, NOBODY, work).prefill((stop, 0))
    if way == "running row":
        asked = joined(base, ids_of(2, 40))
    else:
        first.decode(ids_of(3, 6)).finish()
        asked = joined(base[:stop], ids_of(2, 40))
    if way == "lend":
        asked = joined(first.ids, ids_of(2, 40))
    elif way == "copy":
        run(store, asked, ids_of(4, 3), work=work)
        asked = joined(asked, ids_of(4, 3), ids_of(5, 20))
    elif way == "cut":
        run(store, joined(base[:stop], ids_of(6, 9)), work=work)
    warm = Running(store, asked, NOBODY, work)
    assert warm.cached_len > 0 or (kind != "dense" and way == "running row")
    warm.advance(len(asked) - 1)
    got = np.array(model(mx.array([[asked[-1]]]), cache=warm.cache)[0, -1])
    wanted = np.array(model(mx.array([list(asked)]))[0, -1])
    assert np.abs(got - wanted).max() < 1e-5
    assert np.abs(wanted).max() > 0.1
