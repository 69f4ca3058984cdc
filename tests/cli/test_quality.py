"""The proof of the policies: read by readers whose score can be counted by hand."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sidecar.__main__ import main
from sidecar.cli import quality
from sidecar.cli.quality import Serve, ask_all, pin_policy
from sidecar.cli.quality_questions import KINDS, QualityQuestion, make_questions
from sidecar.cli.quality_report import POLICIES, Score, draw, score, table, wilson
from sidecar.cli.server import Server
from sidecar.volatile.rules import find, load_rules
from testkit.claiming_server import Claim, claiming_server, everything
from testkit.scripted import Prompt, scripted
from testkit.servers import running_sidecar

ASKS = {"model": "local", "temperature": 0, "max_tokens": 32, "enable_thinking": False}
# Which of the places at which the two values stand is answered from.
Choose = Callable[[Sequence[int]], int]


def reader(
    questions: Sequence[QualityQuestion], choose: Choose
) -> Callable[[Prompt], str]:
    """A model that answers from the first mention (`min`), or the last one (`max`)."""

    def answer(prompt: Prompt) -> str:
        text, asked = prompt.text, prompt.turns[-1].text
        for one in questions:
            if f"You are {one.conversation}." in text and one.kind.question in asked:
                search = text.find if choose is min else text.rfind
                values = [value for value in (one.older, one.newer) if value in text]
                places = {search(value): value for value in values}
                return f"It is {places[choose(list(places))]}."
        return "Noted."

    return answer


def served(model: Path, questions: Sequence[QualityQuestion], choose: Choose) -> Serve:
    """Servers whose model is that reader."""

    @contextlib.contextmanager
    def serve(policy: str) -> Iterator[Server]:
        settings = {"MODEL_PATH": str(model), "CACHE_PIN_POLICY": pin_policy(policy)}
        rules = scripted(reader(questions, choose))
        with running_sidecar(settings, rules) as app:
            yield Server(app.url, None)

    return serve


@pytest.mark.parametrize(
    ("kind", "choose"),
    [("dense", min), ("dense", max), ("hybrid", max), ("sliding", min)],
)
def test_a_reader_scores_what_can_be_counted_by_hand(
    kind: str, choose: Choose, model_folder: Callable[[str], Path]
) -> None:
    """
    Where reuse stops, the newer value alone is there: both readers are right.

    Where it is restated, it is the last mention. Where the older one is pinned in
    silence, the newer one is nowhere, unless it stands in the newest message: there
    nothing can be restated.
    """
    questions = make_questions(len(KINDS), 300, 7)
    answers = ask_all(questions, served(model_folder(kind), questions, choose), ASKS)
    assert all(answer.is_in_force for answer in answers)
    is_last = choose is max
    for answer in answers:
        asked, policy = answer.question.kind, answer.policy
        is_said_last = policy == "restate" or (policy == "pin" and asked.moves)
        is_right = policy == "stop" or (is_last and is_said_last)
        assert (answer.is_right, answer.is_older) == (is_right, not is_right)
    by_kind = {(s.kind, s.policy): (s.num_right, s.num_asked) for s in score(answers)}
    assert by_kind["all", "stop"] == (6, 6)
    assert by_kind["all", "pin"] == (int(is_last), 6)
    assert by_kind["all", "restate"] == (5 * is_last, 5)


def claimed(claim: Claim) -> Serve:
    """Servers that claim what they like, and name no pinned kind."""

    @contextlib.contextmanager
    def serve(_policy: str) -> Iterator[Server]:
        with claiming_server(claim) as url:
            yield Server(url, None)

    return serve


@pytest.mark.parametrize(
    ("claim", "counted"), [(everything, set()), (lambda _body, _length: 0, {"stop"})]
)
def test_an_answer_counts_only_where_its_policy_was_in_force(
    claim: Claim, counted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that pins nothing, or reuses what it must not, proves nothing."""
    monkeypatch.setattr(quality, "_WARM_UP_PAUSE_S", 0.0)
    answers = ask_all(make_questions(7, 300, 0), claimed(claim), ASKS)
    assert {answer.policy for answer in answers if answer.is_in_force} == counted
    in_all = [one for one in score(answers) if one.kind == "all"]
    assert {one.policy for one in in_all if one.num_asked} == counted
    assert all(one.num_asked in (0, 7) and one.num_right == 0 for one in in_all)


def test_the_rules_find_every_value_that_is_asked_about() -> None:
    """Each in its place before, and the newer one where it stands after."""
    rules = load_rules().rules
    for one in make_questions(2 * len(KINDS), 300, 3):
        for messages, value in ((one.before, one.older), (one.after, one.newer)):
            found = [
                message["content"][start:end]
                for message in messages
                for rule, (start, end) in find(
                    rules, message["role"], message["content"]
                )
                if rule.kind == one.kind.rule
            ]
            assert any(value in text for text in found), one.kind.name
        assert not any(one.older in message["content"] for message in one.after)


def test_questions_are_the_same_for_the_same_seed() -> None:
    assert make_questions(13, 300, 5) == make_questions(13, 300, 5)
    assert make_questions(1, 300, 5) != make_questions(1, 300, 6)
    assert [q.kind for q in make_questions(13, 300, 5)] == [*KINDS, *KINDS, KINDS[0]]


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        (0, 0, 0.0, 1.0), (0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662),
    ],
)  # fmt: skip
def test_intervals_are_wilsons(right: int, asked: int, low: float, high: float) -> None:
    """Figures as published (the last: Newcombe 1998, table I, method 3)."""
    assert wilson(right, asked) == pytest.approx((low, high), abs=5e-5)


def test_the_table_has_a_line_and_a_bar_for_each_kind_and_policy() -> None:
    scores = [
        Score("time", "stop", False, 33, 33, 0),
        Score("time", "pin", False, 33, 0, 33),
        Score("time", "restate", True, 33, 27, 5),
    ]
    _, stop, pin, restate, _ = table(scores).splitlines()
    assert stop.split()[:4] == ["time", "stop", "33/33", "100.0%"]
    assert "restate *" in restate
    assert "65.6% - 91.4%" in restate
    assert stop.count("#") > restate.count("#") > pin.count("#") == 0
    assert len({len(line) for line in (stop, pin, restate)}) == 1


def test_the_tool_starts_a_server_for_each_policy_and_writes_what_it_found(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever is set for the user's own server; a random model is never right."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHE_PINNING", "false")
    monkeypatch.setenv("MLX_API_KEY", "secret")
    arguments = ["--model", str(model_folder("dense")), "--questions", "2"]
    arguments += ["--depth", "240", "--max-tokens", "4", "--json", "found.json"]
    assert main(["probe", "--quality", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.count("0/2") == len(POLICIES)
    assert "picture: quality.png" in shown
    assert Path("quality.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads(Path("found.json").read_text())
    assert len(report["answers"]) == 2 * len(POLICIES)
    assert all(answer["in_force"] for answer in report["answers"])
    told = {(one["kind"], one["policy"]): one for one in report["scores"]}
    assert told["time", "restate"]["is_default"]
    assert told["sender", "pin"]["is_default"]
    assert told["all", "pin"]["high"] == pytest.approx(wilson(0, 2)[1])


def test_a_model_that_is_not_there_is_said_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["probe", "--quality", "--model", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("probe: model none cannot be loaded")
    assert len(said.splitlines()) == 1


def test_without_matplotlib_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError):
        draw([], tmp_path / "none.png")
