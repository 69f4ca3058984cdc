"""What leaves the store, in which order, and that its memory really goes."""

import gc
import math
from collections import Counter
from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv import eviction, kv_layers
from sidecar.kv.eviction import KVBudget, Limits, eviction_score, score
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.prefix_tree import Node
from testkit.clock import Clock
from testkit.sequences import ROOMY, Running, joined, on_gpu, owned, run
from testkit.sequences import some_ids as ids_of
from testkit.told_kv import HEADS, WIDTH, faults

TinyModel = Callable[[str], LoadedModel]
MAIN, SUBAGENT = owned("main"), owned("main", is_subagent=True)
# Told KV of the dense model: 2 layers, keys and values, fp32.
TOKEN_BYTES = 2 * 2 * HEADS * WIDTH * 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    modules = ("eviction", "leases", "prefix_store")
    return Clock(monkeypatch, *(f"sidecar.kv.{name}" for name in modules))


@pytest.fixture
def make_store(tiny_model: TinyModel) -> Callable[..., PrefixStore]:
    """A store of told KV: `make_store(kind="dense", **limits)`."""

    def make(kind: str = "dense", **limits: float) -> PrefixStore:
        everything = {"max_bytes": 1 << 30, "max_leaves": 1000, **limits}
        return PrefixStore(KVBudget(Limits(**everything)), tiny_model(kind).new_cache)  # type: ignore[arg-type]

    return make


MakeStore = Callable[..., PrefixStore]


def stored(store: PrefixStore, ids: Sequence[int]) -> int:
    """How many of these ids the store holds."""
    return store.match_len(joined(ids, (2999, 2998)))


# Order


@pytest.mark.parametrize(
    ("age", "length", "hits", "wanted"),
    [(600, 100, 1, 35.4), (600, 10000, 1, 3.54), (60, 100, 9, 1.82)],
)
def test_the_score_of_the_worked_examples(
    age: float, length: int, hits: int, wanted: float
) -> None:
    assert eviction_score(age, length, hits) == pytest.approx(wanted, abs=0.005 * age)
    assert f"{eviction_score(age, length, hits):.3g}" == f"{wanted:.3g}"


def test_a_subagent_weighs_half() -> None:
    mine, helper = (
        Node((1,) * 100, 0, None, is_subagent=is_it) for is_it in (False, True)
    )
    assert score(helper, 600.0) == 2 * score(mine, 600.0)


@on_gpu
def test_the_largest_score_goes_first(make_store: MakeStore, clock: Clock) -> None:
    """Old and short before old and long before young."""
    store = make_store(max_leaves=2)
    old_long, old_short, young = ids_of(1, 500), ids_of(2, 20), ids_of(3, 20)
    run(store, old_long)
    run(store, old_short)
    clock.advance(600)
    run(store, young)
    assert (stored(store, old_long), stored(store, old_short)) == (500, 0)
    assert stored(store, young) == 20
    clock.advance(10)
    run(store, ids_of(4, 20))
    assert (stored(store, old_long), stored(store, young)) == (0, 20)


@on_gpu
def test_a_burst_does_not_push_out_the_newest(
    make_store: MakeStore, clock: Clock
) -> None:
    """Short ones that came within a second: the first of them goes, long or short."""
    store = make_store(max_leaves=4)
    for number in range(6):
        run(store, ids_of(number, 100 - 10 * number))
        clock.advance(0.01)
    held = [number for number in range(6) if stored(store, ids_of(number, 50))]
    assert held == [2, 3, 4, 5]


