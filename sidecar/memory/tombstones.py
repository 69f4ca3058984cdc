"""
Marks that say what was shown at a place in a conversation.

A turn must not be put back where its client may go on from something else that looks
the same: another try with other thoughts, or an answer that broke off. Those turns may
stand where they cannot be compared or deleted now: in a file that is not open yet, in
another process. So each answer leaves a mark. One that is kept names its words, and two
that differ hide both. One that is not kept hides all that looks like it, and one that
broke off has a time, and hides all that is older. Stores that never write in place
delete in this way (tombstones of log-structured merge trees, of Cassandra).

The time is a hybrid logical clock: wall-clock nanoseconds, but always later than every
time that was seen (Kulkarni et al., Logical Physical Clocks, 2014).
"""

import hashlib
import json
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from sidecar.core.conversation import IMPLICIT, Conversation, is_implicit

_MAX_MARKS = 1 << 16
_LINE = re.compile(r"([0-3][0-9a-f]{15}) ([0-9a-fz][0-9a-f]{31}) ([0-9a-f]{32})")
_LAST = "z"  # with it begin names of which the later mark counts, not both
_MAX_AHEAD_NS = 10 * 366 * 86400 * 10**9
_FLOOR = "0" * 32  # the key of a line that says how old a turn may be at all
_NONE = "0" * 32
SEVERAL = "f" * 32  # of words: they were not the same each time


@dataclass(frozen=True, slots=True)
class Context:
    """
    What came before a turn: with sentinels for spans, and to the letter.

    Args:
        identity: what of it tells who asks: nothing that gets newer with time.
        channel: what system texts say of it: that of users' messages is said in the
            newest one only by some clients, and goes where a history is cut.
        sender: what is said of it since the last turn; "": nothing.
    """

    canonical: str
    literal: str
    identity: str = field(default="", compare=False)
    channel: str = field(default="", compare=False)
    sender: str = field(default="", compare=False)

    def behind(self, vanishing: tuple[str, str] | None) -> "Context":
        """The same, where the prompt also had a message that no later one will have."""
        if vanishing is None:
            return self
        digest = hash_text(f"{self.literal} {vanishing}")
        return replace(self, literal=digest)


@dataclass(frozen=True, slots=True)
class Scopes:
    """
    Names of the same thing in several scopes.

    Args:
        session: anywhere in the same named session; where the client names none, where
            system texts tell alike who asks.
        sender: there, of who asked last; "": nobody is named.
        thread: in the same thread; "": the session is named.
    """

    session: str
    sender: str
    thread: str

    @property
    def names(self) -> list[str]:
        """Those that there are."""
        return [name for name in (self.session, self.sender, self.thread) if name]


@dataclass(frozen=True, slots=True)
class PlaceKeys:
    """
    Names of the place where a turn was shown; each a hash of 32 digits.

    Args:
        conversation: the same canonical context in the same named session; where the
            client names none, in the same thread.
        identity: the same in the same session, named or not, where all that tells who
            asks is the same.
        broken_off: by which answers of its conversation that may look like any turn
            there hide it: a named session behind the same canonical context; where the
            client names none, the thread behind it, and anybody behind the same prompt.
        prompt: the very same prompt, whoever sent it.
        anybody: the same canonical context and the same identity, in any session.
        session: anywhere in the same named session; where the client names none, in
            any that has no name, where system texts tell alike who asks.
        shown_last: names of the last turn that looks so. shown_once: of the only one.
    """

    conversation: str
    identity: str
    broken_off: tuple[str, ...]
    prompt: str
    anybody: str
    session: str
    shown_last: Scopes
    shown_once: Scopes


