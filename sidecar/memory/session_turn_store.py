"""
Sessions, threads, and what each thread's conversation looked like last.

A client's session id may carry a parent and all its sub-agents; a thread is a
conversation within it, known by its first user message. Where the client names no
session, a thread is known by the model's own turns in it.
"""

import hashlib
import secrets
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sidecar.core.conversation import IMPLICIT, Conversation, ForgetFilter, is_implicit
from sidecar.core.json_bytes import dump_bytes
from sidecar.core.prompt import EarlierTurn
from sidecar.core.requests import Tool
from sidecar.volatile.marked_message import MarkedMessage, canonical_text

_MAX_THREADS = 4096
_MAX_EXPIRED = 256
_SECRET = secrets.token_hex(16)
_MAX_DIGESTS = 1 << 18  # 20 MB; a template may print nothing for an empty message
_REFUSALS_BEFORE_REPLACE = 3
_MAX_DESCRIPTORS = 8
_MAX_PARENTS = 8
_IMPLICIT_IDS = 128
_NAMED = "named "  # begins a thread that its client named
_Named = tuple[str | None, str]  # a key, the name of a session of it
ToolNames = tuple[tuple[str, str], ...]  # of each tool, in order: name, digest


@dataclass(frozen=True, slots=True)
class Change:
    """
    How a conversation differs from the thread's last one.

    Args:
        is_new: nothing is remembered of this thread.
        earlier: its last conversation, or the one that it was made of; None: it is new.
    """

    stable_messages: int
    descriptors: tuple[str, ...]
    is_new: bool = False
    earlier: EarlierTurn | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SessionView:
    """
    A session as it is shown.

    Args:
        api_key: the id of its client's key.
        num_messages, num_tokens: of the last conversation of its longest thread.
        parents: the sessions that it came from, the nearest first; at most 8.
    """

    session: str
    api_key: str | None
    num_threads: int
    num_messages: int
    num_tokens: int
    idle_s: float
    parents: tuple[str, ...]


@dataclass(eq=False)
class _Thread:
    digests: tuple[str, ...]
    num_tokens: int
    parents: tuple[str, ...] = ()
    tools: ToolNames | None = None
    refused: tuple[str, ...] = ()
    num_refused: int = 0
    refused_tokens: int = 0
    refused_tools: ToolNames | None = None
    touched: float = field(default_factory=time.monotonic)

    @property
    def weight(self) -> int:
        """Digests that it holds."""
        return len(self.digests) + len(self.refused)


@dataclass(frozen=True, slots=True)
class Cleared:
    """When a conversation was forgotten (Unix seconds), and how long its prompt was."""

    at: float
    num_tokens: int


