"""Who is next on the GPU where several models share it; time is driven."""

from dataclasses import dataclass, field

import pytest

from sidecar.engine.gpu_scheduler import GpuScheduler


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Model:
    """A worker whose turns take so many seconds."""

    name: str
    clock: Clock
    log: list[str]
    step_s: float = 0.01
    chunk_s: float = 0.5
    streams: bool = False
    chunks: int = 0
    is_background: bool = False
    is_for_idle: bool = False
    beside: list[bool] = field(default_factory=list)
    num_handed_over: int = 0

    def has_work(self) -> bool:
        return self.streams or self.chunks > 0

    def has_streams(self) -> bool:
        return self.streams

    def decode(self, *, is_free: bool) -> float:
        self.clock.now += self.step_s
        self.log.append(f"{self.name} step")
        return self.step_s

    def hand_over(self) -> None:
        self.num_handed_over += 1

    def interrupt(self, *, beside_streams: bool) -> bool:
        if not self.chunks:
            return False
        self.chunks -= 1
        self.beside.append(beside_streams)
        self.clock.now += self.chunk_s
        self.log.append(f"{self.name} chunk")
        return True


class House:
    """Models that share one GPU."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.log: list[str] = []
        self.turns = GpuScheduler(self.clock)

    def model(self, name: str, **fields: object) -> Model:
        made = Model(name, self.clock, self.log)
        for field_name, value in fields.items():
            setattr(made, field_name, value)
        self.turns.add(made)
        return made

    def run(self, seconds: float) -> list[str]:
        """What happens in that time."""
        self.log.clear()
        end = self.clock.now + seconds
        while self.clock.now < end and self.turns.has_work():
            self.turns.take()
        return self.log


@pytest.fixture
def house() -> House:
    return House()


def test_models_decode_by_time_not_by_turns(house: House) -> None:
    """E19: steps of 5 and of 40 ms: 100 and 12.5 a second."""
    house.model("small", streams=True, step_s=0.005)
    house.model("large", streams=True, step_s=0.040)
    log = house.run(4.0)
    assert log.count("small step") == pytest.approx(400, rel=0.05)
    assert log.count("large step") == pytest.approx(50, rel=0.05)


def test_what_a_step_said_waits_for_its_next_step_only_where_that_is_next(
    house: House,
) -> None:
    """Beside any other worker with work it is handed over at once."""
    talks = house.model("talks", streams=True)
    house.run(1.0)
    assert talks.num_handed_over == 0
    house.model("reads", chunks=1000)
    log = house.run(2.0)
    assert talks.num_handed_over == log.count("talks step") > 0


def test_who_joins_late_gets_no_arrears(house: House) -> None:
    early = house.model("early", streams=True)
    house.run(50.0)
    late = house.model("late", streams=True)
    log = house.run(1.0)
    assert early.step_s == late.step_s
    assert log.count("late step") == pytest.approx(log.count("early step"), abs=2)


def test_who_pauses_gets_no_arrears_either(house: House) -> None:
    house.model("steady", streams=True)
    other = house.model("other", streams=True)
    house.run(1.0)
    other.streams = False
    house.run(50.0)
    other.streams = True
    log = house.run(1.0)
    assert log.count("other step") == pytest.approx(log.count("steady step"), abs=2)


def test_streams_decode_between_two_chunks(house: House) -> None:
    """For a share of the chunk's time, not for one step."""
    house.model("model", streams=True, chunks=10)
    log = house.run(5.0)
    chunks = [i for i, turn in enumerate(log) if turn == "model chunk"]
    gaps = [b - a - 1 for a, b in zip(chunks, chunks[1:], strict=False)]
    assert all(0.43 < gap * 0.01 / 0.5 < 0.48 for gap in gaps)


def test_two_prefills_stall_a_third_ones_stream_no_longer_than_one(
    house: House,
) -> None:
    """E19: between any two chunks, whosever they are, the stream has its share."""
    house.model("talks", streams=True)
    house.model("first", chunks=9)
    house.model("second", chunks=9)
    log = house.run(10.0)
    for one, other in zip(log, log[1:], strict=False):
        assert not (one.endswith("chunk") and other.endswith("chunk"))
    assert log.count("first chunk") == pytest.approx(log.count("second chunk"), abs=1)


def test_models_prefill_by_time(house: House) -> None:
    house.model("small", chunks=1000, chunk_s=0.1)
    house.model("large", chunks=1000, chunk_s=0.8)
    log = house.run(16.0)
    assert log.count("small chunk") == pytest.approx(80, rel=0.1)
    assert log.count("large chunk") == pytest.approx(10, rel=0.1)


def test_without_streams_nothing_is_held_back(house: House) -> None:
    model = house.model("model", chunks=4)
    assert house.run(10.0) == ["model chunk"] * 4
    assert model.beside == [False] * 4


def test_any_models_stream_makes_a_chunk_short(house: House) -> None:
    house.model("talks", streams=True)
    reads = house.model("reads", chunks=2)
    house.run(2.0)
    assert reads.beside == [True, True]


def test_background_work_comes_last_but_comes(house: House) -> None:
    """A load is not put off for ever by prompts that never end."""
    house.model("load", chunks=100, chunk_s=0.1, is_background=True)
    house.model("reads", chunks=1000, chunk_s=0.5)
    log = house.run(20.0)
    assert 6 <= log.count("load chunk") <= 10
    assert log.index("load chunk") >= 4


def test_what_is_for_idle_times_waits_for_all_others(house: House) -> None:
    """Streams and prompts have every turn until none has work."""
    house.model("train", chunks=1000, chunk_s=0.1, is_background=True, is_for_idle=True)
    talks = house.model("talks", streams=True, chunks=3)
    assert "train chunk" not in house.run(20.0)
    talks.streams = False
    assert house.run(1.0)[:3] == ["train chunk"] * 3
    talks.chunks = 1
    assert house.run(0.6)[:2] == ["talks chunk", "train chunk"]


def test_nobody_is_held_once_removed(house: House) -> None:
    model = house.model("model", streams=True, chunks=1)
    house.run(1.0)
    house.turns.remove(model)
    assert not house.turns.has_work()
    assert model not in house.turns._decoding._used_s
    assert model not in house.turns._interrupting._used_s
