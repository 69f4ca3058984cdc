"""
A decode step that is described before its turn, and the way back from it.

Describing a step in Python takes a third of the time that MLX takes to encode one, and
MLX does not hold the interpreter meanwhile. So the next step is described by a thread
of its own while this one is encoded (docs/decoding.md). It may turn out not to be
wanted: a row has ended, another one joins, a draft is tried. Then all that describing
it has changed is put back, and nothing of it was ever computed.
"""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from sidecar.kv.kv_layers import KVLayers, atoms

Likeliest = tuple[mx.array, mx.array, mx.array]
# Logits, (rows, tokens, vocabulary), of ids behind what layers hold.
Forward = Callable[[mx.array, KVLayers], mx.array]


class DescribedStep(NamedTuple):
    """
    What a step will have drawn, not computed yet.

    Args:
        tokens: one of each row. logprobs: of each row, None where none are asked for.
        contexts: what the rows whose processors read it have said with that.
    """

    tokens: mx.array
    logprobs: list[Likeliest | None]
    contexts: list[mx.array]


class SavedState:
    """
    The attributes of some objects, to be given back to them.

    It holds their arrays, and an array that is held elsewhere is copied when it is
    written to: nothing may be computed behind it while this lives.

    Raises:
        TypeError: an attribute is of a kind that cannot be given back.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._saved = [
            (one, {name: _held(value) for name, value in vars(one).items()})
            for one in objects
        ]

    def restore(self) -> None:
        """Have the objects as they were."""
        for one, attributes in self._saved:
            vars(one).clear()
            vars(one).update(attributes)


class StepAhead(NamedTuple):
    """A step that was described before its turn, and the state that it changed."""

    step: DescribedStep
    before: SavedState


@dataclass(eq=False)
class AheadLimit:
    """
    Says to all batches that share it of how many rows a step is described ahead.

    Args:
        max_rows: of a step; 0: no step is.
        has_failed: whether a step could not be described: none is from then on.
        num_taken: steps that were described ahead and used.
    """

    max_rows: float = 0
    has_failed: bool = False
    num_taken: int = 0

    def allow(self, max_rows: float) -> None:
        """Have steps of so many rows described ahead, unless one could not be."""
        self.max_rows = 0 if self.has_failed else max_rows

    def fail(self) -> None:
        """Have no more steps described ahead."""
        self.max_rows, self.has_failed = 0, True


NEVER_AHEAD = AheadLimit()  # of rows that are to be fed step by step


def max_rows_described(forward: Forward, new_cache: Callable[[], KVLayers]) -> float:
    """
    Of how many rows a decode step leaves all computing to whoever reads its logits.

    Some models compute in any step, some where there are several rows, some take one
    row only.
    """
    if not only_describes(forward, new_cache, 1):
        return 0
    return math.inf if only_describes(forward, new_cache, 2) else 1


def only_describes(
    forward: Forward, new_cache: Callable[[], KVLayers], num_rows: int
) -> bool:
    """
    Whether a decode step of so many rows computes nothing.

    MLX refuses to compute what hangs on the inputs of a function that it traces; here
    those are the tokens and all that the layers hold. What the step returns is dropped.
    False as well for layers that hold what `SavedState` cannot give back, and where
    anything fails.
    """
    tokens = mx.zeros((num_rows, 1), mx.int32)
    try:
        layers = _behind_prompts(forward, new_cache, num_rows)
        SavedState(atoms(layers))
        held = [dict(vars(atom)) for atom in atoms(layers)]

        def traced(ids: mx.array, *arrays: mx.array) -> mx.array:
            rest = iter(arrays)
            inputs = tree_map(lambda v: next(rest) if _is_array(v) else v, held)
            for atom, attributes in zip(atoms(layers), inputs, strict=True):
                vars(atom).update(attributes)
            return forward(ids, layers)

        arrays = [value for _, value in tree_flatten(held) if _is_array(value)]
        mx.compile(traced)(tokens, *arrays)
    except Exception:  # noqa: BLE001 - what any library's model raises
        return False
    return True


def _behind_prompts(
    forward: Forward, new_cache: Callable[[], KVLayers], num_rows: int
) -> KVLayers:
    """Layers behind prompts of one token, two, and so on, which nobody computes."""
    rows = [new_cache() for _ in range(num_rows)]
    for length, row in enumerate(rows, 1):
        forward(mx.zeros((1, length), mx.int32), row)
    if num_rows == 1:
        return rows[0]
    return [same[0].merge([*same]) for same in zip(*rows, strict=True)]


def _is_array(value: Any) -> bool:
    return isinstance(value, mx.array)


def _held(value: Any) -> Any:
    """
    The same value, in array objects of its own: assignments change them in place.

    Raises:
        TypeError: it may hold arrays in a way that is not known here.
    """
    if _is_array(value):
        return copy.copy(value)
    if type(value) in (list, tuple):
        return type(value)(map(_held, value))
    if type(value) is dict:
        return {key: _held(one) for key, one in value.items()}
    if value is None or isinstance(value, (bool, int, float, str, mx.Dtype)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be given back")
