"""Room for weights beside what is promised to requests."""

from typing import Any, cast

import pytest

from sidecar.config.settings import EngineConfig
from sidecar.core.errors import InsufficientMemory
from sidecar.engine.gpu_thread import gpu_thread
from sidecar.engine.process_memory import Admission, Demand
from sidecar.kv.eviction import KVBudget, Limits
from sidecar.residents.process_weights import ProcessWeights


class Request:
    """What is admitted."""

    due = Demand(0, 0)


class Process:
    """A process that may take so many bytes more."""

    limit_bytes = 1000

    def __init__(self, free: int) -> None:
        self.free = free
        self.asked: list[int] = []

    def relieve(self, needed_bytes: int = 0) -> bool:
        self.asked.append(needed_bytes)
        return needed_bytes <= self.free


def weights(process: Process, admission: Admission) -> ProcessWeights:
    stored = KVBudget(Limits(1 << 20))
    return ProcessWeights(
        cast(Any, process), admission, stored, gpu_thread(), limit_bytes=None
    )


def test_a_load_is_not_let_into_what_requests_were_promised() -> None:
    process, admission = Process(free=150), Admission(EngineConfig())
    admission.admit(Request(), lambda others: Demand(80, 20))
    with (
        pytest.raises(InsufficientMemory, match="beside what runs"),
        weights(process, admission).loading(100),
    ):
        raise AssertionError("it was let in")
    assert process.asked == [200]
    assert admission.reserved == Demand(80, 20)


def test_what_has_arrived_is_promised_no_more() -> None:
    """It is in use then, and would count twice."""
    process, admission = Process(free=100), Admission(EngineConfig())
    with weights(process, admission).loading(100) as arrived:
        assert admission.reserved == Demand(100, 0)
        arrived()
        assert admission.reserved == Demand(0, 0)
        arrived()
    assert admission.reserved == Demand(0, 0)
