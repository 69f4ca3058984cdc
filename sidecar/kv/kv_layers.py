"""
The only surgery on KV caches: copy, cut, join, grow, depth, bytes, batch form, release.

A "cache" here is mlx-lm's list with one object per layer, for one sequence. Its atoms
are those objects with CacheList opened up. An atom is *sliceable* if its state is one
row per token, so that any prefix of it is the state at that depth; the others
(recurrent, rotating) exist only at the depth they were computed to: checkpoints.
"""

import contextlib
import copy
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache, QuantizedKVCache

KVLayers = list[Any]
Leaves = list[mx.array]  # the arrays of one sliceable atom, tokens on axis -2
_SEQUENCE_AXIS = -2
ROOM_STEP = 256  # tokens: what the length of a buffer is a multiple of
_ROOM_SHARE = 16  # of a long buffer, by which it grows
EARLY_ROOM = 32  # the last tokens of a buffer, in which layers grow one by one
_EARLY_SHARE = 2  # so that all have grown in half of that
_STEPS_TO_CLEAR = 8  # behind a prompt whose chunks left much in the allocator's cache
MUCH_KEPT = 1 << 30  # bytes that the allocator may keep


def atoms(cache: Sequence[Any]) -> Iterator[Any]:
    """The layers, composite ones opened up."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from atoms(layer.caches)
        else:
            yield layer


def is_sliceable_atom(atom: Any) -> bool:
    """Asked of the live object: rows per token, and nothing ever forgotten."""
    return type(atom) in (KVCache, QuantizedKVCache)


def kinds(cache: KVLayers) -> dict[str, int]:
    """How many layers there are of each kind, and which of them cannot be cut."""
    names = (
        type(atom).__name__ + ("" if is_sliceable_atom(atom) else " (not cut)")
        for atom in atoms(cache)
    )
    return dict(Counter(names))


def is_sliceable(cache: KVLayers) -> bool:
    """Whether every layer can be cut back to any depth."""
    return all(is_sliceable_atom(atom) for atom in atoms(cache))


def copy_layers(cache: KVLayers) -> KVLayers:
    """
    A cache that can be advanced while the original stays as it is.

    Costs no memory until one of the two is written to. deepcopy, because a slice
    assignment changes the array object in place and two caches must not share one.
    """
    return copy.deepcopy(cache)


def depth(cache: KVLayers) -> int | None:
    """
    Tokens the cache holds; None if no layer counts them.

    What no layer of the model ever writes to (a block without attention) counts not.

    Raises:
        ValueError: its layers do not agree.
    """
    counting = [a for a in atoms(cache) if hasattr(a, "offset")]
    used = [a for a in counting if getattr(a, "keys", a) is not None]
    offsets = {int(a.offset) for a in used or counting}
    if len(offsets) > 1:
        raise ValueError(
            f"layers hold {' and '.join(map(str, sorted(offsets)))} tokens"
        )
    return offsets.pop() if offsets else None


def evaluate(cache: KVLayers) -> None:
    """Compute all pending state."""
    mx.eval([layer.state for layer in cache])


def leaves(atom: Any) -> Leaves:
    """The arrays of a sliceable atom, room included; empty before its first token."""
    if atom.keys is None:
        return []
    if isinstance(atom, QuantizedKVCache):
        return [*atom.keys, *atom.values]
    return [atom.keys, atom.values]


def is_quantized(arrays: Leaves) -> bool:
    """Whether these are packed values with scales, not just keys and values."""
    return len(arrays) > 2


def set_leaves(atom: Any, arrays: Leaves, offset: int) -> None:
    """Give a fresh sliceable atom its arrays and the number of tokens in them."""
    if not arrays:
        return  # nothing is ever written there
    if isinstance(atom, QuantizedKVCache):
        half = len(arrays) // 2
        atom.keys, atom.values = tuple(arrays[:half]), tuple(arrays[half:])
    else:
        atom.keys, atom.values = arrays
    atom.offset = offset


def cut(arrays: Leaves, start: int, end: int) -> Leaves:
    """Tokens [start, end) as arrays of their own: a slice would keep its parent."""
    return [mx.contiguous(a[..., start:end, :]) for a in arrays]


def view(arrays: Leaves, start: int, end: int) -> Leaves:
    """Tokens [start, end), to be copied into something else at once."""
    return [a[..., start:end, :] for a in arrays]


def is_on_cuda() -> bool:
    """Whether arrays are computed by CUDA."""
    return mx.default_device() != mx.cpu and not mx.metal.is_available()


def is_attention_planned() -> bool:
    """Whether attention is planned anew for each length of the keys."""
    return is_on_cuda()


def buffer_length(num_tokens: int) -> int:
    """
    The length of a buffer that holds so many tokens and has to grow later.

    Long buffers grow by a sixteenth of the power of two that they have passed. So they
    are seldom copied, and have few lengths: on CUDA the attention of a decode step is
    planned anew for each (engine/selftest/attention_plans).
    """
    passed = 1 << max(0, num_tokens.bit_length() - 1)
    step = max(ROOM_STEP, passed // _ROOM_SHARE)
    return -(-num_tokens // step) * step


def join(runs: Sequence[Leaves], room: int) -> Leaves:
    """Concatenate runs, with room for `room` more tokens behind."""
    if not runs[0]:
        return []
    total = sum(run[0].shape[_SEQUENCE_AXIS] for run in runs)
    padded = buffer_length(total + room)
    joined = []
    for parts in zip(*runs, strict=True):
        shape = list(parts[0].shape)
        shape[_SEQUENCE_AXIS] = padded - total
        behind = mx.zeros(shape, parts[0].dtype)
        joined.append(mx.concatenate([*parts, behind], axis=_SEQUENCE_AXIS))
    return joined


def make_room(cache: KVLayers, num_tokens: int, step: int = ROOM_STEP) -> None:
    """
    Let the plain layers hold so many tokens more without growing.

    mlx-lm's layers grow within a decode step, by 256 tokens. On CUDA that step has a
    graph that no other has, which is made anew: 80 to 110 ms on an H100, 850 once,
    where a step takes 12. One that grows before it has the graph of the layer before.
    To copy all layers takes longer than a step as well, so some are copied in each of
    the last steps before their buffers are full.

    Args:
        step: a multiple of 256; each buffer is as long as one for the next multiple of
            it (`buffer_length`), or longer.
    """
    if has_room(cache, num_tokens, step):
        return
    plain = [*filter(_is_plain, atoms(cache))]
    needed, wanted = _lengths(plain[0], num_tokens, step)
    num_early = math.ceil(len(plain) * num_tokens * _EARLY_SHARE / EARLY_ROOM)
    for atom in reversed(plain):
        length = atom.keys.shape[2]
        if wanted > length:
            _grow(atom, wanted)
        elif num_early > 0 and needed + EARLY_ROOM > length:
            num_early -= 1
            _grow(atom, length + 1)


def has_room(cache: KVLayers, num_tokens: int, step: int = ROOM_STEP) -> bool:
    """Whether `make_room` would leave the plain layers as they are."""
    first = next(filter(_is_plain, atoms(cache)), None)
    if first is None:
        return True
    needed, wanted = _lengths(first, num_tokens, step)
    # The first one is the last to grow.
    return bool(max(wanted, needed + EARLY_ROOM) <= first.keys.shape[2])


def _lengths(first: Any, num_tokens: int, step: int) -> tuple[int, int]:
    """Tokens that all layers will hold, equally deep, and the multiple above that."""
    held = first._idx if type(first) is BatchKVCache else first.offset
    needed = held + num_tokens
    return needed, -(-needed // step) * step


def _is_plain(atom: Any) -> bool:
    return type(atom) in (KVCache, BatchKVCache) and atom.keys is not None


def _grow(atom: Any, num_tokens: int) -> None:
    missing = num_tokens - atom.keys.shape[2]
    atom.keys, atom.values = join([[atom.keys, atom.values]], missing)
    mx.async_eval(atom.keys, atom.values)  # type: ignore[no-untyped-call]


def sliceable_leaves(cache: KVLayers) -> list[Leaves]:
    """The arrays of all sliceable atoms, in order."""
    return [leaves(atom) for atom in atoms(cache) if is_sliceable_atom(atom)]


def arrays_of(cache: Sequence[Any]) -> list[mx.array]:
    """Every array that its layers hold, those they count with included."""
    return arrays_in([list(vars(atom).values()) for atom in atoms(cache)])


def take_checkpoint(cache: KVLayers) -> list[Any]:
    """Copies of the atoms that cannot be cut, at the present depth; free until used."""
    return [copy.deepcopy(a) for a in atoms(cache) if not is_sliceable_atom(a)]


def restore_checkpoint(cache: KVLayers, checkpoint: list[Any]) -> None:
    """Put the atoms that cannot be cut back to a checkpoint, which is used up."""
    held = [a for a in atoms(cache) if not is_sliceable_atom(a)]
    for atom, kept in zip(held, checkpoint, strict=True):
        atom.__dict__.update(kept.__dict__)


def trim(cache: KVLayers, num_tokens: int) -> None:
    """Cut the last tokens off the atoms that can be cut."""
    for atom in atoms(cache):
        if is_sliceable_atom(atom):
            atom.trim(num_tokens)


def own_checkpoint(checkpoint: list[Any]) -> None:
    """Make a checkpoint independent of larger arrays that it may be a slice of."""
    for atom in checkpoint:
        with contextlib.suppress(AttributeError):  # one whose state cannot be set
            atom.state = _owned(atom.state)
        mx.eval(arrays_in(atom.state))


def rebuild(
    fresh: KVLayers, arrays: Sequence[Leaves], checkpoint: Sequence[Any], offset: int
) -> None:
    """
    Fill a fresh cache.

    Args:
        arrays: for the sliceable atoms. checkpoint: copied in for the others, in
            order. offset: tokens in the arrays.
    """
    sliced, kept = iter(arrays), iter(checkpoint)
    for atom in atoms(fresh):
        if is_sliceable_atom(atom):
            set_leaves(atom, next(sliced), offset)
        else:
            source = copy.deepcopy(next(kept))
            atom.__dict__.update(source.__dict__)


def nbytes(arrays: Sequence[Leaves]) -> int:
    """Bytes of leaves."""
    return sum(a.nbytes for run in arrays for a in run)


def token_nbytes(cache: KVLayers) -> int:
    """Bytes that one token takes in the layers with a row per token; at least 1."""
    arrays = [
        array
        for layer in cache
        if getattr(layer, "keys", None) is not None
        for array in arrays_in([layer.keys, layer.values])
    ]
    return max(1, sum(a.nbytes // a.shape[_SEQUENCE_AXIS] for a in arrays))


def checkpoint_nbytes(checkpoint: Sequence[Any]) -> int:
    """Bytes of a checkpoint."""
    return sum(a.nbytes for atom in checkpoint for a in arrays_in(atom.state))


def to_batch(cache: KVLayers) -> KVLayers:
    """
    A batch cache of one row that takes over the arrays of `cache`.

    A plain KV layer moves without a copy and keeps the room it has; mlx-lm's own
    merge would copy it into an exactly sized buffer, and again at the first token.
    """
    return [
        _insert(layer) if type(layer) is KVCache else layer.merge([layer])
        for layer in cache
    ]


def share_offsets(batch: KVLayers) -> None:
    """
    Let the layers of a batch that are of one depth count it in one array.

    Each adds to its own, which on CUDA is a kernel a layer and step, for nothing: an
    array that nobody keeps is never computed.
    """
    plain = [layer for layer in batch if type(layer) is BatchKVCache]
    for layer in plain[1:]:
        if layer._idx == plain[0]._idx:
            layer.offset = plain[0].offset


def from_only_row(batch: KVLayers) -> KVLayers:
    """The caches of a batch of one row, taken over without a copy where possible."""
    return [
        _with_arrays(layer, layer._idx) if _is_unpadded(layer) else row_of(layer, 0)
        for layer in batch
    ]


def row_of(layer: Any, row: int) -> Any:
    """One row's cache of a batch's layer."""
    if type(layer) is BatchKVCache and layer.keys is None:
        return KVCache()
    return layer.extract(row)


def borrow_layers(cache: KVLayers) -> KVLayers:
    """
    A second cache at the same depth; plain KV layers share their arrays.

    For reading, or to go on with once the first is given up.
    """
    return [
        _with_arrays(layer, layer.offset)
        if type(layer) is KVCache
        else copy.deepcopy(layer)
        for layer in cache
    ]


def _insert(layer: Any) -> Any:
    batch = BatchKVCache([0])
    batch.keys, batch.values = layer.keys, layer.values
    batch.offset = mx.array([layer.offset])
    batch._idx = layer.offset
    return batch


def _is_unpadded(layer: Any) -> bool:
    return type(layer) is BatchKVCache and layer.left_padding.tolist() == [0]


def _with_arrays(layer: Any, offset: int) -> Any:
    single = KVCache()
    single.keys, single.values, single.offset = layer.keys, layer.values, offset
    return single


def arrays_in(state: Any) -> list[mx.array]:
    """The arrays of a tree of lists, tuples and whatever else."""
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, (list, tuple)):
        return [array for item in state for array in arrays_in(item)]
    return []


def _owned(state: Any) -> Any:
    if isinstance(state, mx.array):
        return mx.contiguous(state + 0) if state.ndim else state
    if isinstance(state, (list, tuple)):
        return type(state)(_owned(item) for item in state)
    return state


def release_freed_memory() -> None:
    """
    Have the allocator give what it keeps of freed memory back to the system.

    Not before the GPU has done what it was asked to: a driver that still uses what it
    is given back has panicked Macs (omlx issue 300).
    """
    mx.synchronize()
    mx.clear_cache()


def give_back_much(much: int = MUCH_KEPT) -> None:
    """The same, where it is worth it: what is kept is there for the next one."""
    if mx.get_cache_memory() > much:
        release_freed_memory()


class Released:
    """
    Arrays of requests that have ended, held for some steps. GPU thread only.

    The step that is in hand when a request ends goes on writing to its arrays. On Macs
    the driver must not be given those back before it has done (omlx pull 648).

    Args:
        delay: steps for which they are held; 0: not at all.
        much: bytes; where the allocator keeps more behind a prompt, it gives them back.
        is_patient: whether that waits for an idle moment, however long it takes.
    """

    def __init__(
        self, delay: int = 0, much: int = MUCH_KEPT, *, is_patient: bool = False
    ) -> None:
        self._delay = delay
        self._much = much
        self._is_patient = is_patient
        self._step = 0
        self._held: deque[tuple[int, list[mx.array]]] = deque()
        self._clear_at = math.inf

    def __bool__(self) -> bool:
        return bool(self._held) or (self._clear_at < math.inf and not self._is_patient)

    @property
    def waits_for_idle(self) -> bool:
        """Whether something is to be given back in an idle moment."""
        return self._is_patient and self._clear_at < math.inf

    @property
    def arrays(self) -> list[mx.array]:
        """What is held now."""
        return [array for _, arrays in self._held for array in arrays]

    def hold(self, tree: Any) -> None:
        """Hold the arrays of a tree of lists."""
        if self._delay and (found := arrays_in(tree)):
            self._held.append((self._step + self._delay, found))

    def clear_later(self) -> None:
        """Give back what the allocator keeps, if it is much; not in this step."""
        self._clear_at = self._step + max(self._delay, _STEPS_TO_CLEAR)

    def step(self) -> None:
        """Count a step, and let go what was held for long enough."""
        self._step += 1
        while self._held and self._held[0][0] <= self._step:
            self._held.popleft()
        if self._clear_at <= self._step and not self._is_patient:
            self._clear()

    def let_go(self) -> None:
        """Let all of it go, once the GPU has done what it was asked to."""
        if self._held:
            mx.synchronize()
            self._held.clear()
        self.give_back()

    def give_back(self) -> None:
        """Give back what the allocator keeps, if that is due and much."""
        if self._clear_at < math.inf:
            self._clear()

    def _clear(self) -> None:
        self._clear_at = math.inf
        give_back_much(self._much)