class TurnStore:
    """
    The last conversation of each (session, thread). Any thread.

    Only a conversation that extends the stored one advances it; three refused ones in
    a row that extend one another (the client compacted) replace it.
    """

    def __init__(self, max_idle_s: float) -> None:
        self._max_idle_s = max_idle_s
        self._threads: OrderedDict[Conversation, _Thread] = OrderedDict()
        self._expired: deque[Conversation] = deque(maxlen=_MAX_EXPIRED)
        self._cleared: OrderedDict[str, Cleared] = OrderedDict()  # no name is kept
        self._lock = threading.Lock()

    def compare(
        self,
        conversation: Conversation,
        digests: Sequence[str],
        tools: ToolNames = (),
    ) -> Change:
        """What changed since the thread's last turn."""
        with self._lock:
            self._expire()
            known = self._known(conversation)
            before = known or self._rewritten(conversation, digests)
        if before is None:
            return Change(0, (), is_new=True)
        earlier, stable = _compared(before, digests, tools)
        if known is not None and known.refused:
            # It was rewritten lately: that is the last prompt, if it goes on from it.
            last = _Thread(
                known.refused, known.refused_tokens, tools=known.refused_tools
            )
            later, later_stable = _compared(last, digests, tools)
            earlier = later if later_stable > stable else earlier
        if known is None:
            return Change(0, (), is_new=True, earlier=earlier)
        old, new = known.digests[stable:], digests[stable:]
        return Change(stable, _describe(old, new), earlier=earlier)

    def is_subagent(self, conversation: Conversation, num_tokens: int) -> bool:
        """Whether another thread of the session is its main one (the longest)."""
        same = (conversation, conversation.resembles)
        with self._lock:
            longest = max(
                (
                    thread.num_tokens
                    for other, thread in self._threads.items()
                    if other.session_key == conversation.session_key
                    and other not in same
                ),
                default=0,
            )
            own = self._known(conversation)
            return longest > max(num_tokens, own.num_tokens if own else 0)

    def advance(
        self,
        conversation: Conversation,
        digests: Sequence[str],
        num_tokens: int,
        parents: tuple[str, ...] = (),
        tools: ToolNames | None = None,
    ) -> bool:
        """
        Keep a finished conversation, if it extends what is there; whether it did.

        Args:
            parents: the sessions that its client says it came from.
            tools: that it was offered; None: they are not known.
        """
        new = tuple(digests)
        with self._lock:
            known = self._known(conversation)
            parents = parents or (known.parents if known else ())
            if known is not None and conversation not in self._threads:
                self._take_over(conversation, new)
            elif known is not None and new[: len(known.digests)] != known.digests:
                extends = new[: len(known.refused)] == known.refused
                known.num_refused = known.num_refused + 1 if extends else 1
                known.refused, known.refused_tokens = new, num_tokens
                known.refused_tools = tools
                if known.num_refused < _REFUSALS_BEFORE_REPLACE:
                    self._shrink()
                    return False
            self._threads[conversation] = _Thread(new, num_tokens, parents, tools)
            self._threads.move_to_end(conversation)
            self._shrink()
        return True

    def _known(self, conversation: Conversation) -> _Thread | None:
        """Its thread, or the one that it resembles."""
        own = self._threads.get(conversation)
        if own is None and conversation.resembles is not None:
            return self._threads.get(conversation.resembles)
        return own

    def _rewritten(
        self, conversation: Conversation, digests: Sequence[str]
    ) -> _Thread | None:
        """
        The thread that a client may have made a new one of, by compaction or an edit.

        It is the last one of a session with a name that begins with the same system
        text and has a message in common behind it: a sub-agent has its own, or its
        client names its thread.
        """
        if is_implicit(conversation.session) or conversation.thread.startswith(_NAMED):
            return None
        for other in reversed(self._threads):
            thread = self._threads[other]
            if (
                other.session_key == conversation.session_key
                and len(thread.digests) > 1
                and thread.digests[:1] == tuple(digests[:1])
                # Else it is another task that begins with the same system text.
                and not set(thread.digests[1:]).isdisjoint(digests[1:])
            ):
                return thread
        return None

    def _take_over(self, conversation: Conversation, new: tuple[str, ...]) -> None:
        """Show a chat that goes on as one: its thread has a new name at each turn."""
        resembled = conversation.resembles
        if resembled is None:
            return
        old = self._threads[resembled].digests
        if new[: len(old)] == old:
            del self._threads[resembled]

    def sessions(self) -> list[SessionView]:
        """All sessions, the one that was used last first."""
        sessions: dict[_Named, list[_Thread]] = defaultdict(list)
        with self._lock:
            self._expire()
            for conversation, thread in self._threads.items():
                named = (conversation.tenant, conversation.session)
                sessions[named].append(thread)
        parents = {
            named: tuple(name for thread in threads for name in thread.parents)
            for named, threads in sessions.items()
        }
        views = [
            _view(threads, named, _ancestors(named, parents))
            for named, threads in sessions.items()
        ]
        return sorted(views, key=lambda view: view.idle_s)

    @property
    def num_threads(self) -> int:
        """Threads that are remembered."""
        with self._lock:
            return len(self._threads)

    def forget(self, forget_filter: ForgetFilter | None) -> int:
        """Forget everything, or some conversations; how many threads went."""
        with self._lock:
            gone = [
                c
                for c in self._threads
                if forget_filter is None or forget_filter.covers(c)
            ]
            for conversation in gone:
                thread = self._threads.pop(conversation)
                if not is_implicit(conversation.session):
                    cleared = Cleared(time.time(), thread.num_tokens)
                    self._cleared[_hash_of(conversation)] = cleared
            while len(self._cleared) > _MAX_EXPIRED:
                self._cleared.popitem(last=False)
            left = [
                c
                for c in self._expired
                if forget_filter is not None and not forget_filter.covers(c)
            ]
            self._expired = deque(left, maxlen=_MAX_EXPIRED)
        return len(gone)

    def cleared(self, conversation: Conversation) -> Cleared | None:
        """What is left of a session that a client named and that was forgotten."""
        with self._lock:
            return self._cleared.get(_hash_of(conversation))

    def has_expired(self, conversation: Conversation) -> bool:
        """Whether a session was forgotten lately because it was idle for too long."""
        key = conversation.session_key
        with self._lock:
            return any(other.session_key == key for other in self._expired)

    def _shrink(self) -> None:
        num_digests = sum(thread.weight for thread in self._threads.values())
        while len(self._threads) > _MAX_THREADS or num_digests > _MAX_DIGESTS:
            num_digests -= self._threads.popitem(last=False)[1].weight

    def _expire(self) -> None:
        if not self._max_idle_s:
            return
        oldest = time.monotonic() - self._max_idle_s
        for key in [k for k, t in self._threads.items() if t.touched < oldest]:
            del self._threads[key]
            self._expired.append(key)


