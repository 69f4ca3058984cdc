"""
A prompt cache as named values, in the form of mlx-lm's `save_prompt_cache`.

Names are the paths in the layers' own states ("3.0": the keys of layer 3). Layers that
can be cut hold a run of tokens; the others hold their state at the run's end. A file
that begins at token 0 is a prompt cache as mlx-lm reads it; one that begins later is
not, and says so in a way that mlx-lm refuses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, QuantizedKVCache

from sidecar.kv.disk.slot_arrays import bits_of
from sidecar.kv.disk.tensor_file import Damaged, TensorSpec
from sidecar.kv.kv_layers import KVLayers, is_sliceable_atom

RUN_FORMAT = "litellm-mlx-run 1"
_DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
}
# What mlx-vlm's Qwen 3.5 notes on its caches, and makes again where it is not there.
_DERIVED = frozenset(
    (
        "_qwen3_5_metadata_revision",
        "_qwen3_5_lengths_info",
        "_qwen3_5_ssm_no_mask_batch_size",
    )
)
Scalar = int | float | bool | str | None
Shape = tuple[mx.Dtype, tuple[int, ...]]


class NotWritable(Exception):
    """A layer's state cannot be written as names and values; the message names it."""


@dataclass(frozen=True, slots=True)
class CacheForm:
    """
    All values of a cache, by name.

    Args:
        runs: names of the arrays of each layer that can be cut, as they are written.
        states: arrays of the others. scalars: numbers, words, None.
        classes: of the layers, as mlx-lm names them.
    """

    runs: tuple[tuple[TensorSpec, ...], ...]
    states: Mapping[str, mx.array]
    scalars: Mapping[str, Scalar]
    classes: tuple[str, ...]

    @property
    def specs(self) -> list[TensorSpec]:
        """Of all tensors in a file, in order."""
        scalars = [spec_of(n, scalar_array(v)) for n, v in self.scalars.items()]
        states = [spec_of(name, array) for name, array in self.states.items()]
        return [*(spec for run in self.runs for spec in run), *states, *scalars]

    def metadata(self, *, is_root: bool) -> dict[str, str]:
        """What a file says besides: to mlx-lm, if it may read it."""
        if not is_root:
            return {"format": RUN_FORMAT}
        return metadata_of(self.classes, self.scalars)

    def rest(self) -> Iterator[np.ndarray]:
        """The arrays behind the runs, in the order of `specs`."""
        for array in self.states.values():
            yield to_numpy(bits_of(array))
        for value in self.scalars.values():
            yield to_numpy(scalar_array(value))


def metadata_of(
    classes: Sequence[str], scalars: Mapping[str, Scalar]
) -> dict[str, str]:
    """What mlx-lm's `save_prompt_cache` says beside the arrays."""
    kinds = ["", *((name, _kind(value)) for name, value in scalars.items())]
    return dict(tree_flatten([{}, list(classes), kinds]))


def describe(
    fresh: KVLayers, runs: Sequence[Sequence[Shape]], checkpoint: Sequence[Any]
) -> CacheForm:
    """
    What a file of a run will hold.

    Args:
        fresh: empty caches of the model's. runs: dtype and shape of the arrays of each
            layer that can be cut. checkpoint: the other layers at the run's end.
    Raises:
        NotWritable: by these names and values a layer would not be what it was.
    """
    shapes, kept = iter(runs), iter(checkpoint)
    specs: list[tuple[TensorSpec, ...]] = []
    states: dict[str, mx.array] = {}
    scalars: dict[str, Scalar] = {}
    for index, layer in enumerate(fresh):
        for place, atom in _named(str(index), layer, scalars):
            if is_sliceable_atom(atom):
                named, run_scalars = _run(place, atom, next(shapes))
                specs.append(named)
                scalars |= run_scalars
            else:
                _state(place, atom, next(kept), states, scalars)
    classes = tuple(type(layer).__name__ for layer in fresh)
    return CacheForm(tuple(specs), states, scalars, classes)


def _named(
    place: str, layer: Any, scalars: dict[str, Scalar]
) -> Iterator[tuple[str, Any]]:
    """The atoms of a layer with the names of their states; words of lists are noted."""
    if not isinstance(layer, CacheList):
        yield place, layer
        return
    for number, inner in enumerate(layer.caches):
        scalars[f"{place}.{number}.1"] = type(inner).__name__
        yield from _named(f"{place}.{number}.0", inner, scalars)


