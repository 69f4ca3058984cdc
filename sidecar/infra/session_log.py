"""
One log file per session, for looking at what the cache did.

Blocks of `[time] request_id=.. direction=prompt|sampler|generation`, JSON, blank line.
The files hold conversations (unless LOG_CONTENT is off): 0600 in 0700 folders.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

Direction = Literal["prompt", "sampler", "generation"]


class SessionLog:
    """
    Appends blocks. Any thread; a failure to write is a warning, once.

    Args:
        root: where the day folders go; None writes nothing.
        with_content: False leaves messages, prompts and outputs out.
    """

    def __init__(self, root: Path | None, *, with_content: bool) -> None:
        self._root = root
        self._with_content = with_content
        self._lock = threading.Lock()
        self._has_warned = False

    def write(
        self,
        session: str,
        request_id: str,
        direction: Direction,
        meta: Mapping[str, Any],
        content: Mapping[str, Any],
    ) -> None:
        """Append one block; `content` only if content may be kept."""
        if self._root is None:
            return
        body = {"request_meta": meta, **(content if self._with_content else {})}
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        head = f"[{stamp}] request_id={request_id} direction={direction}"
        text = json.dumps(body, ensure_ascii=False, default=str)
        try:
            with self._lock:
                self._append(session, f"{head}\n{text}\n\n")
        except OSError:
            if not self._has_warned:
                logger.warning("cannot write the session log", exc_info=True)
            self._has_warned = True

    def _append(self, session: str, block: str) -> None:
        assert self._root is not None
        folder = self._root / time.strftime("%Y-%m-%d")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self._root, 0o700)
        name = hashlib.sha1(session.encode(), usedforsecurity=False).hexdigest()[:16]
        file = folder / f"cache-session-{name}.log"
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "a", encoding="utf-8", errors="replace") as out:
            out.write(block)
