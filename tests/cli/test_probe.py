"""The probe: what it asks, what it expects, and what it finds out."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.__main__ import main
from sidecar.app import App
from sidecar.cli.scenarios import IMAGES, SCENARIOS
from sidecar.engine.job import Job
from sidecar.engine.sampling import LogitsProcessor
from testkit.claiming_server import Json, claiming_server, everything
from testkit.image_rig import muted
from testkit.servers import running_sidecar
from testkit.tiny_vision import make_seeing

ROW = re.compile(r"  (\S.{11}) +(\d+) +(\d+) +(\d+) +\d+ ms")


@pytest.fixture(scope="module", params=["dense", "hybrid", "sliding"])
def tiny(
    request: pytest.FixtureRequest, model_folder: Callable[[str], Path]
) -> Iterator[App]:
    """A sidecar on a random model; its answers are noise, cut at the limit."""
    with running_sidecar({"MODEL_PATH": str(model_folder(request.param))}) as app:
        yield app


def probe(url: str, *arguments: str) -> int:
    """Run it with short answers."""
    return main(["probe", "--url", url, "--max-tokens", "24", *arguments])


def no_added_tokens(_job: Job, _choice: int) -> list[LogitsProcessor]:
    """For each row of a batch: only tokens of text are sampled."""
    return [lambda _tokens, logits: muted(logits)]


def rows(shown: str) -> dict[str, tuple[int, int, int]]:
    """Turn -> prompt, cached, prefilled."""
    found = [match.groups() for match in map(ROW.match, shown.splitlines()) if match]
    return {name.strip(): (int(a), int(b), int(c)) for name, a, b, c in found}


def test_our_server_passes_every_scenario(
    tiny: App, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models of all cache kinds, one store for all; what they answer is random."""
    assert probe(tiny.url, "--turns", "5") == 0
    shown = capsys.readouterr().out
    assert f"{len(SCENARIOS) - 1} scenarios, all passed" in shown
    assert shown.count("text only") == 1
    for name in SCENARIOS:
        assert (f"PASS {name}" in shown) == (name != IMAGES)
    for prompt, cached, prefilled in rows(shown).values():
        assert prompt == cached + prefilled
        assert 0 <= cached < prompt


