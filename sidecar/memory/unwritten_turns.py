"""
What is kept of conversations beside their KV, as JSON, until it is written with it.

A turn is kept by the ids of its prompt: whoever writes the KV of a path asks for the
turns that were said on it. Ids are compared by their hash, of which a long
conversation has many.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sidecar.core.conversation import ForgetFilter, conversation_of
from sidecar.core.prompt import ModelIds
from sidecar.core.requests import ToolCall
from sidecar.memory.known_turns import Healed, KnownTurn
from sidecar.memory.lineage import LineageRecord, Note, StoredSpan
from sidecar.memory.tombstones import Context
from sidecar.volatile.marked_message import SpanKey

_MAX, _MAX_BYTES = 4096, 64 << 20  # turns; the oldest is not written then
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UnwrittenTurn:
    """
    A turn that ended cleanly, as it will be written.

    Args:
        num_tokens, digest: of the ids of its prompt.
        record: what that looked like. fields: the rest, as JSON.
    """

    num_tokens: int
    digest: str
    record: LineageRecord
    fields: Json


class UnwrittenTurns:
    """Turns that were not written yet. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, UnwrittenTurn] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, turn: str, unwritten_turn: UnwrittenTurn) -> None:
        """Keep a turn, by its own id."""
        with self._lock:
            self._kept[turn] = unwritten_turn
            self._num_bytes += unwritten_turn.record.num_bytes
            while len(self._kept) > _MAX or self._num_bytes > _MAX_BYTES:
                _, gone = self._kept.popitem(last=False)
                self._num_bytes -= gone.record.num_bytes

    def of_path(self, ids: ModelIds, salt: str) -> tuple[list[Json], np.ndarray]:
        """
        The turns whose prompts are beginnings of a path, oldest first.

        Returns:
            Each as JSON; the canonical ids of the last one's prompt.
        """
        with self._lock:
            asked = [
                (unwritten_turn.num_tokens, turn, unwritten_turn)
                for turn, unwritten_turn in self._kept.items()
                if unwritten_turn.record.conversation.salt == salt
                and unwritten_turn.num_tokens <= len(ids)
            ]
        asked.sort(key=lambda item: item[0])
        digest, done, found = hashlib.sha256(), 0, list[Json]()
        last: LineageRecord | None = None
        for num_tokens, turn, unwritten_turn in asked:
            digest.update(_packed(ids[done:num_tokens]))
            done = num_tokens
            if digest.hexdigest() == unwritten_turn.digest:
                found.append(
                    {**unwritten_turn.fields, "turn": turn, "depth": num_tokens}
                )
                last = unwritten_turn.record
        if last is None:
            return [], np.empty(0, np.uint32)
        found[-1] = {**found[-1], "lineage": lineage_json(last)}
        return found, np.frombuffer(last.canonical, np.uint32).copy()

    def drop(self, turns: Sequence[str]) -> None:
        """Keep these no more: they are written, or forgotten."""
        with self._lock:
            for gone in filter(None, (self._kept.pop(turn, None) for turn in turns)):
                self._num_bytes -= gone.record.num_bytes

    def forget(self, forget_filter: ForgetFilter | None) -> None:
        """Forget all, or some conversations."""
        with self._lock:
            turns = [
                turn
                for turn, unwritten_turn in self._kept.items()
                if forget_filter is None
                or forget_filter.covers(unwritten_turn.record.conversation)
            ]
        self.drop(turns)


def digest_of(ids: ModelIds) -> str:
    """A short name for the ids of a prompt."""
    return hashlib.sha256(_packed(ids)).hexdigest()


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def lineage_json(record: LineageRecord) -> Json:
    """A record without its canonical ids."""
    spans = [
        [s.key, s.value, s.settled, s.sentinel, s.was_sent_answered, s.was_sent]
        for s in record.spans
    ]
    notes = [[n, note.text, _values(note.stated)] for n, note in record.notes.items()]
    return {
        "scope": record.conversation.as_json(),
        "spans": spans,
        "notes": notes,
        "answered": sorted(record.answered),
    }


def lineage_of(fields: Json, canonical: np.ndarray) -> LineageRecord:
    """The record again."""
    spans = [
        StoredSpan(
            _key(key), str(value), int(settled), str(sentinel), *map(bool, was_sent)
        )
        for key, value, settled, sentinel, *was_sent in fields["spans"]
    ]
    notes = {int(n): Note(str(text), _stated(v)) for n, text, v in fields["notes"]}
    ids = array("I", canonical.astype(np.uint32).tobytes())
    record = LineageRecord(ids, tuple(spans), notes, conversation_of(fields["scope"]))
    record.answered = frozenset(map(_key, fields.get("answered", ())))
    return record


def turn_json(turn: KnownTurn, ids: Sequence[str]) -> Json:
    """A turn as the model wrote it, and where."""
    healed = turn.healed
    return {
        "visible": turn.visible,
        "time": turn.time,
        "alike": turn.alike,
        "behind": turn.behind.hex(),
        "ids": list(ids),
        "context": [
            turn.context.canonical,
            turn.context.literal,
            turn.context.identity,
            turn.context.channel,
            turn.context.sender,
        ],
        "scope": turn.conversation.as_json(),
        "told": _values(turn.values),
        "as_sent": turn.as_sent,
        "healed": {
            "header": healed.header,
            "raw_ids": list(healed.raw_ids),
            "raw_text": healed.raw_text,
            "reasoning": healed.reasoning,
            "vanishing": healed.vanishing,
            "lead": healed.lead,
        },
    }


def turn_of(fields: Json) -> tuple[KnownTurn, list[str]]:
    """The turn again, and the ids that were issued for it."""
    healed, vanishing = fields["healed"], fields["healed"]["vanishing"]
    turn = KnownTurn(
        str(fields["visible"]),
        Context(*map(str, fields["context"])),
        conversation_of(fields["scope"]),
        Healed(
            str(healed["header"]),
            tuple(map(int, healed["raw_ids"])),
            str(healed["raw_text"]),
            str(healed["reasoning"]),
            (str(vanishing[0]), str(vanishing[1])) if vanishing else None,
            str(healed["lead"]),
        ),
        _stated(fields["told"]),
        bool(fields["as_sent"]),
        int(fields.get("time", 0)),
        str(fields.get("alike", "")),
        bytes.fromhex(fields.get("behind", "")),
    )
    return turn, [str(issued) for issued in fields["ids"]]


def calls_json(calls: Sequence[ToolCall]) -> list[Json]:
    """Calls as the model gave them."""
    return [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in calls]


def calls_of(fields: Sequence[Json]) -> list[ToolCall]:
    """The calls again."""
    return [ToolCall(str(c["id"]), str(c["name"]), str(c["arguments"])) for c in fields]


def _values(values: Mapping[SpanKey, str]) -> list[list[Any]]:
    return [[key, value] for key, value in values.items()]


def _stated(fields: Sequence[Any]) -> dict[SpanKey, str]:
    return {_key(key): str(value) for key, value in fields}


def _key(fields: Sequence[Any]) -> SpanKey:
    message, place, kind, nth = fields
    return int(message), int(place), str(kind), int(nth)
