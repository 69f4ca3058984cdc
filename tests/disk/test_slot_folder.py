"""A process that dies at any moment leaves the slots that were there, or one more."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sidecar.core.conversation import Conversation, ForgetFilter
from sidecar.kv.disk import kv_disk
from sidecar.kv.disk.durable_files import open_private
from sidecar.kv.disk.forgetting import forget_all, forget_some
from sidecar.kv.disk.kv_disk import KVDisk
from sidecar.kv.disk.ports import DiskSettings
from sidecar.kv.disk.prompt_cache_file import export_chain
from sidecar.kv.disk.root import DiskLimits, DiskRoot
from sidecar.kv.disk.slot import STATELESS, WITH_STATE, Slot, write_words
from sidecar.kv.disk.slot_arrays import OpenSlot
from sidecar.kv.disk.slot_folder import Replaced, SlotFolder
from sidecar.kv.disk.slot_index import SlotIndex
from sidecar.kv.disk.tensor_file import (
    Damaged,
    Header,
    TensorSpec,
    header_bytes,
    read_header,
    read_tensor,
    write_tensors,
)  # fmt: skip
from testkit.raw_http import eventually

LIMITS = DiskLimits(1 << 40, 0, 0, 0)
EMPTY = np.empty(0, np.uint32)
# What of the system's calls change the disk.
CALLS = ("os.open", "os.write", "os.rename", "os.fsync", "os.unlink", "os.utime")


def write(
    folder: SlotFolder,
    parent: Slot | None,
    ids: list[int],
    session: str = "",
    **more: Any,
) -> Slot:
    """
    A slot whose KV is its ids, in a shape of KV; a session's, if one is named.

    Args:
        more: fields of its meta. `canonical`: its canonical ids; with a state it has a
            tensor that cannot be cut.
    """
    draft, at = folder.draft(), parent.end if parent else 0
    canonical = np.array(more.pop("canonical", []), np.uint32)
    specs = [
        TensorSpec("0.0", "F32", (1, 1, len(ids), 2)),
        TensorSpec("0.2", "I32", ()),
    ]
    values = np.repeat(np.array(ids, np.float32), 2).reshape(specs[0].shape)
    arrays = [values, np.array(len(ids), np.int32)]
    if more.get("state", STATELESS) == WITH_STATE:
        specs.append(TensorSpec("1.0", "F32", (1, 2)))
        arrays.append(np.zeros((1, 2), np.float32))
    try:
        with open_private(draft.paths["cache"]) as file:
            sums = write_tensors(file, specs, {}, arrays)
            draft.num_bytes = file.tell()
        meta = {
            "at": at, "end": at + len(ids), "salt": "", "crc32": sums,
            "packed": [False], "scalars": {"0.2": len(ids)}, "keeps_end": False,
            "kept": [said(session, at + len(ids))], "state": STATELESS,
            "owner": [None, session, "t"] if session else None,
            "runs": [["0.0"]], "classes": ["KVCache"], **more,
        }  # fmt: skip
        folder.describe(draft, parent, meta, (np.array(ids, np.int32), canonical))
        slot = folder.commit(draft, parent)
    finally:
        draft.discard()
    assert slot is not None
    return slot


def said(session: str, depth: int) -> dict[str, Any]:
    """A turn of a session's, whose prompt ended there."""
    scope = [None, session, "t"]
    return {"scope": scope, "turn": session, "lineage": 1, "depth": depth}


def whole(folder: SlotFolder) -> list[list[int]]:
    """The ids of all slots, which are the values of their KV; raises if not."""
    found = []
    for number in folder.numbers():
        slot = folder.read(number)
        with folder.locked(shared=True):
            opened = folder.open(slot)
        values = read_all(opened)
        ids = slot.ids.tolist()
        assert values[0, 0, :, 0].tolist() == [float(i) for i in ids]
        found.append(ids)
    return found


def read_all(opened: OpenSlot) -> np.ndarray:
    """The KV, checked."""
    values = np.array(opened.read("0.0"))
    opened.check()
    return values


def readable(folder: SlotFolder) -> list[list[int]]:
    """The same, without what says of itself that it is none."""
    for number in folder.numbers():
        try:
            folder.read(number)
        except Damaged:
            with folder.locked():
                folder.delete(number)
    return whole(folder)


