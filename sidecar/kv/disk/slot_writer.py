"""
Writes what is stored of a path to the disk: only what is not there yet.

The GPU thread never waits for the disk. It is asked for one layer at a time, each a
short turn between its other work; the file grows by that layer while it goes on. If a
sequence takes the path up meanwhile, the file is given up: the conversation goes on,
and is written when it next rests.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import numpy as np

from sidecar.core.conversation import Conversation
from sidecar.core.prompt import ModelIds
from sidecar.infra.metrics import Counters
from sidecar.kv.disk.cache_form import (
    CacheForm,
    NotWritable,
    describe,
    shapes_of,
    to_numpy,
)
from sidecar.kv.disk.durable_files import make_durable, open_private
from sidecar.kv.disk.ports import (
    WRITING,
    DiskSettings,
    Explained,
    Turn,
    salt_name,
)
from sidecar.kv.disk.root import DiskRoot
from sidecar.kv.disk.slot import STATELESS, WITH_STATE, Slot
from sidecar.kv.disk.slot_arrays import bits_of
from sidecar.kv.disk.slot_folder import Draft, SlotFolder
from sidecar.kv.disk.slot_index import DiskMatch, SlotIndex
from sidecar.kv.disk.tensor_file import Damaged, write_tensors
from sidecar.kv.kv_layers import Leaves, is_quantized
from sidecar.kv.prefix_store import PrefixStore
from sidecar.kv.stored_runs import Gone, Survey

logger = logging.getLogger(__name__)

MayCommit = Callable[[], contextlib.AbstractContextManager[bool]]
_MAX_ENDS = 32  # of other sessions' slots in a chain: a name that changes each turn
_BRANCHES = 0  # rank of a checkpoint behind which conversations part (core.prompt)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is written as one slot: from where in whom, and which slots it replaces."""

    parent: Slot | None
    start: int
    replaced: tuple[Slot, ...]


