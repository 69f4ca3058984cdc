"""What answers may repeat is found beside them, and for nobody who has gone."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sidecar.config.settings import GenerationConfig
from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.core.requests import SamplingParams
from sidecar.engine.job import Job, JobSpec
from sidecar.engine.sampling import settle
from sidecar.engine.source_maker import SourceMaker
from sidecar.engine.speculation.lookup_drafter import LookupDrafter, Sources
from sidecar.engine.speculation.source_forms import encoded_pieces, written_forms

_WAIT_S = 60


def new_job() -> Job:
    sampling = settle(SamplingParams(), GenerationConfig(), {})
    prompt = ModelPrompt(ModelIds((1, 2, 3, 4, 5)))
    return Job(JobSpec(prompt, sampling, 8, sources=Sources(vocab_size=3072)))


def nothing() -> Iterator[list[int]]:
    yield from ()


@pytest.fixture
def maker() -> Iterator[SourceMaker]:
    maker = SourceMaker()
    yield maker
    maker.close()


class Held:
    """Pieces of which the second comes when it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.num_given = 0

    def pieces(self) -> Iterator[list[int]]:
        for number in range(3):
            self.num_given += 1
            yield [number]
            self.begun.set()
            assert self.let_go.wait(_WAIT_S)


def filled(maker: SourceMaker) -> None:
    """Wait until all that was added before is done."""
    done = threading.Event()

    def last() -> Iterator[list[int]]:
        done.set()
        yield from ()

    maker.add(new_job(), last, nothing)
    assert done.wait(_WAIT_S)


def test_a_prediction_is_drafted_from_its_beginning(maker: SourceMaker) -> None:
    job = new_job()
    maker.add(job, lambda: [[7, 8]], lambda: [[20, 21, 22], [23]])
    filled(maker)
    sources = job.spec.sources
    assert sources is not None
    assert LookupDrafter(sources, [1, 2, 3]).propose(2) == [20, 21]
    assert sources.run(sources.opening or 0, 9) == [20, 21, 22]


def test_a_job_that_has_ended_is_not_held(maker: SourceMaker) -> None:
    held, begun, waiting = Held(), new_job(), new_job()
    maker.add(begun, held.pieces, nothing)
    assert held.begun.wait(_WAIT_S)
    maker.add(waiting, lambda: pytest.fail("it has ended"), nothing)
    begun.cancel()
    maker.drop(waiting)
    assert waiting not in maker._waiting
    held.let_go.set()
    filled(maker)
    assert held.num_given < 3
    assert begun.spec.sources is not None
    assert begun.spec.sources.run(0, 9) == []


def test_one_that_breaks_does_not_end_the_others(maker: SourceMaker) -> None:
    def broken() -> Iterator[list[int]]:
        raise RuntimeError("planted")

    maker.add(new_job(), broken, nothing)
    filled(maker)


def test_nobody_waits_for_it_at_the_end() -> None:
    maker, held = SourceMaker(), Held()
    maker.add(new_job(), held.pieces, nothing)
    assert held.begun.wait(_WAIT_S)
    maker.close()
    thread: Any = maker._thread
    assert thread.daemon
    maker.add(new_job(), lambda: pytest.fail("it is closed"), nothing)
    held.let_go.set()
    thread.join(_WAIT_S)
    assert not thread.is_alive()


def test_texts_are_cut_to_what_an_answer_can_repeat() -> None:
    sizes: list[int] = []

    def encode(text: str) -> list[int]:
        sizes.append(len(text))
        return [1]

    num_pieces = len([*encoded_pieces(["a" * 3_000_000, "b" * 9], encode)])
    assert num_pieces == len(sizes)
    assert max(sizes) <= 32_768
    assert sum(sizes) == 800_000
    assert [*encoded_pieces(["ab", "", "c"], lambda text: [len(text)])] == [[2], [1]]


def test_the_newest_results_are_written_first_where_there_are_too_many() -> None:
    forms = written_forms(["old" * 90_000, "mid" * 90_000, "new" * 90_000])
    assert forms[-1] == "new" * 90_000
    assert forms[0] == ("mid" * 90_000)[: 400_000 - 270_000]
    assert len(forms) == 2