def place_keys(visible: str, context: Context, conversation: Conversation) -> PlaceKeys:
    """
    The names of a place.

    Args:
        visible: the hash of what was shown. context: what came before.
    """
    tenant, session, thread = (
        conversation.tenant,
        conversation.session,
        conversation.thread,
    )
    canonical, literal = context.canonical, context.literal
    identity = context.identity
    in_session = ("session", tenant, session, canonical)
    anywhere: tuple[str | None, ...] = ("anywhere", tenant, session)
    names: list[tuple[str | None, ...]] = [in_session]
    if is_implicit(session):
        anywhere = ("anywhere", tenant, IMPLICIT, context.channel)
        names = [("thread", tenant, thread, canonical), ("prompt", tenant, literal)]

    def scopes(kind: str, begin: str = "") -> Scopes:
        def named(*scope: str | None) -> str:
            return begin + _key(kind, *scope, visible)[len(begin) :]

        sender = named("sender", *anywhere, context.sender) if context.sender else ""
        in_thread = named("in", tenant, thread) if is_implicit(session) else ""
        return Scopes(named(*anywhere), sender, in_thread)

    return PlaceKeys(
        _key("shown", *names[0], visible),
        _key("asked", *in_session, identity, visible),
        tuple(_key(*each, None) for each in names),
        _key("said", tenant, literal, visible),
        _key("anybody", tenant, canonical, identity, visible),
        _key(*anywhere, visible),
        scopes("last", _LAST),
        scopes("once"),
    )


def call_name(tenant: str | None, issued: str) -> str:
    """The name of a call's id."""
    return _key("call", tenant, issued)