class SlotWriter:
    """Of one model. The disk's thread only."""

    def __init__(
        self,
        store: PrefixStore,
        root: DiskRoot,
        folder: SlotFolder,
        index: SlotIndex,
        explained: Explained,
        turn: Turn,
        settings: DiskSettings,
    ) -> None:
        self._store = store
        self._root = root
        self._folder = folder
        self._index = index
        self._explained = explained
        self._turn = turn
        self._settings = settings
        self._refused: set[str] = set()
        self.counters = Counters(WRITING)

    def write(
        self,
        ids: ModelIds,
        conversation: Conversation,
        may: MayCommit,
        *,
        is_last: bool,
    ) -> None:
        """
        Write what of a path is not on the disk.

        Args:
            may: holds forgetting off, and says whether there was none.
            is_last: the process ends: short runs are written too.
        """
        found = self._store.survey(ids, conversation.salt)
        is_worth = self._is_worth(found, conversation, is_last=is_last)
        if not is_worth or self._root.is_paused:
            return
        minimum = 1 if is_last else self._settings.min_gain
        for end, keeps_end in self._ends(found, minimum):
            path = ModelIds(ids[:end])
            try:
                known = self._index.match(path, salt_name(conversation.salt))
                if len(path) - known.depth < minimum:
                    continue
                run = self._run(len(path), known, conversation)
                if self._has_room(path, run, found, is_last=is_last):
                    self._write(path, conversation, run, may, keeps_end=keeps_end)
            except Gone as why:
                logger.debug("KV is not written now: %s", why)
                return
            except NotWritable as layer:
                self._tell(f"layers of the kind {layer} cannot be written to the disk")
                return
            except Damaged as error:
                self._tell(f"KV could not be written to the disk: {error}")
                return

    def _tell(self, text: str) -> None:
        if text not in self._refused:
            self._refused.add(text)
            logger.warning("%s", text)

    def _is_worth(
        self, found: Survey, conversation: Conversation, *, is_last: bool
    ) -> bool:
        if found.depth < self._settings.min_tokens or conversation.is_batch:
            return False
        if found.is_superseded and not is_last:
            return False
        # A sub-agent may be over before it would pay.
        if conversation.is_subagent and not is_last:
            self.counters.add("disk_skipped_subagent")
            return False
        day = self._root.limits.day_bytes
        is_short = day and self._root.written_today > day / 2
        # Nothing says that a short one without a turn will be asked again.
        if is_short and not conversation.own_len:
            self.counters.add("disk_skipped_single")
            return False
        return True

    def _ends(self, found: Survey, minimum: int) -> list[tuple[int, bool]]:
        """Where slots are to end, and whether others may go on from there."""
        if not self._store.needs_checkpoints:
            return [(found.depth, False)]
        ends = [(depth, rank == _BRANCHES) for depth, rank, _ in found.ends]
        last = ends[-1:]
        return [e for e in ends[:-1] if e[1] and e[0] + minimum <= last[0][0]] + last

    def _has_room(
        self, ids: ModelIds, run: _Run, found: Survey, *, is_last: bool
    ) -> bool:
        """Whether the disk takes a slot of about its size."""
        states = sum(size for depth, _, size in found.ends if depth == len(ids))
        about = (len(ids) - run.start) * found.token_bytes + states
        reason = self._root.refusal(about, is_last=is_last)
        if reason:
            self.counters.add(f"disk_skipped_{reason}")
        return not reason

    def _write(
        self,
        ids: ModelIds,
        conversation: Conversation,
        run: _Run,
        may: MayCommit,
        *,
        keeps_end: bool,
    ) -> None:
        started, draft = time.monotonic(), self._folder.draft()
        try:
            meta = self._write_kv(draft, ids, conversation.salt, run.start)
            meta |= {"owner": conversation.as_json(), "keeps_end": keeps_end}
            slot = self._commit(draft, run, ids, conversation.salt, meta, may)
        finally:
            draft.discard()
        if slot is None:
            return
        self._index.add(without_arrays(slot))
        self._root.wrote(slot.num_bytes)
        self.counters.add("disk_bytes_written", slot.num_bytes)
        self._replace(run.replaced)
        logger.debug(
            "KV written tokens=%d bytes=%d seconds=%.2f",
            slot.length,
            slot.num_bytes,
            time.monotonic() - started,
        )

    def _write_kv(
        self, draft: Draft, ids: ModelIds, salt: str, start: int
    ) -> dict[str, Any]:
        """Write a draft's KV; what else has to be known to read it."""
        form, packed = self._form(ids, salt, start)
        with open_private(draft.paths["cache"]) as file:
            sums = write_tensors(
                file,
                form.specs,
                form.metadata(is_root=start == 0),
                self._arrays(form, ids, salt, start),
            )
            make_durable(file)
            draft.num_bytes = file.tell()
        return {
            "at": start,
            "end": len(ids),
            "crc32": sums,
            "packed": packed,
            "salt": salt_name(salt),
            "scalars": dict(form.scalars),
            "runs": [[spec.name for spec in run] for run in form.runs],
            "classes": form.classes,
            "state": WITH_STATE if self._store.needs_checkpoints else STATELESS,
        }

    def _commit(
        self,
        draft: Draft,
        run: _Run,
        ids: ModelIds,
        salt: str,
        meta: Mapping[str, Any],
        may: MayCommit,
    ) -> Slot | None:
        """Make a slot of it, with all that was said on its path; None: it is stale."""
        kept, canonical = self._explained.save(ids, salt)
        before, canonical_before = self._kept_of(run.replaced)
        whole = {**meta, "kept": [*before, *kept]}
        arrays = (
            np.array(ids[run.start :], np.int32),
            canonical if kept else canonical_before,
        )
        self._folder.describe(draft, run.parent, whole, arrays)
        with may() as is_current:
            if not is_current:
                return None
            slot = self._folder.commit(draft, run.parent)
        if slot is not None:
            self._explained.saved(kept)
        elif run.parent is not None:
            self._index.remove(run.parent.number)
        return slot

    def _run(self, end: int, known: DiskMatch, conversation: Conversation) -> _Run:
        """
        Where the new slot begins: behind what is there, or with the short ends of it.

        Each token is written anew at most once: a run that has grown to its length
        stays as it is. So does another session's: it ends there, and may be forgotten;
        unless there are so many that a chain of them would grow without end.
        """
        if not known.chain:
            return _Run(None, 0, ())
        start, replaced = known.depth, list[Slot]()
        for slot in reversed(known.chain):
            below = [s for s in self._index.children(slot) if s not in replaced]
            is_short = slot.length < self._settings.run_tokens
            if slot.end != start or below or not is_short or slot.meta["keeps_end"]:
                break
            is_another = slot.conversation.session_key != conversation.session_key
            if is_another and len(known.chain) < _MAX_ENDS:
                break
            replaced.append(slot)
            start = slot.at
        if end - start < self._settings.run_tokens:
            start, replaced = known.depth, []
        if not replaced:
            return _Run(known.chain[-1], start, ())
        parent = replaced[-1].parent
        above = self._index.get(parent[0]) if parent else None
        return _Run(above, start, tuple(replaced))

    def _form(
        self, ids: ModelIds, salt: str, start: int
    ) -> tuple[CacheForm, list[bool]]:
        """What the file will hold, by the shapes of what is stored."""

        def look() -> tuple[CacheForm, list[bool]]:
            num_layers, checkpoint = self._store.state_at(ids, salt)
            if self._store.needs_checkpoints and not checkpoint:
                raise Gone("its checkpoint is gone")
            layers = [
                self._store.read_run(ids, salt, start, n) for n in range(num_layers)
            ]
            fresh = self._store.empty_cache(layers)
            shapes = [shapes_of(arrays, len(ids) - start) for arrays in layers]
            form = describe(fresh, shapes, checkpoint)
            mx.eval(list(form.states.values()))
            return form, [is_quantized(arrays) for arrays in layers]

        return cast("tuple[CacheForm, list[bool]]", self._turn(look))

    def _arrays(
        self, form: CacheForm, ids: ModelIds, salt: str, start: int
    ) -> Iterator[np.ndarray]:
        for layer in range(len(form.runs)):

            def read(layer: int = layer) -> Leaves:
                leaves = self._store.read_run(ids, salt, start, layer)
                bits = [bits_of(array) for array in leaves]
                mx.eval(bits)
                return bits

            for array in self._turn(read):
                yield to_numpy(array)
        yield from form.rest()

    def _kept_of(
        self, replaced: tuple[Slot, ...]
    ) -> tuple[list[Mapping[str, Any]], np.ndarray]:
        """What was written with slots that the new one replaces, oldest first."""
        kept: list[Mapping[str, Any]] = []
        canonical = np.empty(0, np.uint32)
        for slot in reversed(replaced):
            again = self._folder.read(slot.number)
            if again.uid != slot.uid:
                raise Damaged("a slot that is to be replaced is another one now")
            if again.meta["kept"]:
                kept, canonical = [*kept, *again.meta["kept"]], again.canonical
        return kept, canonical

    def _replace(self, replaced: tuple[Slot, ...]) -> None:
        """Delete what the new slot holds as well, unless another went on from it."""
        if not replaced:
            return
        with self._folder.locked():
            links = self._folder.links()
            for slot in replaced:
                link = links.get(slot.number)
                others = {k.parent for k in links.values()}
                if link and link.uid == slot.uid and slot.uid not in others:
                    self._folder.delete(slot.number)
                    del links[slot.number]
                    self._index.remove(slot.number)


def without_arrays(slot: Slot) -> Slot:
    """A slot as the index keeps it: what was said is in the memory, or not at all."""
    meta = {name: value for name, value in slot.meta.items() if name != "kept"}
    return replace(slot, meta=meta, canonical=np.empty(0, np.uint32))
