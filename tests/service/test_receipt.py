"""What becomes part of the memory when an answer ends."""

import contextlib

import pytest

from sidecar.config.settings import GenerationConfig
from sidecar.core.errors import GenerationFailed
from sidecar.core.requests import ChatRequest, SamplingParams
from sidecar.engine.job import ChoiceEnded, Forecast, Job, JobFailed, JobSpec, Token
from sidecar.engine.process_memory import ProcessMemory
from sidecar.engine.sampling import settle
from sidecar.kv.eviction import KVBudget, Limits
from sidecar.service.choice import PlainChoice
from sidecar.service.turn import ChatPlan, Receipt, Run, remember
from testkit.chats import Chats, Client, assistant, system, user, words

ASKED = [system(words(60)), user("hi")]
AGAIN = [*ASKED, assistant("Seen."), user("and?")]
RAW = "<think>\nI look.\n</think>\nSeen.STOP secret"
PROCESS = ProcessMemory(1 << 30, KVBudget(Limits(1 << 20)))
GREEDY = settle(SamplingParams(temperature=0.0), GenerationConfig(), {})


class Ran:
    """A run of a prompt, whose engine's part the test plays, and its receipts."""

    def __init__(self, chats: Chats, num_choices: int = 1) -> None:
        prepared = chats.prepare(ASKED, Client())
        request = ChatRequest("r", "m", tuple(ASKED))
        cost = Forecast(1, 0, 0.0, 0.0, True, 9, 0)
        plan = ChatPlan(request, prepared.model, GREEDY, 60.0, None, prepared, cost)
        self.ids = chats.sample(RAW)
        self.prepared, self.receipts = prepared, list[Receipt]()
        self.job = Job(JobSpec(prepared.model, GREEDY, 9))
        self.run = Run(
            plan,
            self.job,
            [PlainChoice(i) for i in range(num_choices)],
            self.settle,
            contextlib.ExitStack(),
            PROCESS,
        )
        self.pipeline = chats.pipeline

    def settle(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)
        remember(self.pipeline, self.prepared, receipt)

    def say(self, *, stop_string: str | None = None, is_aborted: bool = False) -> None:
        """The engine's words: `Seen.` is shown of what was sampled, then the end."""
        self.job.emit(Token(0, "Seen.", None))
        self.job.emit(ChoiceEnded(0, "", "stop", stop_string, self.ids, is_aborted))


@pytest.mark.parametrize(
    ("stop_string", "is_aborted", "is_remembered"),
    [(None, False, True), ("STOP", False, False), (None, True, False)],
    ids=["clean", "at a stop string", "by the watchdog"],
)
def test_only_what_was_shown_is_remembered(
    stop_string: str | None, is_aborted: bool, is_remembered: bool
) -> None:
    """Behind a stop string lies text that nobody was shown."""
    chats = Chats()
    ran = Ran(chats)
    ran.say(stop_string=stop_string, is_aborted=is_aborted)
    list(ran.run.events())
    ran.run.close()
    chats.store.add((*ran.prepared.model_ids, *ran.ids))
    prompt = chats.ask(AGAIN)
    assert prompt.report.num_spliced == int(is_remembered)
    assert ("secret" in prompt.text) is is_remembered


def test_there_is_one_receipt_however_it_ends() -> None:
    """At a clean end before its reader hears of it, so that a next request finds it."""
    ran = Ran(Chats())
    ran.say()
    events = ran.run.events()
    while not ran.receipts:
        last = next(events)
    assert type(last).__name__ == "Finished"
    ran.run.close()
    ran.run.close()
    (receipt,) = ran.receipts
    assert (receipt.outcome, receipt.said.text) == ("finished", "Seen.")
    assert receipt.usage.completion_tokens == len(ran.ids)


@pytest.mark.parametrize("how", ["cancelled", "client_gone"])
def test_what_is_broken_off_is_told_as_that(how: str) -> None:
    """And is gone on with when it is asked again."""
    chats = Chats()
    ran = Ran(chats)
    ran.job.emit(Token(0, "Seen.", None))
    events = ran.run.events()
    next(events)
    if how == "cancelled":
        ran.run.cancel()
        with pytest.raises(Exception, match="cancelled"):
            list(events)
    ran.run.close()
    (receipt,) = ran.receipts
    assert receipt.outcome == how
    assert receipt.usage.completion_tokens == 1
    assert len(chats.memory.lineage) == 1
    assert chats.ask(AGAIN).report.num_spliced == 0


@pytest.mark.parametrize("error", [GenerationFailed("no"), RuntimeError("planted")])
def test_an_error_is_told_as_one_and_leaves_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's, or one of ours while the answer is cut."""
    chats = Chats()
    ran = Ran(chats)
    if isinstance(error, GenerationFailed):
        ran.job.emit(JobFailed(error))
    else:
        ran.job.emit(Token(0, "Seen.", None))
        monkeypatch.setattr(PlainChoice, "feed", lambda self, token: 1 / 0)
    with pytest.raises((GenerationFailed, ZeroDivisionError)):
        list(ran.run.events())
    ran.run.close()
    (receipt,) = ran.receipts
    assert receipt.outcome in ("generation_error", "internal_error")
    assert len(chats.memory.lineage) == 0


def test_of_two_choices_that_look_alike_none_is_put_back() -> None:
    """Whoever goes on from the second one is not given the first one's thinking."""
    ran = Ran(Chats(), num_choices=2)
    ran.job.emit(Token(0, "Seen.", None))
    ran.job.emit(Token(1, "Seen.", None))
    ran.job.emit(ChoiceEnded(1, "", "stop", None, (7,)))
    ran.job.emit(ChoiceEnded(0, "", "stop", None, ran.ids))
    list(ran.run.events())
    ran.run.close()
    (receipt,) = ran.receipts
    assert (receipt.said.text, receipt.said.sampled) == ("Seen.", ())


def test_only_the_first_choice_is_remembered() -> None:
    """The others are tries at the same turn."""
    ran = Ran(Chats(), num_choices=2)
    ran.job.emit(Token(1, "Other.", None))
    ran.job.emit(Token(0, "Seen.", None))
    ran.job.emit(ChoiceEnded(1, " More.", "stop", None, (7,)))
    ran.job.emit(ChoiceEnded(0, "", "stop", None, ran.ids))
    list(ran.run.events())
    ran.run.close()
    (receipt,) = ran.receipts
    assert (receipt.said.text, receipt.said.sampled) == ("Seen.", ran.ids)
    assert receipt.usage.completion_tokens == len(ran.ids) + 1
