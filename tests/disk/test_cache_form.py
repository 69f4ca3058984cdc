"""A cache as names and values, and back; mlx-lm reads what is one to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
)

from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.kv.disk.cache_form import (
    NotWritable,
    describe,
    restore_states,
    shapes_of,
    to_numpy,
)
from sidecar.kv.disk.slot_arrays import bits_of
from sidecar.kv.disk.tensor_file import write_tensors
from sidecar.kv.kv_layers import (
    atoms,
    is_quantized,
    is_sliceable_atom,
    leaves,
    set_leaves,
    take_checkpoint,
)
from testkit.jobs import random_ids
from testkit.kept_kv import ask, flush, kept_sidecar, slots

ModelFolder = Callable[[str], Path]
TOKENS = 40


def filled(layer: Any, tokens: int = TOKENS) -> Any:
    """A layer that has seen so many tokens, in two steps."""
    for count in (tokens - 3, 3):
        keys = mx.random.normal((1, 2, count, 32))
        layer.update_and_fetch(keys, keys + 1)
    return layer


def recurrent() -> ArraysCache:
    layer = ArraysCache(3)
    layer[0], layer[2] = mx.random.normal((1, 3, 8)), mx.zeros((1, 2, 0))
    return layer  # one of its arrays is None


def packed() -> Any:
    return filled(KVCache()).to_quantized(group_size=32, bits=8)


LAYERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "plain": (KVCache, lambda: filled(KVCache())),
    "never written": (KVCache, KVCache),
    "packed": (lambda: KVCache().to_quantized(group_size=32, bits=8), packed),
    "window not full": (
        lambda: RotatingKVCache(64), lambda: filled(RotatingKVCache(64))
    ),
    "window wrapped": (
        lambda: RotatingKVCache(16, keep=4), lambda: filled(RotatingKVCache(16, keep=4))
    ),
    "recurrent": (lambda: ArraysCache(3), recurrent),
    "list": (
        lambda: CacheList(KVCache(), RotatingKVCache(16)),
        lambda: CacheList(filled(KVCache()), filled(RotatingKVCache(16))),
    ),
}  # fmt: skip


def written(path: Path, fresh: list[Any], cache: list[Any], *, is_root: bool) -> Any:
    """A file of a cache; its form."""
    runs = [leaves(a) for a in atoms(cache) if is_sliceable_atom(a)]
    runs = [[a[..., :TOKENS, :] for a in run] for run in runs]
    form = describe(
        fresh, [shapes_of(run, TOKENS) for run in runs], take_checkpoint(cache)
    )
    arrays = [to_numpy(bits_of(a)) for run in runs for a in run]
    with path.open("wb") as file:
        write_tensors(
            file, form.specs, form.metadata(is_root=is_root),
            [*arrays, *form.rest()],
        )  # fmt: skip
    return form


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("kind", LAYERS)
def test_all_that_a_layer_is_comes_back(
    kind: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    def check() -> None:
        make, full = LAYERS[kind]
        cache = [full()]
        if dtype != mx.float32:
            cast(cache, dtype)
        form = written(tmp_path / "kv", [make()], cache, is_root=True)
        back = read_back(tmp_path / "kv", [make()], form)
        assert same(back[0], cache[0])

    gpu_thread().call(check)


def cast(cache: list[Any], dtype: mx.Dtype) -> None:
    """The same in another type, packed bits apart."""
    for atom in atoms(cache):
        for name in ("keys", "values"):
            value = getattr(atom, name, None)
            if isinstance(value, mx.array):
                setattr(atom, name, value.astype(dtype))


def read_back(path: Path, fresh: list[Any], form: Any) -> list[Any]:
    """The cache of a file."""
    arrays: Any = mx.load(str(path), format="safetensors")
    names = [[spec.name for spec in run] for run in form.runs]
    sliceable = [a for a in atoms(fresh) if is_sliceable_atom(a)]
    for atom, named in zip(sliceable, names, strict=True):
        set_leaves(atom, [arrays[name] for name in named], TOKENS)
    restored = iter(restore_states(fresh, form.scalars, arrays))
    for atom in atoms(fresh):
        if not is_sliceable_atom(atom):
            atom.__dict__.update(next(restored).__dict__)
    return fresh


def same(one: Any, other: Any) -> bool:
    """All that two layers are, arrays by value; room behind a run apart."""
    if isinstance(one, CacheList):
        return all(map(same, one.caches, other.caches))
    if is_sliceable_atom(one):
        mine, its = leaves(one), [a[..., :TOKENS, :] for a in leaves(other)]
        kinds = [is_quantized(run) for run in (mine, its)]
        return kinds[0] == kinds[1] and one.offset == other.offset and equal(mine, its)
    return equal(vars(one), vars(other))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, mx.array):
        return one.dtype == other.dtype and bool(mx.array_equal(one, other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[n], other[n]) for n in one)
    return bool(one == other)


@pytest.mark.parametrize("kind", [k for k in LAYERS if k != "never written"])
def test_mlx_lm_reads_what_begins_a_prompt(kind: str, tmp_path: Path) -> None:
    """And refuses a piece rather than take it for the whole."""

    def check() -> None:
        make, full = LAYERS[kind]
        cache, root = [full()], tmp_path / "root.safetensors"
        written(root, [make()], cache, is_root=True)
        assert same(load_prompt_cache(str(root))[0], cache[0])
        piece = tmp_path / "piece.safetensors"
        written(piece, [make()], cache, is_root=False)
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it says
            load_prompt_cache(str(piece))

    gpu_thread().call(check)


class Window(RotatingKVCache):
    """A layer of a model's own, whose state does not say how wide it is."""

    def __init__(self, width: int) -> None:
        super().__init__(16)
        self.width = width