@pytest.fixture
def folder(tmp_path: Path) -> SlotFolder:
    root = DiskRoot(tmp_path / "root", LIMITS)
    root.prepare()
    return root.folder("f" * 64, {})


def test_a_slot_is_what_was_written(folder: SlotFolder) -> None:
    first = write(folder, None, [1, 2, 3])
    second = write(folder, first, [4, 5])
    assert (first.number, second.number) == (1, 2)
    assert second.parent == (1, first.uid)
    assert whole(folder) == [[1, 2, 3], [4, 5]]
    modes = {p.stat().st_mode & 0o777 for p in folder.path.iterdir()}
    assert modes == {0o600}
    assert folder.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("part", ["tokens", "meta", "cache"])
def test_a_pipe_in_a_known_slot_s_place_is_damage(
    part: str, folder: SlotFolder
) -> None:
    """Nobody waits for what would never come."""
    slot = write(folder, None, [1, 2, 3])
    file = folder.file(slot.number, part)
    file.unlink()
    os.mkfifo(file)
    with folder.locked(), pytest.raises(Damaged, match=part):
        folder.open(slot)
    assert slot.number not in folder.links()


def test_what_another_goes_on_from_is_its_own(folder: SlotFolder) -> None:
    """Its ids and KV; what was said there is gone, and what nobody goes on from."""
    first = write(folder, None, [1, 2, 3], "one")
    write(folder, write(folder, first, [4], "one"), [5], "one")
    write(folder, first, [8], "another")
    os.utime(folder.file(1, "meta"), (1000, 1000))
    slots, num_bytes = forget_some(folder, ForgetFilter("one"))
    assert slots == 2
    assert num_bytes > 0
    assert whole(folder) == [[1, 2, 3], [8]]
    left = [folder.read(number) for number in folder.numbers()]
    assert [slot.conversation and slot.conversation.session for slot in left] == [
        "another"
    ] * 2
    assert [len(slot.meta["kept"]) for slot in left] == [0, 1]
    assert left[0].used == 1000
    assert '"one"' not in folder.file(1, "meta").read_text()
    assert forget_some(folder, ForgetFilter("one")) == (0, 0)
    assert forget_some(folder, ForgetFilter(api_key="k")) == (0, 0)
    assert forget_some(folder, ForgetFilter("another"))[0] == 2
    assert folder.files() == {}


def test_what_another_goes_on_from_within_is_cut(folder: SlotFolder) -> None:
    """The rest of it is nobody else's; a state that cannot be cut goes whole."""
    first = write(folder, None, [1, 2, 3], "one")
    branch = write(folder, replace(first, end=2), [8], "another")
    write(folder, branch, [9], "another")
    write(folder, replace(first, end=1), [7], "third")
    assert branch.at == 2
    assert forget_some(folder, ForgetFilter("one"))[0] == 0
    assert whole(folder) == [[1, 2], [8], [9], [7]]
    assert '"one"' not in folder.file(1, "meta").read_text()
    assert folder.read(1).num_bytes == folder.file(1, "cache").stat().st_size
    with pytest.raises(Replaced), folder.locked(shared=True):
        folder.open(first)
    assert forget_some(folder, ForgetFilter("another"))[0] == 2
    assert whole(folder) == [[1], [7]]
    assert folder.files().keys() == {1, 4}


def test_what_another_said_in_it_stays(folder: SlotFolder) -> None:
    """Up to there it is theirs, although the slot bears the forgotten one's name."""
    kept = [said("another", 2), said("one", 4)]
    write(folder, None, [1, 2, 3, 4], "one", kept=kept, canonical=[7, 7])
    assert forget_some(folder, ForgetFilter("one")) == (0, 0)
    assert whole(folder) == [[1, 2]]
    left = folder.read(1)
    assert left.conversation == Conversation(None, "another", "t")
    assert left.meta["keeps_end"]
    assert left.meta["kept"] == [
        {"scope": [None, "another", "t"], "turn": "another", "depth": 2}
    ]
    assert left.canonical.size == 0
    assert forget_some(folder, ForgetFilter("another"))[0] == 1


