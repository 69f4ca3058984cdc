"""Sums over chats: the dearest cause first, lengths by a conversation's first turn."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from sidecar.core.conversation import Conversation
from sidecar.core.warmth import Warmth
from sidecar.service.request_history import EndedRequest, RequestHistory, Work

FIRST = Conversation("key", "one", "thread")


def history(folder: Path) -> RequestHistory:
    metrics: Any = mock.MagicMock()
    return RequestHistory(metrics, folder / "sessions.json")


def ended(
    conversation: Conversation, num_tokens: int, cause: str = "", lost: int = 0
) -> EndedRequest:
    found: Any = mock.create_autospec(EndedRequest, instance=True)
    found.conversation, found.work = conversation, Work(num_tokens, 0)
    found.warmth = Warmth(cause, lost, 0.0, "", "", None) if cause else Warmth()
    return found  # type: ignore[no-any-return]


def test_the_dearest_cause_is_first(tmp_path: Path) -> None:
    kept = history(tmp_path)
    for cause, lost in (("text", 5), ("tools", 70), ("text", 6), ("first_seen", 0)):
        kept.note(ended(FIRST, 100, cause, lost))
    kept.close()
    found = [(one["cause"], one["lost"]) for one in kept.causes()]
    assert found == [("tools", 70), ("text", 11), ("first_seen", 0)]


def test_a_talk_whose_names_change_has_one_length(tmp_path: Path) -> None:
    """Each name resembles the one before; the last prompt's length counts."""
    kept = history(tmp_path)
    second = replace(FIRST, session="two", resembles=FIRST)
    third = replace(FIRST, session="three", resembles=second)
    for number, conversation in enumerate((FIRST, second, third), 1):
        kept.note(ended(conversation, 100 * number))
    lengths = kept._last_lengths()
    kept.close()
    assert dict(lengths) == {FIRST: 300}
