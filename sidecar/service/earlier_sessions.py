"""
Conversations that this server answered before it was started anew.

Of each a digest is kept in a file, salted, so that no name of a session and no word of
a client can be read there.
"""

import hashlib
import secrets
import threading
from collections import OrderedDict
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
        every_s: how often the file is written at most.
    """

    def __init__(self, file: Path, every_s: float = EVERY_S) -> None:
        absent: tuple[str, list[_Digests]] = secrets.token_hex(16), []
        self._salt, found = read_kept(file, _NAME, _parsed, absent)
        self._entries = OrderedDict.fromkeys(found)
        self._earlier = set(found)  # less what this run has answered
        self._lock = threading.Lock()
        self._kept = KeptFile(file, _NAME, self._content, every_s)

    def is_first_since(self, conversation: Conversation, words: str) -> bool:
        """
        Whether an earlier run answered a conversation, and this one did not yet.

        Args:
            words: a digest of its first user message.
        """
        entry = self._entry(conversation, words)
        with self._lock:
            return entry in self._earlier

    def note(self, conversation: Conversation, words: str) -> None:
        """A conversation was answered."""
        entry = self._entry(conversation, words)
        with self._lock:
            self._earlier.discard(entry)
            self._entries[entry] = None
            self._entries.move_to_end(entry)
            while len(self._entries) > _MAX:
                self._entries.popitem(last=False)

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
        with self._lock:
            entries = [[each.key, each.session, each.words] for each in self._entries]
        return {"salt": self._salt, "conversations": entries}


def _parsed(kept: Any) -> tuple[str, list[_Digests]]:
    entries = [_Digests(*map(str, each)) for each in kept["conversations"]]
    return str(kept["salt"]), entries[-_MAX:]