def test_what_was_said_at_its_end_leaves_no_ids(folder: SlotFolder) -> None:
    """Those of the prompt as it is looked up were the forgotten one's."""
    kept = [said("another", 2), said("one", 3)]
    write(folder, None, [1, 2, 3], "another", kept=kept, canonical=[7, 8, 9])
    write(folder, None, [1, 2, 4], "another", kept=kept[::-1], canonical=[7, 8])
    assert forget_some(folder, ForgetFilter("one")) == (0, 0)
    stripped, other = folder.read(1), folder.read(2)
    assert stripped.canonical.size == 0
    assert "lineage" not in stripped.meta["kept"][-1]
    assert other.canonical.tolist() == [7, 8]
    assert "lineage" in other.meta["kept"][-1]


def test_what_is_cut_says_how_long_it_is(folder: SlotFolder) -> None:
    """To mlx-lm as well, which reads it by the number beside its arrays."""
    first = write(folder, None, [1, 2, 3], "one")
    write(folder, replace(first, end=2), [8], "another")
    forget_some(folder, ForgetFilter("one"))
    assert folder.read(1).meta["scalars"]["0.2"] == 2
    with folder.file(1, "cache").open("rb") as file:
        header = read_header(file)
        assert int(read_tensor(file, header, "0.2")) == 2
    assert header.metadata["1.0"] == "KVCache"


def test_a_state_that_cannot_be_cut_goes_alone(folder: SlotFolder) -> None:
    """What others go on from stays; no prompt may end there any more."""
    first = write(folder, None, [1, 2, 3], "one", state=WITH_STATE)
    write(folder, replace(first, end=2), [8, 9], "another", state=WITH_STATE)
    assert forget_some(folder, ForgetFilter("one")) == (0, 0)
    assert whole(folder) == [[1, 2], [8, 9]]
    cut = folder.read(1)
    assert not cut.is_end
    with folder.file(1, "cache").open("rb") as file:
        assert set(read_header(file).places) == {"0.0", "0.2"}
    index = SlotIndex()
    assert all(index.add(folder.read(number)) for number in (1, 2))
    path = [1, 2, 8, 9]
    assert index.match(path, "").depth == 4
    assert index.match_at_end(path, "", 4).depth == 4
    assert index.match_at_end(path, "", 3).depth == 0
    with pytest.raises(Damaged, match="cannot go on from"):
        export_chain(folder, 1, folder.path.parent / "out")


def test_what_others_said_in_a_slot_that_goes_needs_what_is_before(
    folder: SlotFolder,
) -> None:
    """Within it nothing can end, so theirs ends where it began."""
    more = {"state": WITH_STATE}
    first = write(folder, None, [1, 2], "one", kept=[], **more)
    kept = [said("another", 4), said("one", 5)]
    write(folder, first, [3, 4, 5], "one", kept=kept, **more)
    write(folder, None, [9], "one", kept=[said("one", 1)], **more)
    assert forget_some(folder, ForgetFilter("one"))[0] == 2
    assert whole(folder) == [[1, 2]]
    left = folder.read(1)
    assert left.is_end
    assert left.conversation == Conversation(None, "another", "t")


