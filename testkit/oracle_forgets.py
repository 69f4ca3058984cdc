"""The oracle fuzzer's player on a server that is told to forget some of its clients."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx

from sidecar.core.prompt import ModelIds
from sidecar.kv.disk.slot import Slot
from sidecar.kv.prefix_tree import path_to
from testkit.oracle import Request, Seen, Totals
from testkit.oracle_restarts import RestartingPlayer
from testkit.oracle_rig import Rig
from testkit.oracle_talk import Op

_OFTEN = 0.3  # of the ops, a forgetting before
_SAME_WORDS = 16  # the forgotten may have been the first to say what others say too


@dataclass
class ForgetTotals(Totals):
    """What was forgotten; and of the others' prompts, how many were there, and are."""

    forgettings: int = 0
    kept: int = 0


class ForgettingPlayer(RestartingPlayer):
    """
    Before some ops a session is forgotten, in memory and on the disk.

    Then nothing may stand anywhere that it alone has said, and what the others said
    must be as warm as before.
    """

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self._speaker: str | None = None
        self._said: dict[str, list[ModelIds]] = defaultdict(list)
        self._said_at: dict[ModelIds, int] = {}  # how many restarts there had been
        self.totals: ForgetTotals = ForgetTotals()

    def _act(self, op: Op, chance: random.Random) -> None:
        dice = random.Random(f"forget {op}")
        named = sorted({t.session for t in self._cast.talks if t.session})
        if named and dice.random() < _OFTEN:
            self._rig.settle()
            if dice.random() < 0.7:
                self._disk.flush()
            self._forget(dice.choice(named))
        super()._act(op, chance)

    def _forget(self, session: str) -> None:
        self._said.pop(session, None)
        before, held = self._warmth(), self._held()
        url = f"{self._rig.app.url}/admin/cache/forget"
        answer = httpx.post(url, json={"session": session}, timeout=60)
        self._expect(answer.is_success, "forget", answer.text[:300])
        self.totals.forgettings += 1
        known = {ids[:end] for all_of in self._said.values() for ids in all_of
                 for end in range(len(ids) + 1)}  # fmt: skip
        for where, ids in self._stored():
            # What is fed for a stop token stands in no answer.
            is_known = ids[:-1] in known
            self._expect(is_known, "forget", f"{where}: {self._rig.text(list(ids))!r}")
        self._expect_kept(before, self._warmth())
        self._expect_kept(held, self._held())

    def _expect_kept(self, had: dict[ModelIds, int], has: dict[ModelIds, int]) -> None:
        for said, depth in had.items():
            if depth >= len(said) - 2:  # else it is another's, that they have in common
                self.totals.kept += 1
                is_kept = has[said] >= depth - _SAME_WORDS
                detail = f"{depth} before, {has[said]} behind, of {len(said)}"
                self._expect(is_kept, "warm", detail)

    def _held(self) -> dict[ModelIds, int]:
        """How much of what the others said is in memory; theirs, not brought back."""
        said = {ids for all_of in self._said.values() for ids in all_of}
        lately = {ids for ids in said if self._said_at[ids] == self.num_restarts}
        return {ids: self._rig.store.match_len(ids) for ids in lately}

    def _warmth(self) -> dict[ModelIds, int]:
        """How much of what the others said is there, in memory or on the disk."""
        found = {}
        for ids in {ids for all_of in self._said.values() for ids in all_of}:
            match = self._disk._index.match(ids, "")
            if self._rig.store.needs_checkpoints:
                match = match.state_at_most(len(ids))
            found[ids] = max(self._rig.store.match_len(ids), match.depth)
        return found

    def _stored(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for node in self._rig.app.gpu.call(lambda: list(self._rig.store._tree.nodes())):
            yield "memory", tuple(i for n in path_to(node) for i in n.ids)
        place = self._disk._place
        assert place is not None
        slots = {n: place.folder.read(n) for n in place.folder.numbers()}
        for slot in slots.values():
            yield "disk", tuple(_path(slot, slots))

    def _check(
        self, request: Request, response: httpx.Response, seen: Seen | None
    ) -> None:
        self._speaker = request.talk.scope
        super()._check(request, response, seen)
        self._speaker = None

    def _note_computed(self, ids: Sequence[int]) -> None:
        super()._note_computed(ids)
        if self._speaker is not None:
            said = ModelIds(tuple(ids))
            self._said[self._speaker].append(said)
            self._said_at[said] = self.num_restarts


def _path(slot: Slot, slots: dict[int, Slot]) -> list[int]:
    """Ids from the beginning to a slot's end."""
    before = _path(slots[slot.parent[0]], slots)[: slot.at] if slot.parent else []
    return [*before, *slot.ids.tolist()]
