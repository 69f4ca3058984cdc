"""The oracle fuzzer's player on a server that is told to forget some of its clients."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import httpx

from sidecar.core.prompt import ModelIds
from sidecar.kv.disk.slot import Slot
from sidecar.kv.prefix_tree import path_to
from testkit.oracle import Request, Seen, can_be_asked
from testkit.oracle_restarts import RestartingPlayer, RestartTotals
from testkit.oracle_rig import Rig
from testkit.oracle_talk import Op, Talk

_OFTEN = 0.3  # of the ops, a forgetting before
_SAME_WORDS = 16  # the forgotten may have been the first to say what others say too


@dataclass
class ForgetTotals(RestartTotals):
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
        self._is_answered = False
        self._said: dict[str, set[ModelIds]] = defaultdict(set)
        # What is not lost since -> how many restarts there had been.
        self._warm: dict[tuple[str, ModelIds], int] = {}
        self.totals: ForgetTotals = ForgetTotals()

    def _act(self, op: Op, chance: random.Random) -> None:
        dice = random.Random(f"forget {op}")
        if self._cast.talks and dice.random() < _OFTEN:
            self._say_the_same(op, dice)
        named = sorted({t.session for t in self._cast.talks if t.session})
        if named and dice.random() < _OFTEN:
            self._rig.settle()
            is_written = dice.random() < 0.7
            if is_written:
                self._disk.flush()
            self._forget(dice.choice(named), is_written=is_written)
        super()._act(op, chance)

    def _say_the_same(self, op: Op, dice: random.Random) -> None:
        """Somebody else asks what was asked before, or a part of it."""
        talk = self._cast.pick(dice)
        asked = [
            n for n in range(1, len(talk.messages) + 1) if can_be_asked(_cut(talk, n))
        ]
        if asked:
            same = replace(
                _cut(talk, dice.choice(asked)), session=f"t{dice.randrange(3)}"
            )
            self._cast.talks.append(same)
            self._send([self._request(same, replace(op, name="append"), dice)])

    def _forget(self, session: str, *, is_written: bool) -> None:
        theirs = self._said.pop(session, set())
        self._warm = {key: at for key, at in self._warm.items() if key[0] != session}
        if self._rig.store.needs_checkpoints:
            # An end that two have said is of the one who said it last (docs/disk.md).
            ends = {end for ids in theirs for end in _ends(ids)}
            self._warm = {
                key: at for key, at in self._warm.items() if not ends & _ends(key[1])
            }
        anywhere, in_memory = self._depths(), self._depths_in_memory()
        url = f"{self._rig.app.url}/admin/cache/forget"
        answer = httpx.post(url, json={"session": session}, timeout=60)
        self._expect(answer.is_success, "forget", answer.text[:300])
        self.totals.forgettings += 1
        self._expect_unknown()
        if is_written:  # else a write on its way may join the ends of a talk
            self._expect_kept(anywhere, self._depths())
        self._expect_kept(in_memory, self._depths_in_memory())
        whole = {ids for ids, depth in anywhere.items() if _is_whole(ids, depth)}
        # The others may be said again, by somebody else, whose they are then.
        self._warm = {key: at for key, at in self._warm.items() if key[1] in whole}

    def _expect_unknown(self) -> None:
        """Nothing is there that nobody who is left has said."""
        known = {ids[:end] for all_of in self._said.values() for ids in all_of
                 for end in range(len(ids) + 1)}  # fmt: skip
        for where, ids in self._stored():
            # What is fed for a stop token stands in no answer.
            is_known = ids[:-1] in known
            self._expect(is_known, "forget", f"{where}: {self._rig.text(list(ids))!r}")

    def _expect_kept(self, had: dict[ModelIds, int], has: dict[ModelIds, int]) -> None:
        for ids, depth in had.items():
            if _is_whole(ids, depth):
                self.totals.kept += 1
                is_kept = has[ids] >= depth - _SAME_WORDS
                detail = f"{depth} before, {has[ids]} behind, of {len(ids)}"
                self._expect(is_kept, "warm", detail)

    def _depths(self) -> dict[ModelIds, int]:
        """How much of what the others said is there, in memory or on the disk."""
        found = {}
        for _, ids in self._warm:
            index = self._disk._index
            if self._rig.store.needs_checkpoints:
                match = index.match_at_end(ids, "", len(ids))
            else:
                match = index.match(ids, "")
            found[ids] = max(self._rig.store.match_len(ids), match.depth)
        return found

    def _depths_in_memory(self) -> dict[ModelIds, int]:
        """The same, of what was not brought back for somebody else."""
        now = self.num_restarts
        return {
            ids: self._rig.store.match_len(ids)
            for (_, ids), at in self._warm.items()
            if at == now
        }

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
        # A turn that a stop string cut is nobody's to go on from.
        is_cut = "stop" in request.extra
        self._is_answered = response.status_code == httpx.codes.OK and not is_cut
        super()._check(request, response, seen)
        self._speaker = None
        if request.trap and request.trap.action == "fail":
            # What it had borrowed is lost; others' words may be in its slots alone.
            match_len = self._rig.store.match_len
            self._warm = {
                key: at
                for key, at in self._warm.items()
                if _is_whole(key[1], match_len(key[1]))
            }

    def _note_computed(self, ids: Sequence[int]) -> None:
        super()._note_computed(ids)
        if self._speaker is not None:
            said = ModelIds(tuple(ids))
            self._said[self._speaker].add(said)
            if self._is_answered:  # else not all of it is computed, or remembered
                self._warm[self._speaker, said] = self.num_restarts


def _ends(ids: ModelIds) -> set[ModelIds]:
    """Where what was said may be kept to: its last token may not be computed."""
    return {ids, ModelIds(ids[:-1])}


def _is_whole(ids: ModelIds, depth: int) -> bool:
    return depth >= len(ids) - 1


def _cut(talk: Talk, length: int) -> Talk:
    return replace(talk, messages=talk.messages[:length])


def _path(slot: Slot, slots: dict[int, Slot]) -> list[int]:
    """Ids from the beginning to a slot's end."""
    before = _path(slots[slot.parent[0]], slots)[: slot.at] if slot.parent else []
    return [*before, *slot.ids.tolist()]
