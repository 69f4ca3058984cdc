"""Models whose KV is kept on the disk."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sidecar.app import App
from sidecar.core.prompt import ModelIds
from testkit.jobs import run
from testkit.kept_kv import said
from testkit.servers import running_sidecar

KINDS = ("dense", "hybrid", "sliding")
ModelFolder = Callable[[str], Path]
Cold = Callable[[str, ModelIds], tuple[int, ...]]


@pytest.fixture(scope="session")
def cold(model_folder: ModelFolder) -> Iterator[Cold]:
    """What a model of a kind says to ids without any KV of before."""
    apps: dict[str, App] = {}
    with ExitStack() as stack:

        def ask(kind: str, ids: ModelIds) -> tuple[int, ...]:
            if kind not in apps:
                settings = {"MODEL_PATH": str(model_folder(kind))}
                apps[kind] = stack.enter_context(running_sidecar(settings))
            with apps[kind].pool.lease("local") as served:
                served.memory.forget()
                return said(run(served.engine, ids, 12))

        yield ask
