"""A conversation with images goes on behind a restart (V16): no tower runs again."""

from pathlib import Path
from typing import Any

import pytest

from sidecar.app import App
from testkit.image_chats import WORDS, ask, assert_same, said, tower_runs, user
from testkit.kept_kv import flush, kept_sidecar, slots
from testkit.pictures import data_url, image_part, picture
from testkit.tiny_vision import BIDIRECTIONAL, SEEING

Json = dict[str, Any]
# Turns as the client sends them: so a cold prompt is the warm one.
AS_SENT = {"CACHE_SPLICE": "false"}


def turn(number: int, seed: int | None = None) -> Json:
    parts: list[str | Json] = [f"turn {number}. {WORDS}"]
    if seed is not None:
        parts.append(image_part(seed))
    return user(*parts, "what is it?")


class Talk:
    """Three turns, the first with an image."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.answers: list[Json] = []

    def go_on(self, app: App) -> Json:
        """The next turn's answer."""
        number = len(self.answers)
        self.messages.append(turn(number, None if number else 1))
        answer = ask(app, self.messages)
        self.answers.append(answer)
        self.messages.append(said(answer))
        return answer


@pytest.mark.parametrize("kind", [*SEEING, BIDIRECTIONAL])
def test_only_its_new_tail_is_computed(kind: str, folder: Path, tmp_path: Path) -> None:
    """And all is said as in a process that never ended."""
    whole, broken = Talk(), Talk()
    with kept_sidecar(tmp_path / "whole", folder / kind) as app:
        for _ in range(3):
            whole.go_on(app)
    for number in range(3):
        with kept_sidecar(tmp_path / "kv", folder / kind) as app:
            runs = tower_runs(app)
            usage = broken.go_on(app)["usage"]
            assert tower_runs(app) == runs + (1 if number == 0 else 0)
            flush(app)
        as_ever = whole.answers[number]["usage"]
        assert usage["prompt_tokens"] == as_ever["prompt_tokens"]
        expected = as_ever["prompt_tokens_details"]["cached_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= expected - 64
        assert expected > 100 or number == 0
    assert slots(tmp_path / "kv")
    for one, other in zip(whole.answers, broken.answers, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("kind", [*SEEING, BIDIRECTIONAL])
def test_another_image_is_not_taken_for_it(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    """Of equal size, behind equal words: what is on the disk ends before it."""
    with kept_sidecar(tmp_path / "kv", folder / kind, **AS_SENT) as app:
        ask(app, [turn(0, 1)])
        flush(app)
    with kept_sidecar(tmp_path / "kv", folder / kind, **AS_SENT) as app:
        warm = ask(app, [turn(0, 2)])
        runs = tower_runs(app)
        assert runs >= 1
    with kept_sidecar(tmp_path / "other", folder / kind, **AS_SENT) as app:
        cold = ask(app, [turn(0, 2)])
    assert_same(warm, cold)
    files = (f for f in (tmp_path / "kv").rglob("*") if f.is_file())
    pixels = data_url(picture(1)).encode()[100:160]
    assert not any(pixels in file.read_bytes() for file in files)
