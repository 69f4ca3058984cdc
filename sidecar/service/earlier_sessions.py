"""
Conversations that this server answered before it was started anew.

Of each a digest is kept in a file, salted, so that no name of a session and no word of
a client can be read there.
"""

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar.core.conversation import (
    Conversation,
    ForgetFilter,
    is_implicit,
    key_of,
)
from sidecar.service.kept_file import EVERY_S, KeptFile, read_kept

_MAX = 4096
_UNNAMED = ""  # in place of the digest of a session that no client named
_NAME = "conversations of earlier runs"


@dataclass(frozen=True, slots=True)
class _Digests:
    """Digests of a client's key, of a session's name, and of its first words."""

    key: str
    session: str
    words: str


class EarlierSessions:
    """
    The last 4,096 conversations of this run and of those before. Any thread.

    Args:
        file: where they outlive the process.
        lengths: gives the tokens of each conversation's last prompt in this run.
        every_s: how often the file is written at most.
    """

    def __init__(
        self,
        file: Path,
        lengths: Callable[[], Mapping[Conversation, int]],
        every_s: float = EVERY_S,
    ) -> None:
        absent: tuple[str, dict[_Digests, int]] = secrets.token_hex(16), {}
        self._salt, found = read_kept(file, _NAME, _parsed, absent)
        self._entries = OrderedDict(found)  # with the tokens of each last prompt
        self._earlier = set(found)  # less what this run has answered
        self._begun: dict[Conversation, _Digests] = {}  # in this run
        self._lengths = lengths
        self._lock = threading.Lock()
        self._kept = KeptFile(file, _NAME, self._content, every_s)

    def earlier_len(self, conversation: Conversation, words: str) -> int | None:
        """
        The tokens of a conversation's last prompt in an earlier run.

        Args:
            words: a digest of its first user message.
        Returns:
            None where no earlier run answered it, or this one did since.
        """
        entry = self._entry(conversation, words)
        with self._lock:
            return self._entries[entry] if entry in self._earlier else None

    def note(self, conversation: Conversation, words: str) -> None:
        """A conversation was answered that this run has not known."""
        entry = self._entry(conversation, words)
        with self._lock:
            self._earlier.discard(entry)
            self._begun[conversation] = entry
            self._entries.setdefault(entry, 0)
            self._entries.move_to_end(entry)
            while len(self._entries) > _MAX:
                old, _ = self._entries.popitem(last=False)
                self._earlier.discard(old)

    def forget(self, forget_filter: ForgetFilter | None) -> None:
        """
        Forget all conversations, or some.

        Of a session that no client named no more than its key is known here, so all
        such sessions of that key go.
        """
        with self._lock:
            gone = {each for each in self._entries if self._covers(forget_filter, each)}
            self._earlier -= gone
            for entry in gone:
                del self._entries[entry]
            self._begun = {c: e for c, e in self._begun.items() if e not in gone}

    def close(self) -> None:
        """Write what has changed, and stop; repeatable."""
        self._kept.close()

    def _covers(self, forget_filter: ForgetFilter | None, entry: _Digests) -> bool:
        if forget_filter is None:
            return True
        key, session = forget_filter.api_key or "", forget_filter.session
        is_key = forget_filter.any_key or self._digest(key) == entry.key
        return is_key and (session is None or self._session(session) == entry.session)

    def _entry(self, conversation: Conversation, words: str) -> _Digests:
        key = key_of(conversation.tenant) or ""
        return _Digests(
            self._digest(key), self._session(conversation.session), self._digest(words)
        )

    def _session(self, name: str) -> str:
        return _UNNAMED if is_implicit(name) else self._digest(name)

    def _digest(self, text: str) -> str:
        data = f"{self._salt}{text}".encode("utf-8", "surrogatepass")
        return hashlib.sha256(data).hexdigest()[:16]

    def _content(self) -> dict[str, Any]:
        lengths = self._lengths()
        with self._lock:
            self._begun = {c: e for c, e in self._begun.items() if e in self._entries}
            for conversation, entry in self._begun.items():
                known = self._entries[entry]
                self._entries[entry] = lengths.get(conversation, known)
            rows = [
                [each.key, each.session, each.words, length]
                for each, length in self._entries.items()
            ]
        return {"salt": self._salt, "conversations": rows}


def _parsed(kept: Any) -> tuple[str, dict[_Digests, int]]:
    rows = kept["conversations"][-_MAX:]
    entries = {
        _Digests(str(key), str(session), str(words)): max(0, int(length))
        for key, session, words, length in rows
    }
    return str(kept["salt"]), entries