@pytest.mark.parametrize(
    "odd",
    [
        {"uid": [1]}, {"parent": [0, [1]]},
        {"crc32": {"0.0": "1"}}, {"crc32": []}, {"runs": [1, 2]}, {"runs": [[1]]},
        {"at": "0"}, {"at": 1e999}, {"end": None}, {"classes": [[]]}, {"kept": [1]},
        {"kept": [{}]}, {"kept": [{"scope": [None, "one", "t"], "depth": "2"}]},
        {"owner": ["one"]}, {"owner": {"a": 1}}, {"scalars": {"0.2": [1]}},
        {"packed": [[]]}, {"state": None}, {"salt": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_slot_that_says_what_none_says_is_damaged(
    odd: dict[str, Any], folder: SlotFolder
) -> None:
    """With sums that are right: nobody who lists, clears or forgets stumbles."""
    slot = write(folder, None, [1, 2], "one")
    write(folder, None, [3], "another")
    header = read_header_of(folder.file(1, "cache"))
    meta = {name: v for name, v in slot.meta.items() if not name.startswith("_")}
    draft = folder.draft()
    told = {**meta, "parent": None, **odd}
    arrays = (slot.ids, slot.canonical)
    write_words(draft.paths, told, arrays, (header.crc32, header.size))
    for part in ("meta", "tokens"):
        draft.paths[part].rename(folder.file(1, part))
    with pytest.raises(Damaged):
        folder.read(1)
    tidy(folder)
    assert forget_some(folder, ForgetFilter("nobody"))[0] in (0, 1)
    assert whole(folder) == [[3]]


def read_header_of(path: Path) -> Header:
    with path.open("rb") as file:
        return read_header(file)


def test_shapes_that_no_array_has_are_damage(folder: SlotFolder) -> None:
    """Of none of whose numbers anything is there, so the sizes are right."""
    for shape in ([0, 2**70], [0, *[1] * 80]):
        write(folder, None, [1])
        file = folder.file(1, "tokens")
        header = read_header_of(file)
        metadata = dict(header.metadata)
        specs = [TensorSpec("tokens", "I32", (1,)),
                 TensorSpec("canonical", "U32", tuple(shape))]  # fmt: skip
        file.write_bytes(header_bytes(specs, metadata) + b"\1\0\0\0")
        with pytest.raises(Damaged, match="has the shape"):
            folder.read(1)
        assert forget_some(folder, ForgetFilter("one"))[0] == 1


def test_numbers_do_not_run_out_unseen(folder: SlotFolder) -> None:
    """What has a slot's name and is none takes its number; above there are no slots."""
    (folder.path / "slot_4_cache.safetensors").mkdir()
    assert write(folder, None, [1]).number == 5
    (folder.path / f"slot_{10**18}_meta.json").write_text("{}")
    assert write(folder, None, [2]).number == 6
    (folder.path / f"slot_{10**12}_meta.json").write_text("{}")
    with pytest.raises(OSError, match="has a slot"):
        write(folder, None, [3])
    assert not list(folder.path.glob(".tmp-*"))
    forget_all(folder)
    assert write(folder, None, [4]).number == 5


def test_the_janitor_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody asks anything any more."""
    monkeypatch.setattr(kv_disk, "_MIN_PAUSE_S", 0.02)
    now = time.time()
    root = DiskRoot(tmp_path, DiskLimits(1 << 40, 0, 0, 0.1), clock=lambda: now)
    root.prepare()
    folder = root.folder("1" * 64, {})
    disk = KVDisk(root, DiskSettings(1, 1, 0, "auto"))
    disk.start()
    try:
        write(folder, None, [1])
        assert not eventually(lambda: not folder.numbers(), 0.2)
        now += 10
        assert eventually(lambda: not folder.numbers(), 60)
    finally:
        disk.close()


def test_one_that_cannot_be_cut_goes_with_all_behind_it(folder: SlotFolder) -> None:
    first = write(folder, None, [1, 2, 3], "one")
    write(folder, replace(first, end=2), [8], "another")
    file = folder.file(1, "cache")
    data = bytearray(file.read_bytes())
    data[-6] ^= 1  # behind it is how long it is
    file.write_bytes(data)
    assert forget_some(folder, ForgetFilter("one"))[0] == 2
    assert folder.files() == {}


def test_what_cannot_be_read_is_forgotten_with_it(folder: SlotFolder) -> None:
    """Nobody knows whose a damaged slot was, or what broke off; the others go on."""
    write(folder, None, [1], "one")
    write(folder, None, [2], "another")
    write(folder, None, [3], "one")
    write(folder, None, [4], "another")
    folder.file(3, "meta").write_text(folder.file(3, "meta").read_text()[:-2])
    folder.file(4, "tokens").unlink()
    (folder.path / ".tmp-1-0123456789ab-meta").write_text("one")
    assert forget_some(folder, ForgetFilter("one"))[0] == 3
    assert whole(folder) == [[2]]
    assert folder.files().keys() == {2}
    assert not list(folder.path.glob(".tmp-*"))


def test_on_a_full_disk_it_goes_whole(
    folder: SlotFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words could not be taken out of it."""
    write(folder, write(folder, None, [1], "one"), [2], "another")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sidecar.kv.disk.slot_folder.write_words", full)
    assert forget_some(folder, ForgetFilter("one"))[0] == 2
    assert folder.files() == {}


def test_one_whose_parent_went_is_none(folder: SlotFolder) -> None:
    first = write(folder, None, [1, 2, 3])
    with folder.locked():
        folder.delete(first.number)
    with pytest.raises(AssertionError):
        write(folder, first, [4])
    assert folder.files() == {}
    write(folder, None, [7])  # which has its number, and is another one
    with pytest.raises(AssertionError):
        write(folder, first, [4])
    with pytest.raises(Replaced, match="another slot"), folder.locked(shared=True):
        folder.open(first)


def test_an_open_slot_can_be_read_when_it_is_deleted(folder: SlotFolder) -> None:
    slot = write(folder, None, [1, 2])
    with folder.locked(shared=True):
        opened = folder.open(slot)
    forget_all(folder)
    assert read_all(opened).shape == (1, 1, 2, 2)
    assert folder.files() == {}


# Imports once; each line that it reads is acted on by a fork, which dies before the
# call whose number it is told. What it prints is how that one ended.
_FORKS = """
import os, sys
sys.path.insert(0, {repo!r})
from pathlib import Path
sys.path.insert(0, {repo!r} + "/tests/disk")
import test_slot_folder as t
from sidecar.kv.disk.slot_folder import SlotFolder

def deadly(real, left):
    def call(*args, **more):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)
        return real(*args, **more)
    return call

def act_and_die(before_call, act, path):
    folder = SlotFolder(path)
    first = folder.read(1)
    left = [before_call]
    for name in t.CALLS:
        module, _, function = name.partition(".")
        setattr(os, function, deadly(getattr(os, function), left))
    if act == "commit":
        t.write(folder, first, [4, 5])
    elif act == "delete":
        with folder.locked():
            folder.delete(2)
    elif act == "forget":
        t.forget_all(folder)
    elif act in ("forget one", "cut"):
        t.forget_some(folder, t.ForgetFilter("one"))
    else:
        t.DiskRoot(path.parent, t.DiskLimits(1, 0, 0, 0)).clear_away()

for line in sys.stdin:
    number, act, path = line.rstrip("\\n").split("\\t")
    if not (child := os.fork()):
        act_and_die(int(number), act, Path(path))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    repo = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", _FORKS.format(repo=repo)]
    with subprocess.Popen(
        command, cwd=repo, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def die(
    forks: subprocess.Popen[str], folder: SlotFolder, act: str, before_call: int
) -> bool:
    """Act in a process that is killed before some call; whether it got to its end."""
    assert forks.stdin is not None
    assert forks.stdout is not None
    forks.stdin.write(f"{before_call}\t{act}\t{folder.path}\n")
    forks.stdin.flush()
    code = int(forks.stdout.readline())
    assert code in (0, -signal.SIGKILL)
    return code == 0


@pytest.mark.parametrize("act", ["commit", "delete", "forget", "forget one", "janitor"])
def test_a_death_before_any_call(
    act: str, folder: SlotFolder, forks: subprocess.Popen[str]
) -> None:
    """What is there is whole; the next act works; leftovers are cleared away."""
    allowed = {
        "commit": [[[1, 2, 3], [8]], [[1, 2, 3], [8], [4, 5]]],
        "delete": [[[1, 2, 3], [8]], [[1, 2, 3]]],
        "forget": [[[1, 2, 3], [8]], [[1, 2, 3]], [[8]], []],
        "cut": [[[1, 2, 3], [8]], [[8]], [[1, 2], [8]]],  # which goes on from within
        "forget one": [[[1, 2, 3], [8]], [[8]]],  # the second one is another's
        "janitor": [[[1, 2, 3], [8]], [[1, 2, 3]], []],
    }[act]
    number, is_whole = 0, False
    while not is_whole:
        forget_all(folder)
        first = write(folder, None, [1, 2, 3], "one")
        write(folder, replace(first, end=2 if act == "cut" else 3), [8], "another")
        is_whole = die(forks, folder, act, number)
        assert readable(folder) in allowed
        if act in ("forget one", "cut"):
            forget_some(folder, ForgetFilter("one"))
            words = (f.read_bytes() for f in folder.path.iterdir() if f.is_file())
            assert not any(b'"one"' in text for text in words)
        tidy(folder)
        assert whole(folder) in allowed or whole(folder) == []
        complete = {n for n, parts in folder.files().items() if len(parts) == 3}
        assert complete == set(folder.files())
        write(folder, None, [9])
        assert whole(folder)[-1] == [9]
        number += 1
    assert number > 3, "no call was seen"


def tidy(folder: SlotFolder) -> None:
    """The janitor, an hour later: nothing that broke off is left."""
    for path in folder.path.iterdir():
        if path.name.startswith(".tmp-"):
            os.utime(path, (0, 0))
    DiskRoot(folder.path.parent, LIMITS).clear_away()
    assert not [p for p in folder.path.iterdir() if p.name.startswith(".tmp-")]


def test_the_oldest_leaf_goes_whatever_its_model(tmp_path: Path) -> None:
    """Of chains the ends go first; a model that is not loaded is no exception."""
    root = DiskRoot(tmp_path, LIMITS)
    root.prepare()
    one, other = root.folder("1" * 64, {}), root.folder("2" * 64, {})
    for number, folder in enumerate((one, other)):
        first = write(folder, None, [1] * 500)
        second = write(folder, first, [2] * 500)
        for slot in (first, second):
            at = 1000 * (number + 1)
            os.utime(folder.file(slot.number, "meta"), (at, at))
    sizes = sum(k.num_bytes for f in (one, other) for k in f.links().values())
    for left in ([2, 1], [2, 0], [1, 0], [0, 0]):
        minimum = sizes * sum(left) // 4 + 100
        DiskRoot(tmp_path, DiskLimits(minimum, 0, 0, 0)).clear_away()
        assert [len(other.numbers()), len(one.numbers())] == left


def test_what_nobody_used_for_a_day_goes(tmp_path: Path) -> None:
    day = DiskLimits(1 << 40, 0, 0, 86400)
    root = DiskRoot(tmp_path, day, clock=lambda: 200_000.0)
    root.prepare()
    folder = root.folder("1" * 64, {})
    first = write(folder, None, [1])
    second = write(folder, first, [2])
    third = write(folder, first, [3])
    for slot, used in ((first, 10.0), (second, 20.0), (third, 150_000.0)):
        os.utime(folder.file(slot.number, "meta"), (used, used))
    assert root.clear_away() == 1
    assert whole(folder) == [[1], [3]]  # what a younger one goes on from stays


def test_a_days_budget_is_of_all_processes(tmp_path: Path) -> None:
    now = [86400.0 * 100]
    limits = DiskLimits(1 << 40, 0, 1000, 0)
    roots = [DiskRoot(tmp_path, limits, clock=lambda: now[0]) for _ in range(2)]
    roots[0].prepare()
    roots[0].wrote(600)
    assert roots[1].refusal(400, is_last=False) is None
    assert roots[1].refusal(401, is_last=False) == "budget"
    assert roots[1].refusal(500, is_last=True) is None
    assert roots[1].refusal(501, is_last=True) == "budget"
    now[0] += 86400
    assert roots[1].refusal(1000, is_last=False) is None


def test_a_full_disk_is_not_filled(tmp_path: Path) -> None:
    root = DiskRoot(tmp_path, DiskLimits(1 << 40, 1 << 60, 0, 0))
    root.prepare()
    assert root.refusal(1, is_last=True) == "space"
    small = DiskRoot(tmp_path, DiskLimits(100, 0, 0, 0))
    assert small.refusal(101, is_last=True) == "space"


def test_the_root_keeps_out_of_copies(tmp_path: Path) -> None:
    root = DiskRoot(tmp_path / "kv", LIMITS)
    for _ in range(2):
        root.prepare()
    tag = (root.path / "CACHEDIR.TAG").read_text()
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert (root.path / ".metadata_never_index").exists()
    assert root.path.stat().st_mode & 0o777 == 0o700
