"""Tiny model folders and one sidecar on the built-in model, for the whole session."""

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from sidecar.app import App
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.loading.loader import load
from sidecar.engine.loading.model_source import find_model
from testkit.lanes import LANES, choose_lane, mark_lanes
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model

# Reproducible runs; MLX and a busy machine make single examples slow.
hypothesis.settings.register_profile("repo", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repo")

ModelFolder = Callable[[str], Path]

# Begun first, so that no worker waits at the end for one of them.
_LONG = (
    "wire/test_faults", "property/test_cache_oracle", "engine/test_reuse_bars",
    "cli/test_probe", "wire/test_soak", "wire/test_router_contract", "test_main",
    "wire/test_trace_reuse", "wire/test_memory", "wire/test_client_replays",
    "bench/test_hostile",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the lanes behind the fast one."""
    texts = ("run what the fast lane leaves out", "run what CI leaves out")
    for lane, text in zip(LANES, texts, strict=True):
        parser.addoption(
            f"--{lane}", dest="lane", action="store_const", const=lane, default="",
            help=f"{text} (tests/{lane}.txt)",
        )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Choose the lane, or what is named."""
    choose_lane(config)


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    """A test that runs the command line sets logging up, in the same process."""
    logger = logging.getLogger("sidecar")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Order by file, the long ones first, and mark what is not in the fast lane."""
    mark_lanes(config, items)
    ranks = {f"tests/{name}.py": rank for rank, name in enumerate(_LONG)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(_LONG)))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """
    Two workers, as servers that start keep one waiting half of its time.

    None for the tests of one file, or shown as they run (-s): in this process then.
    """
    files = {argument.partition("::")[0] for argument in config.args}
    is_one = len(files) == 1 and files.pop().endswith(".py")
    return 0 if is_one or config.option.capture == "no" else 2


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The folder of a tiny random model: `dense`, `hybrid` or `sliding`."""
    root = tmp_path_factory.mktemp("models")
    return lambda kind: make_model(root / kind, kind)


@pytest.fixture(scope="session")
def tiny_model(model_folder: ModelFolder) -> Callable[[str], LoadedModel]:
    """A loaded model in memory, by its kind: `dense`, `hybrid`, `sliding`."""

    @functools.cache
    def loaded(kind: str) -> LoadedModel:
        source = find_model(str(model_folder(kind)))
        return gpu_thread().call(lambda: load(source, trust=False))

    return loaded


@pytest.fixture(scope="session")
def app() -> Iterator[App]:
    """A sidecar that serves the built-in model."""
    with running_sidecar() as running:
        yield running
