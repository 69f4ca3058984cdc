"""A value that keeps a conversation cold: the rule that is offered mends it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from sidecar.app import App
from testkit.servers import running_sidecar

FIXED = "You help with all that is asked. " * 20


def ask(app: App, number: int, session: str, **more: Any) -> dict[str, Any]:
    """The turn of that number, its system text stamped anew; its row on the page."""
    talk = [
        {"role": "system", "content": f"Build stamp: {number * 7919:x} ok\n{FIXED}"},
        {"role": "user", "content": "Hello."},
    ]
    for turn in range(number):
        talk += [
            {"role": "assistant", "content": f"Answer {turn}."},
            {"role": "user", "content": f"Question {turn}?"},
        ]
    body = {"model": "local", "messages": talk, "max_tokens": 2, "session_id": session}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body | more, timeout=60)
    assert answer.status_code == 200, answer.text
    row: dict[str, Any] = httpx.get(f"{app.url}/admin/state").json()["ended"][0]
    return row


def test_the_rule_that_is_offered_makes_the_next_replay_warm(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """U6. Offered at the third time; the model is told each newer value."""
    settings = {"MODEL_PATH": str(model_folder("dense"))}
    with running_sidecar(settings) as app:
        rows = [ask(app, number, "cold") for number in range(4)]
    found = [row["warmth"] for row in rows]
    assert [one["cause"] for one in found[1:]] == ["text"] * 3
    assert [bool(one["rule"]) for one in found] == [False, False, False, True]
    assert "differed 3 times" in found[3]["rule"]
    file = tmp_path / "own.toml"
    file.write_text(found[3]["rule"])
    with running_sidecar(settings | {"CACHE_RULES_FILE": str(file)}) as app:
        rows = [ask(app, number, "warm") for number in range(4)]
    assert [row["warmth"]["cause"] for row in rows[1:]] == ["", "", ""]


def test_what_is_forgotten_is_counted_no_more(
    model_folder: Callable[[str], Path],
) -> None:
    """Nor are the values of one asker another's."""
    with running_sidecar({"MODEL_PATH": str(model_folder("dense"))}) as app:
        for number in range(3):
            ask(app, number, "one")
        cleared = httpx.post(
            f"{app.url}/admin/cache/clear",
            json={},
            headers={"X-Admin": "1"},
            timeout=60,
        )
        assert cleared.status_code == 200, cleared.text
        rows = [ask(app, number, "two") for number in range(3)]
    assert [row["warmth"]["rule"] for row in rows] == ["", "", ""]