def hash_text(text: str) -> str:
    """A hash of 64 digits; text may hold halves of surrogate pairs."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _key(*parts: str | None) -> str:
    text = json.dumps(parts)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Tombstone:
    """
    A mark: something was shown at a time.

    Args:
        words: 32 digits that name what was shown; none if it broke off.
    """

    time: int
    words: str = _NONE


class Tombstones:
    """
    The newest marks by place, of all models: who asks another model has what that one
    said in its place. Any thread.

    Where there are too many, the oldest ones are merged into one time, before which
    all is hidden.

    Args:
        clock: wall-clock nanoseconds. For tests.
    """

    def __init__(
        self, maximum: int = _MAX_MARKS, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._maximum = maximum
        self._clock = clock
        self._marks: OrderedDict[str, Tombstone] = OrderedDict()
        self._unlogged: OrderedDict[str, Tombstone] | None = None
        self._answering: Counter[str] = Counter()
        self._floor = 0
        self._now = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._marks)

    def now(self) -> int:
        """A time later than all that were seen."""
        with self._lock:
            self._now = max(self._now + 1, self._clock())
            return self._now

    def see(self, seen: int) -> None:
        """
        Know of a time that another process has given.

        Raises:
            ValueError: it is none: all would be hidden for ever.
        """
        with self._lock:
            if not 0 <= seen < self._limit():
                raise ValueError("a time is nanoseconds, and not of the far future")
            self._now = max(self._now, seen)

    def _limit(self) -> int:
        """Later times than this are nobody's: they would hide all that is said."""
        return self._clock() + _MAX_AHEAD_NS

    def bury(self, keys: Iterable[str]) -> None:
        """Hide all turns at these places that are known by now, wherever they are."""
        mark = Tombstone(self.now())
        for key in keys:
            self._put(key, mark)

    def answer_begun(self, keys: PlaceKeys) -> None:
        """Hide what is at a place while an answer is given there, of this process."""
        with self._lock:
            self._answering.update(keys.broken_off)

    def answer_ended(self, keys: PlaceKeys) -> None:
        """Go by the marks again, which say by now what was shown."""
        with self._lock:
            self._answering -= Counter(keys.broken_off)

    def _is_answering(self, keys: PlaceKeys) -> bool:
        return any(key in self._answering for key in keys.broken_off)

    def shown(
        self, keys: PlaceKeys, turn_time: int, digest: str, alike: str = ""
    ) -> None:
        """
        Know that a turn was shown at its place.

        Args:
            digest: of the turn's ids. alike: of the first turn of its chat that looks
                like it; none if it is the first.
        """
        for key in (keys.conversation, keys.identity, keys.prompt, keys.anybody):
            self._put(key, Tombstone(turn_time, digest))
        for key in (*keys.shown_last.names, *keys.shown_once.names):
            self._put(key, Tombstone(turn_time, digest))
        self._put(keys.session, Tombstone(turn_time, alike or digest))

    def shown_unkept(self, keys: PlaceKeys) -> None:
        """Know that something was shown at a place that is not kept."""
        self.shown(keys, self.now(), SEVERAL)

    def hides(self, keys: PlaceKeys, turn_time: int) -> bool:
        """Whether an answer broke off later where a turn was said, or is given now."""
        with self._lock:
            if self._is_answering(keys):
                return True
            marks = [self._marks.get(key) for key in keys.broken_off]
            since = max((mark.time for mark in marks if mark), default=0)
            return turn_time < max(since, self._floor)

    def is_only(self, key: str, digest: str) -> bool:
        """Whether nothing but a turn's words was shown at a place."""
        with self._lock:
            mark = self._marks.get(key)
        return mark is None or mark.words == digest

    def is_marked(self, key: str) -> bool:
        """Whether anything is known to have been shown at a place."""
        with self._lock:
            return key in self._marks

    def has_broken_off(self, keys: PlaceKeys) -> bool:
        """Whether an answer of a conversation broke off at a place, or is given now."""
        with self._lock:
            was = any(key in self._marks for key in keys.broken_off)
            return was or self._is_answering(keys)

    @property
    def has_lost_marks(self) -> bool:
        """Whether there were too many: what has none may have been shown there."""
        with self._lock:
            return self._floor > 0

    def _put(self, key: str, mark: Tombstone) -> None:
        with self._lock:
            new = self._merge(key, mark)
            if new is None or self._unlogged is None:
                return
            self._unlogged[key] = new
            self._unlogged.move_to_end(key)
            while len(self._unlogged) > self._maximum:  # its file cannot be written
                _, gone = self._unlogged.popitem(last=False)
                floor = self._unlogged.pop(_FLOOR, gone)
                self._unlogged[_FLOOR] = Tombstone(max(floor.time, gone.time + 1))

    def _merge(self, key: str, mark: Tombstone) -> Tombstone | None:
        """Keep a mark, with the one that is there; None: that says it all."""
        self._now = max(self._now, mark.time)
        old = self._marks.get(key)
        new = mark if old is None else _merged(key, old, mark)
        if new == old:
            return None
        self._marks[key] = new
        self._marks.move_to_end(key)
        while len(self._marks) > self._maximum:
            _, gone = self._marks.popitem(last=False)
            self._floor = max(self._floor, gone.time + 1)
        return new

    def keep_log(self) -> None:
        """Have what is marked from now on asked for by a file."""
        with self._lock:
            if self._unlogged is None:
                self._unlogged = OrderedDict()

    def unlogged(self) -> list[str]:
        """Marks that are to be written, as lines; they are when `logged` says so."""
        with self._lock:
            return [_line(key, mark) for key, mark in (self._unlogged or {}).items()]

    def logged(self, lines: Sequence[str]) -> None:
        """These lines were written."""
        with self._lock:
            for line in lines:
                key = line.split()[1]
                mark = self._unlogged.get(key) if self._unlogged else None
                if self._unlogged and mark and _line(key, mark) == line:
                    del self._unlogged[key]

    def write_again(self) -> None:
        """Have all that is known written: the file of it is gone, or another one."""
        with self._lock:
            if self._unlogged is not None:
                self._unlogged = OrderedDict({**self._known(), **self._unlogged})

    def lines(self) -> list[str]:
        """All that is known, for a file that is written anew."""
        with self._lock:
            return [_line(key, mark) for key, mark in self._known().items()]

    def _known(self) -> dict[str, Tombstone]:
        floor = {_FLOOR: Tombstone(self._floor)} if self._floor else {}
        return {**floor, **self._marks}

    def learn(self, lines: Iterable[str]) -> None:
        """Know what a file says; what is no line of one is passed over."""
        for line in lines:
            read = _LINE.fullmatch(line)
            if read is None:
                continue
            mark = Tombstone(int(read[1], 16), read[3])
            with self._lock:
                if mark.time >= self._limit():
                    continue
                if read[2] == _FLOOR:
                    self._floor = max(self._floor, mark.time)
                    self._now = max(self._now, mark.time)
                else:
                    self._merge(read[2], mark)

    def clear(self) -> None:
        """Forget all marks; what is said from now on is later than they were."""
        with self._lock:
            self._marks.clear()
            self._floor = 0
            if self._unlogged:
                self._unlogged.clear()


def _merged(key: str, old: Tombstone, new: Tombstone) -> Tombstone:
    """One mark of two, in whatever order they come."""
    if key.startswith(_LAST) and old.time != new.time:
        return max(old, new, key=lambda mark: mark.time)
    words = old.words if old.words == new.words else SEVERAL
    return Tombstone(max(old.time, new.time), words)


def _line(key: str, mark: Tombstone) -> str:
    return f"{mark.time:016x} {key} {mark.words}"
