"""Responses that later requests may name as their previous one."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from sidecar.core.errors import NotFound, PreviousResponseNotFound
from sidecar.infra.lru import Lru

_MOST_RESPONSES = 256
_MOST_BYTES = 64 << 20
_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Stored:
    # As bytes: objects of small lists take twenty times as much.
    key_id: str | None
    body: bytes
    items: bytes  # what it was asked and what it answered
    stored_at: float

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.items)


class StoredResponses:
    """
    The last responses of each API key, in memory. Any thread.

    An hour, 256 of them and 64 MiB at most, least recently used out first.
    """

    def __init__(self) -> None:
        self._stored: Lru[str, _Stored] = Lru(
            _MOST_RESPONSES, _MOST_BYTES, lambda key, stored: stored.num_bytes
        )
        # An item is named by its id alone: which response it is in.
        self._homes: Lru[str, str] = Lru(1 << 14, 1 << 14, lambda key, home: 1)

    def put(
        self, key_id: str | None, items: Sequence[Any], body: dict[str, Any]
    ) -> None:
        """Keep a complete response; `items` is all of its input."""
        whole = orjson.dumps([*items, *body["output"]])
        stored = _Stored(key_id, orjson.dumps(body), whole, time.monotonic())
        self._stored.put(body["id"], stored)
        for item in body["output"]:
            self._homes.put(item["id"], body["id"])

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
        self._stored.pop(response_id)

    def clear(self) -> None:
        """Forget everything."""
        self._stored.clear()
        self._homes.clear()

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
        return [*before, *(self._item(key_id, item) for item in items)]

    def _item(self, key_id: str | None, item: Any) -> Any:
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            return item
        name = item.get("id")
        home = self._homes.get(name) if isinstance(name, str) else None
        found = self._find(key_id, home) if home else None
        kept = orjson.loads(found.body)["output"] if found else ()
        for known in kept:
            if known["id"] == name:
                return known
        raise _not_kept("input: item_reference")

    def _find(self, key_id: str | None, response_id: str) -> _Stored | None:
        found = self._stored.get(response_id)
        if found is None or found.key_id != key_id:
            return None
        if time.monotonic() - found.stored_at > _TTL_S:
            self._stored.pop(response_id)
            return None
        return found


def _not_kept(field: str) -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        f"{field} names what is not kept here (any more): send the items themselves",
        param=field.partition(":")[0],
    )
