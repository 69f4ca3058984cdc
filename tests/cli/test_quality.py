"""The proof of the policies: read by readers whose score can be counted by hand."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sidecar.__main__ import main
from sidecar.cli.quality import ask_all, pin_policy
from sidecar.cli.quality_questions import KINDS, Question, make_questions
from sidecar.cli.quality_report import POLICIES, Answer, Score, draw, score, table
from sidecar.cli.quality_report import wilson
from sidecar.cli.server import Server
from testkit.scripted import Prompt, scripted
from testkit.servers import running_sidecar

ASKS = {"model": "local", "temperature": 0, "max_tokens": 32, "enable_thinking": False}
MOVED = {kind.name for kind in KINDS if kind.moves}
# Takes the place of a mention, given where the older and the newer value stand.
Choose = Callable[[Sequence[int]], int]


def reader(questions: Sequence[Question], choose: Choose) -> Callable[[Prompt], str]:
    """
    A model that answers with one of the two values, by where they stand.

    `choose` is `min` for the first mention and `max` for the last one.
    """

    def answer(prompt: Prompt) -> str:
        for one in questions:
            is_asked = prompt.turns[-1].text.find(one.kind.question) >= 0
            if is_asked and f"You are {one.conversation}." in prompt.text:
                values = (one.older, one.newer)
                find = prompt.text.find if choose is min else prompt.text.rfind
                places = {find(v): v for v in values if v in prompt.text}
                return f"It is {places[choose([*places])]}."
        return "Noted."

    return answer


def served(
    model: Path, questions: Sequence[Question], choose: Choose
) -> Callable[[str], contextlib.AbstractContextManager[Server]]:
    """Servers whose model is that reader."""

    @contextlib.contextmanager
    def serve(policy: str) -> Iterator[Server]:
        settings = {
            "MODEL_PATH": str(model), "CACHE_PIN_POLICY": pin_policy(policy)
        }  # fmt: skip
        rules = scripted(reader(questions, choose))
        with running_sidecar(settings, rules) as app:
            yield Server(app.url, None)

    return serve


def shares(answers: Sequence[Answer]) -> dict[tuple[str, str], float]:
    """(kind, policy) -> share of right answers."""
    found = score(answers)
    assert all(one.num_asked for one in found)
    return {(one.kind, one.policy): one.share for one in found if one.kind != "all"}


@pytest.mark.parametrize("kind", ["dense", "hybrid", "sliding"])
@pytest.mark.parametrize("choose", [min, max])
def test_a_reader_scores_what_can_be_counted_by_hand(
    kind: str, choose: Choose, model_folder: Callable[[str], Path]
) -> None:
    """
    Of the first mention and of the last one, on models of all cache kinds.

    Where reuse stops, the newer value alone is there. Where it is restated, it is the
    last one. Where it is pinned, it is nowhere, unless it moved to the newest message.
    """
    questions = make_questions(2 * len(KINDS), 300, 7)
    answers = ask_all(questions, served(model_folder(kind), questions, choose), ASKS)
    assert all(answer.is_in_force for answer in answers)
    is_last = choose is max
    for (name, policy), share in shares(answers).items():
        is_said = policy == "restate" or name in MOVED
        assert share == float(policy == "stop" or (is_last and is_said)), (name, policy)
