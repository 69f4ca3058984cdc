"""
What finished prompts looked like, found by their canonical ids.

Blocks of 16 canonical ids are hashed in a chain, as vLLM's automatic prefix caching
does; a record hangs on each of its block hashes. Records hold ids and values, no
arrays. An agent's prompts are long and many: of a hash 8 bytes are kept (what they find
is compared id by id), and blocks with the same records share one tuple of them.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sidecar.core.conversation import Conversation, ForgetFilter
from sidecar.core.prompt import CanonicalIds
from sidecar.volatile.marked_message import SpanKey

BLOCK_LEN = 16
_MAX_RECORDS = 4096
_MAX_BYTES = 256 << 20
_BYTES_PER_ID = 15  # itself, its share of a block hash and of that one's entry
_BYTES_PER_SPAN = 300
_MAX_PER_BLOCK = 8
_MAX_PER_THREAD = 8
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Note:
    """A tail note that stands in M: its text, and the value it states for each span."""

    text: str
    stated: Mapping[SpanKey, str]


@dataclass(frozen=True, slots=True)
class Restated:
    """A value that the tail note must say; "" if the span is gone."""

    key: SpanKey
    ordinal: int
    value: str


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """
    A span of a finished prompt.

    Args:
        value: what stood in M. settled: see reuse/prompt_ids.Canonical.
        sentinel: what stands for it in C. was_sent: the client itself sent a value
            there. was_sent_answered: in a message with an answer behind it.
    """

    key: SpanKey
    value: str
    settled: int
    sentinel: str = ""
    was_sent_answered: bool = False
    was_sent: bool = False


@dataclass(eq=False)
class LineageRecord:
    """
    One finished prompt.

    Args:
        notes: by message index; their texts are values of `note` spans.
        number: the order in which records were made.
        answered: spans that the client sent in answered messages of equal prompts,
            which this one has replaced.
    """

    canonical: array[int]
    spans: tuple[StoredSpan, ...]
    notes: Mapping[int, Note]
    conversation: Conversation
    block_hashes: array[int] = field(default_factory=lambda: array("Q"))
    touched: float = field(default_factory=time.monotonic)
    hits: int = 0
    number: int = field(default_factory=lambda: next(_numbers))
    answered: frozenset[SpanKey] = frozenset()

    @property
    def sent_answered(self) -> frozenset[SpanKey]:
        """Spans that the client itself has sent in messages with an answer behind."""
        own = (span.key for span in self.spans if span.was_sent_answered)
        return self.answered.union(own)

    @property
    def num_bytes(self) -> int:
        """Bytes it takes, about; values and notes may be longer than the prompt."""
        values = sum(_BYTES_PER_SPAN + 4 * len(span.value) for span in self.spans)
        notes = sum(4 * len(note.text) for note in self.notes.values())
        return _BYTES_PER_ID * len(self.canonical) + values + notes

    def common_len(self, other: array[int]) -> int:
        """Length in canonical ids of the common beginning."""
        size = min(len(self.canonical), len(other))
        mine = np.frombuffer(self.canonical, dtype=np.uint32, count=size)
        theirs = np.frombuffer(other, dtype=np.uint32, count=size)
        differs = mine != theirs
        return int(differs.argmax()) if differs.any() else size


_Holders = tuple[LineageRecord, ...]


class LineageIndex:
    """
    Records of one model key. Any thread.

    A thread's last records are found without their blocks: equal prompts of others
    cannot push them out.

    Args:
        model_key: seed of the hash chain. ttl_s: 0 keeps records for ever.
        use_blocks: False scans all records, with the same result (for comparison).
        max_bytes: cap over all records; the least recently used leaves first.
    """

    def __init__(
        self,
        model_key: str,
        ttl_s: float,
        *,
        use_blocks: bool,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._seed = hashlib.sha256(model_key.encode()).digest()
        self._ttl_s = ttl_s
        self._use_blocks = use_blocks
        self._records: OrderedDict[int, LineageRecord] = OrderedDict()
        self._blocks: dict[int, _Holders] = {}
        self._threads: dict[Conversation, _Holders] = {}
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records, about."""
        return self._num_bytes

    def candidates(
        self, canonical: array[int], conversation: Conversation, maximum: int = 8
    ) -> list[tuple[LineageRecord, int]]:
        """
        The key's records that share a beginning, deepest first, with that length.

        Args:
            most: of the thread's own and the one that it resembles, and of others each.
        """
        with self._lock:
            self._expire()
            if self._use_blocks:
                others = self._by_block(self._hashes(canonical, conversation), maximum)
            else:
                others = [
                    record
                    for record in self._records.values()
                    if record.conversation.tenant == conversation.tenant
                ]
            own = self._threads.get(conversation, ())
            if conversation.resembles is not None:
                own = (*own, *self._threads.get(conversation.resembles, ()))
        records = [*own, *(record for record in others if record not in own)]
        shared = [(r, r.common_len(canonical)) for r in records]
        shared = [(r, n) for r, n in shared if n >= BLOCK_LEN]
        shared.sort(key=lambda item: (item[1], item[0].touched), reverse=True)
        left = {True: maximum, False: maximum}  # of its own, of others
        chosen = []
        for record, length in shared:
            is_own = record in own
            if left[is_own]:
                left[is_own] -= 1
                chosen.append((record, length))
        return chosen

    def last(
        self, canonical: array[int], conversation: Conversation
    ) -> tuple[LineageRecord, int] | None:
        """A thread's last record, even of another beginning, and what they share."""
        with self._lock:
            own = self._threads.get(conversation, ())
        return (own[-1], own[-1].common_len(canonical)) if own else None

    def add(self, record: LineageRecord) -> None:
        """Keep a record; an equal prompt of the same conversation is replaced."""
        record.block_hashes = self._hashes(record.canonical, record.conversation)
        with self._lock:
            for old in self._equals(record):
                record.answered |= old.sent_answered
                self._remove(old)
            self._records[id(record)] = record
            self._num_bytes += record.num_bytes
            own = (*self._threads.get(record.conversation, ()), record)
            self._threads[record.conversation] = own[-_MAX_PER_THREAD:]
            self._replace(record, lambda old: (*old, record)[-_MAX_PER_BLOCK:])
            while self._records and (
                len(self._records) > _MAX_RECORDS or self._num_bytes > self._max_bytes
            ):
                self._remove(next(iter(self._records.values())))

    def note_sent(
        self, conversation: Conversation, answered: Collection[SpanKey]
    ) -> None:
        """
        Know that a client sends values in answered messages of a thread.

        Whatever becomes of the request: where one is gone later, its user deleted it.
        """
        with self._lock:
            for record in self._threads.get(conversation, ()):
                record.answered = record.answered.union(answered)

    def touch(self, record: LineageRecord) -> None:
        """Count a use."""
        with self._lock:
            record.touched = time.monotonic()
            record.hits += 1
            if id(record) in self._records:
                self._records.move_to_end(id(record))

    def forget(self, forget_filter: ForgetFilter | None) -> int:
        """Forget everything, or some conversations; how many records went."""
        with self._lock:
            before = len(self._records)
            if forget_filter is None:
                self._records.clear()
                self._blocks.clear()
                self._threads.clear()
                self._num_bytes = 0
                return before
            for record in list(self._records.values()):
                if forget_filter.covers(record.conversation):
                    self._remove(record)
            return before - len(self._records)

    def _by_block(self, hashes: array[int], maximum: int) -> list[LineageRecord]:
        found: dict[int, LineageRecord] = {}
        # No binary search: a block may have lost its holders to younger records that
        # are gone, and the blocks behind it still have theirs.
        for block in reversed(hashes):
            for record in reversed(self._blocks.get(block, ())):
                found[id(record)] = record
            if len(found) >= maximum:
                break
        return list(found.values())

    def _equals(self, record: LineageRecord) -> list[LineageRecord]:
        if not record.block_hashes:
            return []
        holders = self._blocks.get(record.block_hashes[-1], ())
        return [
            old
            for old in holders
            if old.conversation == record.conversation
            and old.canonical == record.canonical
        ]

    def _expire(self) -> None:
        if not self._ttl_s:
            return
        oldest = time.monotonic() - self._ttl_s
        while self._records:
            record = next(iter(self._records.values()))
            if record.touched >= oldest:
                return
            self._remove(record)

    def _remove(self, record: LineageRecord) -> None:
        self._records.pop(id(record), None)
        self._num_bytes -= record.num_bytes
        own = self._threads.get(record.conversation, ())
        if left := tuple(r for r in own if r is not record):
            self._threads[record.conversation] = left
        else:
            self._threads.pop(record.conversation, None)
        self._replace(record, lambda old: tuple(r for r in old if r is not record))

    def _replace(
        self, record: LineageRecord, change: Callable[[_Holders], _Holders]
    ) -> None:
        """Change the holders of a record's blocks; equal ones stay one tuple."""
        changed: dict[_Holders, _Holders] = {}  # records are equal if they are the same
        for block in record.block_hashes:
            old = self._blocks.get(block, ())
            if old not in changed:
                changed[old] = change(old)
            if new := changed[old]:
                self._blocks[block] = new
            else:
                self._blocks.pop(block, None)

    def _hashes(self, canonical: array[int], conversation: Conversation) -> array[int]:
        """Chained from the API key as well: no record is found by another key's."""
        seed = self._seed
        if conversation.tenant is not None:
            key = conversation.tenant.encode("utf-8", "surrogatepass")
            seed = hashlib.sha256(seed + key).digest()
        return array("Q", _chain(seed, canonical))


def stated_by(restated: Sequence[Restated]) -> dict[SpanKey, str]:
    """The value that a note of these states for each span."""
    return {item.key: item.value for item in restated}


def pack(ids: CanonicalIds) -> array[int]:
    """Canonical ids in 4 bytes each."""
    return array("I", ids)


def _chain(seed: bytes, canonical: array[int]) -> Iterator[int]:
    data = memoryview(np.frombuffer(canonical, dtype=np.uint32).astype(">u4").tobytes())
    size = 4 * BLOCK_LEN
    last = seed
    for start in range(0, len(data) - size + 1, size):
        last = hashlib.sha256(last + data[start : start + size]).digest()
        yield int.from_bytes(last[:8], "big")