def _hash_of(conversation: Conversation) -> str:
    """A session, so that its name cannot be read."""
    return _digest(f"{_SECRET}{conversation.tenant}\0{conversation.session}")


def message_digests(marked: Sequence[MarkedMessage]) -> list[str]:
    """A short name for the canonical form of each message."""
    return [
        _digest(
            f"{item.message.role}\0{canonical_text(item.pieces)}"
            f"\0{[(c.name, c.arguments) for c in item.message.tool_calls]}"
        )
        for item in marked
    ]


def tool_names(tools: Sequence[Tool]) -> ToolNames:
    """What tools are compared by."""
    return tuple((tool.name, _digest_of(dump_bytes(tool.raw))) for tool in tools)


def thread_name(marked: Sequence[MarkedMessage], named: str | None = None) -> str:
    """
    The thread of a conversation: its first user message, canonical.

    Args:
        named: the client's own name for it, if it has one.
    """
    if named is not None:
        return f"{_NAMED}{named}"
    for item in marked:
        if item.message.role == "user":
            return _digest(canonical_text(item.pieces))
    return ""


def new_chat(tenant: str | None, session: str) -> Conversation:
    """
    A conversation of a client that names none.

    Equal first words are said by many people, so they are no name for it: what comes
    later is of the same conversation if it holds a turn that was said in it.
    """
    return Conversation(tenant, session, secrets.token_hex(12))


def implicit_session(canonical: Sequence[int]) -> str:
    """A session id for clients that send none, from the beginning of the prompt."""
    head = b"".join(i.to_bytes(4, "big") for i in canonical[:_IMPLICIT_IDS])
    return IMPLICIT + hashlib.sha1(head, usedforsecurity=False).hexdigest()[:16]


def _view(
    threads: Sequence[_Thread], named: _Named, parents: tuple[str, ...]
) -> SessionView:
    main = max(threads, key=lambda thread: thread.num_tokens)
    idle_s = time.monotonic() - max(thread.touched for thread in threads)
    key, session = named
    return SessionView(
        session, key, len(threads), len(main.digests), main.num_tokens, idle_s, parents
    )


def _ancestors(
    named: _Named, parents: Mapping[_Named, Sequence[str]]
) -> tuple[str, ...]:
    """Parents, then theirs: clients may name any, so each counts once and few do."""
    key, session = named
    found: dict[str, None] = {}
    todo = deque(parents.get(named, ()))
    while todo and len(found) < _MAX_PARENTS:
        name = todo.popleft()
        if name != session and name not in found:
            found[name] = None
            todo.extend(parents.get((key, name), ()))
    return tuple(found)


def _compared(
    thread: _Thread, digests: Sequence[str], tools: ToolNames
) -> tuple[EarlierTurn, int]:
    """A thread's last conversation against a new one; messages that are the same."""
    pairs = zip(thread.digests, digests, strict=False)
    least = min(len(thread.digests), len(digests))
    stable = next((n for n, (old, new) in enumerate(pairs) if old != new), least)
    rest = thread.digests[stable + 1 :]
    is_rest_kept = bool(rest) and tuple(digests[stable + 1 :])[: len(rest)] == rest
    earlier = EarlierTurn(
        thread.num_tokens,
        len(thread.digests),
        len(digests),
        stable,
        is_rest_kept=is_rest_kept,
        tools=_describe_tools(thread.tools, tools),
    )
    return earlier, stable


def _describe(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    if not old:
        return ()
    if not new:
        return (f"delete {len(old)}",)
    before, now = set(old), set(new)
    if before & now:
        inserted = [f"insert {i}" for i, d in enumerate(new) if d not in before]
        deleted = [f"delete {i}" for i, d in enumerate(old) if d not in now]
        return tuple([*inserted, *deleted][:_MAX_DESCRIPTORS])
    return (f"replace {len(old)}",)


def _describe_tools(before: ToolNames | None, now: ToolNames) -> tuple[str, ...]:
    """The tools that came, went, changed or moved."""
    if before is None or before == now:
        return ()
    old, new = dict(before), dict(now)
    gone = [f"{name} is gone" for name in old if name not in new]
    come = [f"{name} is new" for name in new if name not in old]
    other = [f"{n} has changed" for n in new if n in old and old[n] != new[n]]
    found = [*gone, *come, *other] or ["their order has changed"]
    return tuple(found[:_MAX_DESCRIPTORS])


def _digest(text: str) -> str:
    return _digest_of(text.encode("utf-8", "surrogatepass"))


def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]