class Secretive(ArraysCache):
    """A layer that is more than it tells."""

    def __init__(self) -> None:
        super().__init__(2)
        self.seen = 0


class Untold(ArraysCache):
    """Says what it holds, and cannot be told it (as mlx-lm's deepseek_v41)."""

    def __init__(self) -> None:
        super().__init__(2)

    @property
    def state(self) -> Any:
        return self.cache


def test_a_layer_of_a_models_own_comes_back(tmp_path: Path) -> None:
    """The model makes it, with what its constructor wants; the state is put in."""

    def check() -> None:
        layer = filled(Window(7))
        form = written(tmp_path / "kv", [Window(7)], [layer], is_root=True)
        (back,) = read_back(tmp_path / "kv", [Window(7)], form)
        assert same(back, layer)
        assert back.width == 7

    gpu_thread().call(check)


def test_a_layer_that_is_more_than_it_tells_is_not_written(tmp_path: Path) -> None:
    def check() -> None:
        layer = Secretive()
        layer[0], layer.seen = mx.zeros((1, 2)), 5
        with pytest.raises(NotWritable, match="Secretive"):
            written(tmp_path / "kv", [Secretive()], [layer], is_root=True)
        layer = Untold()
        layer[0] = mx.zeros((1, 2))
        with pytest.raises(NotWritable, match="Untold"):
            written(tmp_path / "kv", [Untold()], [layer], is_root=True)

    gpu_thread().call(check)


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
def test_the_stock_loader_goes_on_from_a_slot(
    kind: str,
    model_folder: ModelFolder,
    tiny_model: Callable[[str], LoadedModel],
    tmp_path: Path,
) -> None:
    """mlx-lm's next 16 tokens are those of the whole prompt."""
    ids = random_ids(1, 120)
    with kept_sidecar(tmp_path, model_folder(kind)) as app:
        answer = ask(app, ids, 16).choices[0].ids
        flush(app)
    (tokens,) = slots(tmp_path)
    file = str(tokens).replace("_tokens.", "_cache.")
    model = tiny_model(kind)

    def go_on() -> tuple[list[int], list[int]]:
        cache: Any = load_prompt_cache(file)
        whole = [*ids, *answer, 7]  # the slot holds all but what is new
        fed, said = mx.array([whole[-1:]]), []
        for _ in range(16):
            fed = mx.argmax(model.model(fed, cache=cache)[:, -1], axis=-1)[None]
            said.append(int(fed[0, 0]))
        cold = []
        for _ in range(16):
            logits = np.array(model.model(mx.array([whole]))[0, -1])
            cold.append(int(logits.argmax()))
            whole.append(cold[-1])
        return said, cold

    said, cold = gpu_thread().call(go_on)
    assert said == cold