def _run(
    place: str, atom: Any, shapes: Sequence[Shape]
) -> tuple[tuple[TensorSpec, ...], dict[str, Scalar]]:
    """Of keys, values and offset; packed ones are three arrays each."""
    if not shapes:
        return (), {f"{place}.0": None, f"{place}.1": None, f"{place}.2": 0}
    half = len(shapes) // 2
    names = [f"{place}.0", f"{place}.1"]
    scalars: dict[str, Scalar] = {f"{place}.2": shapes[0][1][-2]}
    if half > 1:
        if not isinstance(atom, QuantizedKVCache):
            raise NotWritable(f"{type(atom).__name__} with packed values")
        names = [f"{place}.{side}.{part}" for side in (0, 1) for part in range(half)]
        scalars |= {f"{place}.3": atom.group_size, f"{place}.4": atom.bits}
    specs = [
        TensorSpec(name, _DTYPES[dtype], shape)
        for name, (dtype, shape) in zip(names, shapes, strict=True)
    ]
    return tuple(specs), scalars


def _state(
    place: str,
    fresh: Any,
    atom: Any,
    states: dict[str, mx.array],
    scalars: dict[str, Scalar],
) -> None:
    if type(fresh) is not type(atom) or not _is_whole(fresh, atom):
        raise NotWritable(type(atom).__name__)
    for name, value in tree_flatten(atom.state, prefix=f".{place}"):
        if isinstance(value, mx.array):
            if value.dtype not in _DTYPES:
                raise NotWritable(f"{type(atom).__name__} with {value.dtype}")
            states[name] = value
        elif value is None or isinstance(value, (bool, int, float, str)):
            scalars[name] = value
        else:
            raise NotWritable(f"{type(atom).__name__} with {type(value).__name__}")


def _is_whole(fresh: Any, atom: Any) -> bool:
    """Whether its state is all that it is: a new one with that state is the same."""
    try:
        fresh.state = atom.state
    except Exception:  # noqa: BLE001 - its class is the library's: it may not take one
        return False
    mine = {name: value for name, value in vars(atom).items() if name not in _DERIVED}
    fresh_fields = vars(fresh)
    return mine.keys() == fresh_fields.keys() and all(
        _alike(value, fresh_fields[name]) for name, value in mine.items()
    )


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, mx.array) or isinstance(other, mx.array):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def restore_states(
    fresh: KVLayers,
    scalars: Mapping[str, Scalar],
    arrays: Mapping[str, mx.array],
) -> list[Any]:
    """
    The layers that cannot be cut, as they were: a checkpoint.

    Args:
        fresh: empty caches of the model's.
        arrays: the file's, by name; those of runs are not looked at.
    Raises:
        Damaged: they do not fit the model's layers.
    """
    values: dict[str, Any] = {**arrays, **scalars}
    found = []
    for index, layer in enumerate(fresh):
        for place, atom in _named(str(index), layer, {}):
            if is_sliceable_atom(atom):
                continue
            try:
                atom.state = _unflatten(atom.state, place, values)
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise Damaged(f"layer {place} does not fit: {error!r}") from error
            found.append(atom)
    return found


def _unflatten(like: Any, place: str, values: Mapping[str, Any]) -> Any:
    """The value at a name; of a list or tuple, those of its items."""
    if place in values:
        return values[place]
    if isinstance(like, (list, tuple)):
        items = [_unflatten(v, f"{place}.{i}", values) for i, v in enumerate(like)]
        return type(like)(items)
    raise KeyError(place)


def shapes_of(leaves: Sequence[mx.array], num_tokens: int) -> list[Shape]:
    """Dtype and shape of a layer's arrays, cut to so many tokens."""
    return [(a.dtype, (*a.shape[:-2], num_tokens, a.shape[-1])) for a in leaves]


def to_numpy(array: mx.array) -> np.ndarray:
    """An evaluated array's values, without a copy where that can be."""
    return np.asarray(array)


def spec_of(name: str, array: mx.array) -> TensorSpec:
    """How an array is written."""
    return TensorSpec(name, _DTYPES[array.dtype], tuple(array.shape))


def _kind(value: Scalar) -> str:
    if value is None:
        return "none"
    return "string" if isinstance(value, str) else "scalar"


def scalar_array(value: Scalar) -> mx.array:
    """As `save_prompt_cache` writes it."""
    if value is None:
        return mx.array([])
    return mx.array([ord(c) for c in value] if isinstance(value, str) else value)
