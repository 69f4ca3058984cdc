"""Responses that later requests may name as their previous one."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from sidecar.core.conversation import (
    Conversation,
    ForgetFilter,
    Generations,
    is_implicit,
)
from sidecar.core.errors import NotFound, PayloadTooLarge, PreviousResponseNotFound
from sidecar.infra.lru import Lru

_MAX_RESPONSES = 256
_MAX_BYTES = 64 << 20
_MAX_ITEMS = 1 << 12
_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Stored:
    # As bytes: objects of small lists take twenty times as much.
    body: bytes
    items: bytes  # what it was asked and what it answered
    conversation: Conversation
    stored_at: float

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.items)


class _OfKey:
    """What one key has stored."""

    def __init__(self) -> None:
        self.responses: Lru[str, _Stored] = Lru(
            _MAX_RESPONSES, _MAX_BYTES, lambda key, stored: stored.num_bytes
        )
        # An item is named by its id alone: which response it is in.
        self.homes: Lru[str, str] = Lru(_MAX_ITEMS, _MAX_ITEMS, lambda key, home: 1)


class StoredResponses:
    """
    The last responses of each API key, in memory. Any thread.

    An hour, 256 of each key, least recently used out first; beyond 64 MiB in all the
    key that holds most loses its own.
    """

    def __init__(self) -> None:
        self._of_keys: dict[str | None, _OfKey] = {}
        self._lock = threading.Lock()
        self._generations = Generations()

    @property
    def generation(self) -> int:
        """How often something was forgotten."""
        with self._lock:
            return self._generations.now

    def put(
        self,
        key_id: str | None,
        items: Sequence[Any],
        body: dict[str, Any],
        generation: int | None = None,
        session: str | None = None,
    ) -> None:
        """
        Keep a complete response.

        Args:
            items: all of its input.
            generation: when it was asked for; what was forgotten since is not kept.
            session: as the client named it.
        """
        since = self.generation if generation is None else generation
        conversation = Conversation(key_id, session or "", generation=since)
        whole = orjson.dumps([*items, *body["output"]])
        stored = _Stored(orjson.dumps(body), whole, conversation, time.monotonic())
        with self._lock:
            if not self._generations.is_current(conversation):
                return
            own = self._of_keys.setdefault(key_id, _OfKey())
            own.responses.put(body["id"], stored)
            for item in body["output"]:
                own.homes.put(item["id"], body["id"])
            held = [known.responses for known in self._of_keys.values()]
            while sum(known.weight for known in held) > _MAX_BYTES:
                max(held, key=lambda known: known.weight).pop_oldest()

    def get(self, key_id: str | None, response_id: str) -> dict[str, Any]:
        """
        A response as it was sent.

        Raises:
            NotFound: this key has none of that id.
        """
        found = self._find(key_id, response_id)
        if found is None:
            raise NotFound("no stored response has this id")
        body: dict[str, Any] = orjson.loads(found.body)
        return body

    def delete(self, key_id: str | None, response_id: str) -> None:
        """
        Forget a response.

        Raises:
            NotFound: this key has none of that id.
        """
        self.get(key_id, response_id)
        self._of(key_id).responses.pop(response_id)

    def forget(self, forget_filter: ForgetFilter | None = None) -> int:
        """
        Forget everything, or some conversations; how many responses that were.

        Of a session that no client named, nobody knows which responses are its own: all
        without a name go.
        """
        if forget_filter is not None and is_implicit(forget_filter.session or ""):
            forget_filter = replace(forget_filter, session="")
        with self._lock:
            self._generations.end(forget_filter)
            covers = forget_filter.covers if forget_filter else lambda _: True
            gone = 0
            for own in self._of_keys.values():
                gone += len(own.responses.pop_if(lambda _, r: covers(r.conversation)))
            if forget_filter is None:
                self._of_keys.clear()
            return gone

    def resolve(
        self, key_id: str | None, previous: object, items: Sequence[Any]
    ) -> list[Any]:
        """
        A request's whole input: what its previous response stands for, and its own.

        Raises:
            PreviousResponseNotFound: it names what is not kept.
        """
        before: list[Any] = []
        if previous is not None:
            found = self._find(key_id, previous) if isinstance(previous, str) else None
            if found is None:
                raise _not_kept("previous_response_id")
            before = orjson.loads(found.items)
        references = _References(lambda name: self._item(key_id, name))
        return [*before, *(references.resolve(item) for item in items)]

    def _item(self, key_id: str | None, name: str) -> Any:
        home = self._of(key_id).homes.get(name)
        found = self._find(key_id, home) if home else None
        kept = orjson.loads(found.body)["output"] if found else ()
        for known in kept:
            if known["id"] == name:
                return known
        raise _not_kept("input: item_reference")

    def _find(self, key_id: str | None, response_id: str) -> _Stored | None:
        known = self._of(key_id).responses
        found = known.get(response_id)
        if found is not None and time.monotonic() - found.stored_at > _TTL_S:
            known.pop(response_id)
            return None
        return found

    def _of(self, key_id: str | None) -> _OfKey:
        with self._lock:
            return self._of_keys.get(key_id) or _OfKey()


class _References:
    """
    The references of one request: each is looked up once, however often it is made.

    A reference of a few bytes stands for an item of any size, so what they stand for
    together is bounded as if it had been sent.
    """

    def __init__(self, find: Callable[[str], Any]) -> None:
        self._find = find
        self._known: dict[str, tuple[Any, int]] = {}
        self._num_bytes = 0

    def resolve(self, item: Any) -> Any:
        """
        What an item stands for; itself, if it is no reference.

        Raises:
            PreviousResponseNotFound: it names what is not kept.
            PayloadTooLarge: all of them stand for too much.
        """
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            return item
        name = item.get("id")
        if not isinstance(name, str):
            raise _not_kept("input: item_reference")
        if name not in self._known:
            found = self._find(name)
            self._known[name] = found, len(orjson.dumps(found))
        found, num_bytes = self._known[name]
        self._num_bytes += num_bytes
        if self._num_bytes > _MAX_BYTES:
            raise PayloadTooLarge(
                f"input: its item_references stand for more than {_MAX_BYTES >> 20} "
                "MiB",
                param="input",
            )
        return found


def _not_kept(field: str) -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        f"{field} names what is not kept here (any more): send the items themselves",
        param=field.partition(":")[0],
    )
