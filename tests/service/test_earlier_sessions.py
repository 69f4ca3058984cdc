"""A restart of the server is named where it is why a conversation is cold."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.core.conversation import IMPLICIT, Conversation, ForgetFilter
from sidecar.service.earlier_sessions import EarlierSessions
from testkit.servers import running_sidecar

TOLD = "Tell me of the harbour and of what lies in it. " * 20
NAMED = Conversation("key", "a session", "thread")


def kept_file(folder: Path) -> Path:
    return folder / "sessions.json"


def sessions(folder: Path, *, num_tokens: int = 0) -> EarlierSessions:
    lengths = {NAMED: num_tokens} if num_tokens else {}
    return EarlierSessions(kept_file(folder), lambda: lengths, every_s=3600)


def is_earlier(later: EarlierSessions, conversation: Conversation, words: str) -> bool:
    return later.earlier_len(conversation, words) is not None


def after_a_restart(folder: Path, *conversations: Conversation) -> EarlierSessions:
    before = sessions(folder, num_tokens=77)
    for conversation in conversations:
        before.note(conversation, "words")
    before.close()
    return sessions(folder)


def cause(app: App, *said: str, **fields: Any) -> dict[str, Any]:
    """Why a chat was cold, by the page."""
    roles = ("user", "assistant")
    talk = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
    body = {"messages": talk, "max_tokens": 4, **fields}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = last(app)["warmth"]
    return found


def last(app: App) -> dict[str, Any]:
    """The row of the last chat."""
    state = httpx.get(f"{app.url}/admin/state", timeout=60).json()
    row: dict[str, Any] = state["ended"][0]
    return row


@pytest.mark.parametrize("named", [{"session_id": "harbour"}, {}])
def test_the_first_turn_after_a_restart_says_so(
    tmp_path: Path, named: dict[str, str]
) -> None:
    settings = {"MLX_CACHE_HOME": str(tmp_path), "KV_DISK_PERSISTENCE": "false"}
    with running_sidecar(settings) as app:
        assert cause(app, TOLD, **named)["cause"] == "first_seen"
        cause(app, TOLD, "Boats.", "More.", **named)
        held = last(app)["prompt_tokens"]
    with running_sidecar(settings) as app:
        found = cause(app, TOLD, "Boats.", "More.", "Nets.", "And?", **named)
        assert found["cause"] == "restarted"
        assert found["remedy"] == "KV_DISK_PERSISTENCE=true"
        lost = held - last(app)["cached_tokens"]
        assert abs(found["lost"] - lost) <= (0.02 * lost if named else lost)
        assert found["lost_s"] > 0
        again = cause(app, TOLD, "Boats.", "More.", "Nets.", "And?", "a", "b", **named)
        assert again["cause"] != "restarted"
        other = cause(app, "Of the hills. " * 40, "High.", "More.", **named)
        assert other["cause"] == "unknown_past"
    text = kept_file(tmp_path).read_text()
    assert "harbour" not in text


def test_what_this_run_has_answered_is_no_more_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    later = after_a_restart(tmp_path, NAMED)
    assert later.earlier_len(NAMED, "words") == 77
    assert not is_earlier(later, NAMED, "other words")
    later.note(NAMED, "words")
    assert not is_earlier(later, NAMED, "words")
    later.close()
    assert is_earlier(sessions(tmp_path), NAMED, "words")


@pytest.mark.parametrize(
    ("forget_filter", "is_gone"),
    [
        (None, True),
        (ForgetFilter("a session", "key"), True),
        (ForgetFilter("a session", any_key=True), True),
        (ForgetFilter(None, "key"), True),
        (ForgetFilter("another session", "key"), False),
        (ForgetFilter("a session", "another key"), False),
        (ForgetFilter("a session"), False),
    ],
)
def test_what_is_forgotten_is_not_told(
    tmp_path: Path, forget_filter: ForgetFilter | None, is_gone: bool
) -> None:
    later = after_a_restart(tmp_path, NAMED)
    later.forget(forget_filter)
    assert is_earlier(later, NAMED, "words") is not is_gone
    later.close()
    assert is_earlier(sessions(tmp_path), NAMED, "words") is not is_gone


def test_a_session_without_a_name_is_forgotten_with_those_of_its_key(
    tmp_path: Path,
) -> None:
    unnamed = Conversation("key", f"{IMPLICIT}one", "random")
    later = after_a_restart(tmp_path, unnamed, NAMED)
    again = Conversation("key", f"{IMPLICIT}one", "another")
    assert is_earlier(later, again, "words")
    later.forget(ForgetFilter(f"{IMPLICIT}two", "key"))
    assert not is_earlier(later, again, "words")
    assert is_earlier(later, NAMED, "words")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"salt": "s", "conversations": 5}',
        '{"salt": "s", "conversations": [["a"]]}',
        '{"salt": "s", "conversations": [[1, 2, 3, 4]]}',
        '{"salt": "\\ud800", "conversations": [["\\ud800", "b", "c"]]}',
    ],
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    kept_file(tmp_path).write_text(text)
    found = sessions(tmp_path)
    assert not is_earlier(found, NAMED, "words")
    found.note(NAMED, "words")
    found.close()
    assert is_earlier(sessions(tmp_path), NAMED, "words")


def test_the_file_keeps_the_last_4096_and_no_name(tmp_path: Path) -> None:
    talks = [Conversation("key", f"session {n}", "t") for n in range(4100)]
    later = after_a_restart(tmp_path, *talks)
    assert not is_earlier(later, talks[3], "words")
    assert is_earlier(later, talks[4], "words")
    text = kept_file(tmp_path).read_text()
    assert len(json.loads(text)["conversations"]) == 4096
    assert "session " not in text
    assert "key" not in text


def test_who_goes_on_is_forgotten_last(tmp_path: Path) -> None:
    before = sessions(tmp_path)
    before.note(NAMED, "words")
    for number in range(4095):
        before.note(Conversation("key", f"session {number}", "thread"), "words")
    before.note(NAMED, "words")
    before.note(Conversation("key", "one more", "thread"), "words")
    before.close()
    later = sessions(tmp_path)
    assert is_earlier(later, NAMED, "words")
    first = Conversation("key", "session 0", "thread")
    assert not is_earlier(later, first, "words")


def test_a_turn_without_a_length_leaves_the_known_one(tmp_path: Path) -> None:
    """It was broken off before anything was counted."""
    again = after_a_restart(tmp_path, NAMED)
    again.note(NAMED, "words")
    again.close()
    assert sessions(tmp_path).earlier_len(NAMED, "words") == 77
