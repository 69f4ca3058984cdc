"""A model that takes its time, as a large one does: the same answers, later."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from sidecar.app import App

# From the tokens of a forward pass to the seconds it is to last longer.
Pause = Callable[[int], float]


def slow_down(
    app: App,
    pause: Pause,
    monkeypatch: pytest.MonkeyPatch,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """
    Make each forward pass of a served model's class wait first.

    The pause may raise: then the pass fails.

    Args:
        sleep: how it waits; a test's own clock need not.
    """
    with app.pool.lease("local") as served:
        kind: Any = type(served.engine.model.model)
    original = kind.__call__

    def slow(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        sleep(pause(inputs.shape[-1]))
        return original(model, inputs, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", slow)
