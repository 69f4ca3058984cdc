"""
Every array that hangs on a model, private ones too.

mlx-lm evaluates a model's parameters; tables that a layer keeps for itself (the rope
frequencies of llama3 and yarn) stay lazy, and their first use on another thread than
the one that made them raises "There is no Stream". So a model that one thread loads for
another is evaluated whole.
"""

import functools
import types
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
_SLICE_BYTES = 32 << 20


def evaluate_in_slices(model: Any) -> Iterator[int]:
    """Evaluate all of a model's arrays; the bytes so far, each 32 MB or so."""
    waiting: list[mx.array] = []
    num_bytes = num_done = 0
    for array in reachable_arrays(model):
        waiting.append(array)
        num_bytes += array.nbytes
        if num_bytes - num_done >= _SLICE_BYTES:
            mx.eval(waiting)
            waiting, num_done = [], num_bytes
            yield num_done
    mx.eval(waiting)


def reachable_arrays(root: Any) -> Iterator[mx.array]:
    """Arrays in its attributes, items and closures, and in theirs; each once."""
    seen: dict[int, Any] = {}  # held, else another object could get the same id
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, mx.array):
            yield item
        else:
            waiting.extend(_held_by(item))


def _held_by(item: Any) -> list[Any]:
    held: list[Any] = []
    if isinstance(item, dict):  # a module is one
        held.extend(item.values())
    elif isinstance(item, (list, tuple, set, frozenset)):
        held.extend(item)
    elif isinstance(item, functools.partial):
        held.extend([item.func, *item.args, *item.keywords.values()])
    elif isinstance(item, types.MethodType):
        held.append(item.__self__)
    elif isinstance(item, types.FunctionType):
        held.extend(_in_closure(item))
    held.extend(getattr(item, "__dict__", {}).values())
    return held


def _in_closure(function: types.FunctionType) -> list[Any]:
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if _is_filled(cell)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
