"""What becomes part of the memory when an answer ends."""

from pathlib import Path

import pytest

from sidecar.core.events import ReasoningDelta, TextDelta
from sidecar.core.requests import ChatRequest
from sidecar.engine.job import ChoiceEnded
from sidecar.infra.session_log import LogLimits, SessionLog
from sidecar.service.commit import TurnRecorder
from sidecar.service.request_log import RequestLog
from testkit.chats import Chats, assistant, system, user, words

ASKED = [system(words(60)), user("hi")]
AGAIN = [*ASKED, assistant("Seen."), user("and?")]


def answered(chats: Chats, raw: str, ended: ChoiceEnded, tmp_path: Path) -> None:
    """An answer whose text was `Seen.`, sampled as `raw`, that ended so."""
    prompt = chats.ask(ASKED)
    log = SessionLog(tmp_path, LogLimits(1 << 20, 1.0), with_content=False)
    request = ChatRequest("r", "m", tuple(ASKED))
    recorder = TurnRecorder(chats.pipeline, prompt, RequestLog(log, request, prompt))
    recorder.take(ReasoningDelta(0, "I look."))
    recorder.take(TextDelta(0, "Seen."))
    recorder.end(ended)
    recorder.commit()
    chats.store.add((*prompt.model_ids, *chats.sample(raw)))


@pytest.mark.parametrize(
    ("stop_string", "is_aborted", "is_remembered"),
    [(None, False, True), ("STOP", False, False), (None, True, False)],
    ids=["clean", "at a stop string", "by the watchdog"],
)
def test_only_what_was_shown_is_remembered(
    stop_string: str | None, is_aborted: bool, is_remembered: bool, tmp_path: Path
) -> None:
    """Behind a stop string lies text that nobody was shown."""
    chats = Chats()
    raw = "<think>\nI look.\n</think>\nSeen.STOP secret"
    ids = chats.sample(raw)
    ended = ChoiceEnded(0, "", "stop", stop_string, ids, is_aborted)
    answered(chats, raw, ended, tmp_path)
    prompt = chats.ask(AGAIN)
    assert prompt.report.num_spliced == int(is_remembered)
    assert ("secret" in prompt.text) is is_remembered