@pytest.mark.parametrize("kind", ["seeing", "seeing-hybrid", "seeing-sliding"])
def test_pictures_are_reused_as_words_are(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second turn reuses 94 % and more, and nothing goes back within a picture."""
    # A model of noise may write a picture's own token, and no splice puts that back.
    with running_sidecar(
        {"MODEL_PATH": str(make_seeing(tmp_path / kind, kind))}, no_added_tokens
    ) as app:
        asked = ["--scenario", IMAGES, "--turns", "5", "--max-tokens", "24"]
        assert probe(app.url, *asked) == 0
    shown = capsys.readouterr().out
    assert f"PASS {IMAGES}" in shown
    prompt, cached, _ = rows(shown)["2"]
    assert cached >= 0.94 * prompt


def test_a_store_that_is_full_of_others_makes_no_difference(
    model_folder: Callable[[str], Path],
) -> None:
    """Three runs: more conversations and checkpoints than a store may hold."""
    with running_sidecar({"MODEL_PATH": str(model_folder("hybrid"))}) as app:
        assert [probe(app.url, "--turns", "3") for _ in range(3)] == [0, 0, 0]


def test_a_long_session_passes_on_a_model_that_needs_checkpoints(
    model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """More user messages, and more helpers' turns, than a session has checkpoints."""
    with running_sidecar({"MODEL_PATH": str(model_folder("hybrid"))}) as app:
        for name in ("normal", "subagents"):
            assert probe(app.url, "--scenario", name, "--turns", "18") == 0
    assert "not kept" not in capsys.readouterr().out


def test_the_built_in_model_calls_the_probes_tools(
    app: App, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calls, results and arguments written anew: all of it is reused."""
    arguments = ["--scenario", "normal", "--turns", "4", "--max-tokens", "64"]
    assert main(["probe", "--url", app.url, *arguments]) == 0
    turns = list(rows(capsys.readouterr().out).values())
    assert turns[1][2] > 100  # a tool's result of twelve lines came
    assert turns[2][2] < 60  # and its answer was reused with it


def test_a_server_that_never_pins_fails_the_drift(
    model_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict names the turn, what it reused and what was expected."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_PINNING": "false"}
    with running_sidecar(settings) as app:
        assert probe(app.url, "--scenario", "drift", "--turns", "3") == 1
        assert probe(app.url, "--scenario", "normal", "--turns", "3") == 0
    shown = capsys.readouterr().out
    assert re.search(r"turn 2 reused \d+ of \d+ tokens, expected >= \d+", shown)
    assert "FAIL drift" in shown
    assert "PASS normal" in shown


def test_a_server_that_does_not_know_its_answers_again_passes_by_the_milder_bound(
    model_folder: Callable[[str], Path],
) -> None:
    """Without splicing an answer is computed again, the prompt before it is not."""
    settings = {"MODEL_PATH": str(model_folder("dense")), "CACHE_SPLICE": "false"}
    with running_sidecar(settings) as app:
        assert probe(app.url, "--scenario", "normal", "--turns", "4") == 0


@pytest.mark.parametrize("name", ["semantic", "insert"])
def test_reuse_beyond_a_change_fails(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that hides a reversed order, or a new message, is found out."""
    with claiming_server(everything) as url:
        assert probe(url, "--scenario", name, "--turns", "4") == 1
    assert "<-- not kept" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["normal", "branch", "subagents", "retry", "drift"])
def test_no_reuse_at_all_fails(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with claiming_server(lambda _body, _length: 0) as url:
        assert probe(url, "--scenario", name, "--turns", "3") == 1
    assert f"FAIL {name}" in capsys.readouterr().out


def test_more_cached_than_there_is_fails() -> None:
    """The last token's logits are needed: a whole prompt is never cached."""
    with claiming_server(lambda _body, length: length) as url:
        assert probe(url, "--scenario", "normal", "--turns", "3") == 1


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (b"", "broke off"),
        (b"data: {broken\n\n", "broke off"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
    ],
)
def test_a_stream_that_breaks_off_is_said_not_counted(
    ends: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with claiming_server(everything, ends=ends) as url:
        assert probe(url, "--scenario", "normal") == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert "PASS" not in captured.out


def test_the_key_opens_a_locked_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Without it the refusal is shown as the server words it."""
    with running_sidecar({"MLX_API_KEY": "secret"}) as app:
        assert probe(app.url, "--scenario", "retry", "--turns", "3") == 1
        assert "401" in capsys.readouterr().err
        arguments = ["--scenario", "retry", "--turns", "3", "--key", "secret"]
        assert probe(app.url + "/v1", *arguments) == 0


def test_a_call_that_the_limit_cut_off_is_not_expected_to_be_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The prompt before it is; a call that came whole is kept with the prompt."""
    arguments = ["--scenario", "retry", "--turns", "3"]
    with running_sidecar({}) as app:
        assert probe(app.url, *arguments) == 0
        cut = rows(capsys.readouterr().out)
        assert probe(app.url, *arguments, "--max-tokens", "60") == 0
        whole = rows(capsys.readouterr().out)
    assert 0 <= cut["2"][1] - cut["1"][0] < 8
    assert whole["2"][1] - whole["1"][0] > 24


def test_clients_habits(capsys: pytest.CaptureFixture[str]) -> None:
    """Thinking is not sent back; one session id, tools and usage in each request."""
    bodies: list[Json] = []

    def claim(body: Json, _length: int) -> int:
        bodies.append(body)
        return 0

    with claiming_server(claim) as url:
        probe(url, "--scenario", "normal", "--turns", "3", "--model", "mine")
    assert [len(body["messages"]) for body in bodies] == [2, 4, 6]
    assert {body["model"] for body in bodies} == {"mine"}
    assert len({body["session_id"] for body in bodies}) == 1
    assert all(body["tools"] and body["stream"] for body in bodies)
    assert bodies[2]["messages"][2] == {"role": "assistant", "content": "Well done"}
    assert "text only" in capsys.readouterr().out


def test_images_are_asked_of_models_that_see(
    app: App, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "--url", app.url, "--scenario", IMAGES]) == 1
    assert "takes text only" in capsys.readouterr().err