@on_gpu
def test_a_path_that_is_used_stays_longer(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(max_leaves=2)
    used, idle = ids_of(1, 100), ids_of(2, 100)
    for ids in (used, idle):
        run(store, ids)
    for _ in range(5):
        back = Running(store, joined(used, (1,)))
        back.end_at(back.cached_len)
    clock.advance(100)
    for ids in (used, idle):  # equally old now
        for node in store._tree.match(ids).nodes:
            node.touched = clock.now() - 100
    run(store, ids_of(3, 100))
    assert (stored(store, used), stored(store, idle)) == (100, 0)


# Caps


@on_gpu
def test_no_more_conversations_are_kept_than_the_cap(make_store: MakeStore) -> None:
    store = make_store(max_leaves=24)
    for number in range(40):
        run(store, ids_of(number, 30))
        leaves = [n for n in store._tree.nodes() if not n.children]
        assert len(leaves) == min(number + 1, 24)
    assert sum(stored(store, ids_of(n, 30)) > 0 for n in range(40)) == 24
    assert stored(store, ids_of(39, 30)) == 30


@on_gpu
def test_what_nobody_asked_for_in_time_goes(
    make_store: MakeStore, clock: Clock
) -> None:
    store = make_store(ttl_s=100)
    run(store, ids_of(1, 50))
    clock.advance(60)
    run(store, ids_of(2, 50))
    clock.advance(60)
    run(store, ids_of(3, 50))
    assert [stored(store, ids_of(n, 50)) for n in (1, 2, 3)] == [0, 50, 50]


@on_gpu
def test_what_expired_goes_though_nobody_comes(
    make_store: MakeStore, clock: Clock
) -> None:
    """The store says when, lets it go when told, and its memory really goes."""
    store = make_store(ttl_s=100)
    settle()
    before = mx.get_active_memory() + mx.get_cache_memory()
    assert store.budget.expires_in() == 100
    run(store, joined(ids_of(1, 20), ids_of(2, 3000)))
    clock.advance(60)
    run(store, joined(ids_of(1, 20), ids_of(3, 3000)))
    assert store.budget.expires_in() == pytest.approx(40)
    clock.advance(40)
    assert store.budget.expires_in() == pytest.approx(0, abs=1e-6)
    clock.advance(1e-3)
    assert store.budget.expires_in() == 0
    store.budget.expire()
    assert stored(store, joined(ids_of(1, 20), ids_of(2, 50))) == 20
    assert store.budget.expires_in() == pytest.approx(60, abs=0.01)
    clock.advance(60)
    store.budget.expire()
    assert store.num_bytes == 0
    gc.collect()  # of the sequences that this test ran
    assert mx.get_active_memory() + mx.get_cache_memory() <= before


@on_gpu
def test_what_is_in_use_does_not_expire(make_store: MakeStore, clock: Clock) -> None:
    """Nor does anybody wake up for it at once, over and over."""
    store = make_store(ttl_s=100)
    run(store, ids_of(1, 50))
    running = Running(store, joined(ids_of(1, 50), (1, 2)))
    clock.advance(1000)
    assert store.budget.expires_in() == 100
    store.budget.expire()
    running.finish()
    assert stored(store, ids_of(1, 50)) == 50
    assert store.budget.expires_in() == 100


@on_gpu
def test_a_ttl_of_zero_is_for_ever(make_store: MakeStore, clock: Clock) -> None:
    store = make_store(ttl_s=0)
    run(store, ids_of(1, 50))
    clock.advance(1e8)
    assert store.budget.expires_in() == math.inf
    run(store, ids_of(2, 50))
    assert stored(store, ids_of(1, 50)) == 50


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
@on_gpu
def test_the_bytes_stay_within_the_budget(kind: str, make_store: MakeStore) -> None:
    """Whenever nothing runs; what is left is exact."""
    budget = 700 * TOKEN_BYTES
    store = make_store(kind, max_bytes=budget)
    path = ids_of(0, 40)
    for number in range(30):
        path = joined(path if number % 7 else ids_of(number, 40), ids_of(number, 30))
        run(store, path, ids_of(100 + number, 3))
        assert store.num_bytes <= budget
        assert store.check_integrity() == []
        back = Running(store, joined(path, (1,)))
        assert faults(back.cache, path[: back.cached_len]) == []
        back.end_at(back.cached_len)
    assert store.counters["evicted_tokens"] > 0


# Memory


def settle() -> None:
    """Let what earlier tests left behind go first."""
    gc.collect()
    mx.clear_cache()


@on_gpu
def test_evicting_half_of_a_split_node_frees_its_bytes(make_store: MakeStore) -> None:
    """The halves share a buffer: the one that stays must not keep the other alive."""
    long, common = ids_of(1, 6000), 3000
    store = make_store()
    run(store, long)
    Running(store, joined(long[:common], (1, 2))).end_at(common)  # splits it
    assert store.num_bytes >= 6000 * TOKEN_BYTES
    mx.clear_cache()
    before, bytes_before = mx.get_active_memory(), store.num_bytes
    store.budget.limits = Limits(max_bytes=common * TOKEN_BYTES + 1, max_leaves=1000)
    Running(store, joined(long[:5], (1, 2))).end_at(5)
    freed = before - mx.get_active_memory()
    assert stored(store, long) <= common
    assert freed == bytes_before - store.num_bytes
    assert freed >= (6000 - common) * TOKEN_BYTES
    assert store.check_integrity() == []


@on_gpu
def test_only_as_much_of_a_tail_goes_as_is_needed(make_store: MakeStore) -> None:
    """Cut at an anchor, every 2048 tokens."""
    store = make_store(max_bytes=5000 * TOKEN_BYTES)
    run(store, ids_of(1, 6000))
    assert stored(store, ids_of(1, 6000)) == 4096
    assert store.num_bytes == 4096 * TOKEN_BYTES
    back = Running(store, joined(ids_of(1, 6000)[:4096], (1,)))
    assert faults(back.cache, ids_of(1, 6000)[:4096]) == []


@on_gpu
def test_everything_can_go_at_once(make_store: MakeStore) -> None:
    store = make_store(max_bytes=1)
    before = mx.get_active_memory()
    for number in range(3):
        run(store, ids_of(number, 500))
        assert (store.num_bytes, list(store.rows())) == (0, [])
    mx.clear_cache()
    assert mx.get_active_memory() <= before


# What runs


@on_gpu
def test_what_a_batch_computes_costs_no_conversation(make_store: MakeStore) -> None:
    """However many of its rows run at once; when they end they are the first to go."""
    store = make_store(max_leaves=2)
    run(store, ids_of(1, 100), owner=MAIN)
    batch = owned("", is_batch=True)
    rows = [Running(store, ids_of(n, 30), batch).prefill() for n in range(2, 8)]
    assert len([*store._tree.leaves]) == 7
    for row in rows:
        row.decode((1, 2)).finish()
        assert stored(store, ids_of(1, 100)) == 100
    assert len([*store._tree.leaves]) == 2
    assert store.check_integrity() == []


@on_gpu
def test_nothing_leased_or_lent_is_evicted(make_store: MakeStore) -> None:
    """A budget of one byte, and still all that running requests use stays."""
    store = make_store()
    common, long = ids_of(1, 300), ids_of(2, 200)
    run(store, joined(common, ids_of(3, 50)))
    run(store, long)
    copied = Running(store, joined(common[:100], ids_of(4, 5)))  # leases, copied
    borrowed = Running(store, joined(long, ids_of(5, 5))).prefill()
    store.budget.limits = Limits(max_bytes=1, max_leaves=1)
    run(store, ids_of(6, 90))
    assert store.counters["lent"] == 1
    assert stored(store, ids_of(6, 90)) == 0
    assert stored(store, common) == 100  # its own tail was free to go
    assert stored(store, long) == 200
    for sequence in (copied, borrowed):
        sequence.prefill().decode((1, 2))
        assert faults(sequence.cache, sequence.ids) == []
        assert store.check_integrity() == []
        sequence.finish()
    assert list(store.rows()) == []


# Checkpoints


def checkpoints(store: PrefixStore) -> list[tuple[int, int]]:
    """Rank and depth of all that are held."""
    nodes = [n for n in store._tree.nodes() if n.checkpoint is not None]
    return sorted((n.checkpoint_rank, n.end) for n in nodes)


@on_gpu
def test_a_session_holds_sixteen_checkpoints_the_worthiest(
    make_store: MakeStore,
) -> None:
    store = make_store("hybrid", checkpoints_per_session=16)
    prompt = ids_of(1, 400)
    stops = [(10, 0), (20, 1), *((d, 3) for d in range(30, 390, 10))]
    Running(store, prompt, MAIN).prefill(*stops).finish()
    held = checkpoints(store)
    assert len(held) == 16
    assert {rank for rank, _ in held} == {0, 1, 2, 3}
    assert [depth for rank, depth in held if rank < 3] == [10, 20, 399]
    # a second session has its own sixteen
    other = Running(store, ids_of(2, 400), owned("other"))
    other.prefill(*stops).finish()
    assert len(checkpoints(store)) == 32


@on_gpu
def test_all_sessions_together_hold_sixty_four(make_store: MakeStore) -> None:
    store = make_store("hybrid")
    stops = [(10, 0), *((d, 3) for d in range(20, 180, 10))]
    for number in range(6):
        owner = owned(f"s{number}")
        Running(store, ids_of(number, 200), owner).prefill(*stops).finish()
    held = Counter(rank for rank, _ in checkpoints(store))
    assert 60 <= sum(held.values()) <= 64
    assert (held[0], held[2]) == (6, 6)


@on_gpu
def test_checkpoints_take_a_quarter_of_the_budget_by_rank(
    make_store: MakeStore,
) -> None:
    """Few large ones: their bytes count; the least worthy go."""
    maximum = 100 * HEADS * WIDTH * 2 * 4  # of a window of 64 and a chunk of at most 37
    budget = 4 * 5 * maximum
    store = make_store("sliding", max_bytes=budget)
    stops = [
        (36, 3),
        (72, 3),
        (80, 0),
        (100, 1),
        *((d, 3) for d in range(110, 190, 10)),
    ]
    Running(store, ids_of(2, 200), MAIN).prefill(*stops).finish()
    total = sum(n.checkpoint_bytes for n in store._tree.nodes())
    assert total <= budget // 4
    assert 5 <= len(checkpoints(store)) <= 7
    assert [item for item in checkpoints(store) if item[0] < 3] == [
        (0, 80), (1, 100), (2, 199),
    ]  # fmt: skip


@on_gpu
def test_a_lost_checkpoint_is_a_shorter_match_no_more(make_store: MakeStore) -> None:
    store = make_store("hybrid")
    prompt = ids_of(1, 200)
    Running(store, prompt).prefill((50, 0), (150, 3)).finish()
    (node,) = [n for n in store._tree.nodes() if n.end == 199]
    store._tree.drop_checkpoint(node)
    assert stored(store, prompt) == 150
    back = Running(store, joined(prompt, (1,)))
    assert faults(back.cache, prompt[:150]) == []
    assert store.check_integrity() == []


# Sharing


@on_gpu
def test_branches_over_one_prefix_store_it_once(make_store: MakeStore) -> None:
    """8 x 200 own tokens over 4096 common ones: at most 1.15 x the unique ones."""
    store = make_store()
    prefix = ids_of(1, 4096)
    for number in range(8):
        run(store, joined(prefix, ids_of(10 + number, 150)), ids_of(30 + number, 50))
    unique = (4096 + 8 * 200) * TOKEN_BYTES
    assert store.num_bytes <= 1.15 * unique
    for number in range(8):
        path = joined(prefix, ids_of(10 + number, 150), ids_of(30 + number, 50))
        assert stored(store, path) == len(path)


@on_gpu
def test_branches_that_run_together_store_it_once_too(make_store: MakeStore) -> None:
    store = make_store()
    prefix = ids_of(1, 4096)
    running = [
        Running(store, joined(prefix, ids_of(10 + n, 150))).prefill() for n in range(8)
    ]
    for number, sequence in enumerate(running):
        sequence.decode(ids_of(30 + number, 50))
    for sequence in running:
        sequence.finish()
        assert store.check_integrity() == []
    assert store.num_bytes <= 1.15 * (4096 + 8 * 200) * TOKEN_BYTES


# Sub-agents


@pytest.mark.parametrize("shares_system", [True, False])
@pytest.mark.parametrize("gap_s", [0.1, 2.0, 10.0])
@on_gpu
def test_fifty_subagents_do_not_evict_the_main_thread(
    gap_s: float, shares_system: bool, make_store: MakeStore, clock: Clock
) -> None:
    """Titles and sub-agents, while the main thread waits for them."""
    store = make_store(max_leaves=24)
    system = ids_of(1, 1000)
    path = joined(system, ids_of(2, 2000))
    for turn in range(5):
        path = joined(path, ids_of(50 + turn, 100))
        run(store, path, ids_of(60 + turn, 20), MAIN)
        path = joined(path, ids_of(60 + turn, 20))
        clock.advance(5)
    for number in range(50):
        head = system if shares_system else ids_of(3, 20)
        run(store, joined(head, ids_of(100 + number, 80)), ids_of(7, 5), SUBAGENT)
        clock.advance(gap_s)
        assert stored(store, path) == len(path)


@on_gpu
def test_subagents_go_before_the_main_thread_when_bytes_run_out(
    make_store: MakeStore, clock: Clock
) -> None:
    main = ids_of(1, 600)
    store = make_store(max_bytes=1200 * TOKEN_BYTES)
    run(store, main, (), MAIN)
    for number in range(50):
        clock.advance(1)
        run(store, ids_of(100 + number, 600), (), SUBAGENT)
        assert stored(store, main) == 600


# One conversation


@pytest.mark.parametrize("earlier", [0, 300, 3000])
@on_gpu
def test_a_conversation_is_not_held_twice_while_it_runs(
    earlier: int, make_store: MakeStore
) -> None:
    """
    Store and live together: at most 1.3 x its own size and the rest of the store.

    Another conversation may have been there before, with the same system prompt.
    """
    store = make_store()
    system = ids_of(1, 400)
    if earlier:
        run(store, joined(system, ids_of(2, earlier)))
    rest = store.num_bytes
    path = joined(system, ids_of(3, 3000))
    for turn in range(4):
        sequence = Running(store, path).prefill()
        sequence.decode(ids_of(60 + turn, 20))
        live = kv_layers.nbytes(kv_layers.sliceable_leaves(sequence.cache))
        own = len(sequence.ids) * TOKEN_BYTES
        if turn:  # the first turn computes it all
            assert store.num_bytes + live <= 1.3 * own + rest
        sequence.finish()
        path = joined(sequence.ids, ids_of(80 + turn, 30))


def test_the_plans_decide_and_do_not_act() -> None:
    """An empty tree has nothing to give."""
    store = PrefixStore(KVBudget(ROOMY), list)
    assert eviction.plan_eviction([store._tree], Limits(0, 0), 1 << 40) is None
    assert eviction.plan_forgetting([store._tree], Limits(0)) == []


@on_gpu
def test_the_tail_of_a_lent_path_is_copied_at_once(make_store: MakeStore) -> None:
    """A slice that waits would hold all that it is cut from."""
    store, long = make_store(), ids_of(1, 6000)
    run(store, long)
    settle()
    before = mx.get_active_memory()
    branch = Running(store, joined(long[:5000], (1, 2)))
    mx.clear_cache()
    assert store.counters["lent"] == 1
    assert mx.get_active_memory() - before == store.num_bytes >= 1000 * TOKEN_BYTES
    branch.end_at(5000)


@on_gpu
def test_what_a_sequence_adds_does_not_keep_its_copy_alive(
    make_store: MakeStore,
) -> None:
    """The tree needs a hundred tokens of six thousand."""
    store, long = make_store(), ids_of(1, 6000)
    run(store, long)
    holder = Running(store, joined(long, (3, 4)))  # so the other must copy
    other = Running(store, joined(long, ids_of(2, 100))).prefill()
    assert store.counters["copied"] == 1
    holder.end_at(6000)
    settle()
    before, bytes_before = mx.get_active_memory(), store.num_bytes
    other.finish()
    other.cache = []
    mx.clear_cache()
    added = store.num_bytes - bytes_before
    assert added <= 200 * TOKEN_BYTES
    assert before - mx.get_active_memory() >= 5800 * TOKEN_BYTES


@on_gpu
def test_what_is_handed_over_is_freed_at_once(make_store: MakeStore) -> None:
    """A running sequence holds a third of a buffer: the rest is computed smaller."""
    store, long = make_store(), ids_of(1, 6000)
    run(store, long)
    running = Running(store, joined(long[:2000], ids_of(2, 10))).prefill()
    assert store.counters["copied"] == 1
    settle()
    before, bytes_before = mx.get_active_memory(), store.num_bytes
    store.budget.evict_bytes(1)
    mx.clear_cache()
    freed = bytes_before - store.num_bytes
    assert freed >= 2000 * TOKEN_BYTES
    assert before - mx.get_active_memory() >= freed - TOKEN_BYTES
    running.finish()


# What a waiting request was promised


@on_gpu
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_what_is_reserved_stays_while_others_can_go(
    make_store: MakeStore, clock: Clock, kind: str
) -> None:
    """The caps take others, though it is the oldest; after that it goes first."""
    store = make_store(kind, max_leaves=2, checkpoints_in_all=2)
    waiting = ids_of(1, 300)
    run(store, waiting)
    reservation = store.reserve(joined(waiting, (2999, 2998)), "")
    for seed in range(2, 6):
        clock.advance(600)
        run(store, ids_of(seed, 300))
    assert stored(store, waiting) == 300
    store.end_reservation(reservation)
    store.end_reservation(reservation)
    clock.advance(600)
    run(store, ids_of(6, 300))
    assert stored(store, waiting) == 0
    assert store.check_integrity() == []


@on_gpu
def test_what_is_reserved_goes_where_the_memory_is_needed(
    make_store: MakeStore,
) -> None:
    """A request that runs is worth more than one that waits."""
    store = make_store()
    waiting, other = ids_of(1, 300), ids_of(2, 300)
    run(store, waiting)
    run(store, other)
    reservation = store.reserve(joined(waiting, (7,)), "")
    store.budget.evict_bytes(1)
    assert (stored(store, waiting), stored(store, other)) == (300, 0)
    store.budget.evict_bytes(1 << 40)
    assert stored(store, waiting) == 0
    store.end_reservation(reservation)
    assert store.check_integrity() == []


@on_gpu
def test_a_reserved_path_may_be_parted_and_forgotten(make_store: MakeStore) -> None:
    """Both parts stay reserved; who forgets does not ask who waits."""
    store = make_store(max_leaves=2)
    waiting = ids_of(1, 300)
    run(store, waiting)
    reservation = store.reserve(joined(waiting[:200], (7,)), "")
    run(store, joined(waiting[:100], ids_of(2, 50)))
    assert sorted(node.end for node in reservation.nodes) == [100, 299]
    store.forget()
    assert stored(store, waiting) == 0
    assert reservation.nodes == []  # nor are its arrays held
    store.end_reservation(reservation)
    run(store, waiting)
    assert not any(node.reservations for node in store._tree.nodes())
