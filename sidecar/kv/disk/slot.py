"""A slot: a run of ids whose KV is in a file, and what was written with it."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sidecar.core.conversation import Conversation, conversation_of, unknown
from sidecar.kv.disk.durable_files import make_durable, open_private
from sidecar.kv.disk.tensor_file import Damaged, Header, TensorSpec, write_tensors

VERSION = 4
_HELD = {
    "uid": str,
    "salt": str,
    "at": int,
    "end": int,
    "crc32": dict,
    "scalars": dict,
    "packed": list,
    "runs": list,
    "classes": list,
    "kept": list,
    "keeps_end": bool,
    "state": str,
}
# Layers that cannot be cut: there are none; their state at its end; it went with that.
STATELESS, WITH_STATE, STATE_GONE = "none", "at its end", "lost"
_HELD_WITHIN = {"packed": bool, "runs": list, "classes": str, "kept": dict}
_SCALAR = (int, float, str, type(None))  # a bool is an int


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """
    A run of ids whose KV is in a file.

    Args:
        uid: random; a number may be given anew, this is not. parent: number and uid of
            the slot that it goes on from, None at the beginning of a prompt.
        at: where: at its end, or inside it. end: of the run, which begins there.
        ids: of the run. canonical: of the last prompt in it, by which lineage is
            looked up. meta: what else was written (disk_cache).
        num_bytes: of the KV's file.
    """

    number: int
    uid: str
    parent: tuple[int, str] | None
    at: int
    end: int
    ids: np.ndarray
    canonical: np.ndarray
    meta: Mapping[str, Any]
    num_bytes: int
    used: float

    @property
    def salt(self) -> str:
        """The hash of the salt of the tree that it stands in."""
        return str(self.meta["salt"])

    @property
    def conversation(self) -> Conversation:
        """The conversation that ended there."""
        conversation = self.meta["owner"]
        return unknown(0) if conversation is None else conversation_of(conversation)

    @property
    def is_end(self) -> bool:
        """Whether all that a prompt needs is there that ends where it does."""
        return bool(self.meta["state"] != STATE_GONE)

    @property
    def length(self) -> int:
        """Tokens of the run."""
        return self.end - self.at


def parse_slot(
    number: int,
    header: Header,
    text: bytes,
    arrays: tuple[np.ndarray, np.ndarray],
    used: float,
) -> Slot:
    """
    A slot from what its small files hold.

    Args:
        header: of the file of its ids. text: its meta. arrays: ids, canonical ids.
        used: when it was of use last, wall-clock seconds.
    Raises:
        Damaged, KeyError, ValueError, TypeError: it is none.
    """
    ids, canonical = arrays
    metadata = header.metadata
    found = sum_of(ids, canonical)
    if zlib.crc32(text) != int(metadata["meta_crc32"]) or found != int(
        metadata["ids_crc32"]
    ):
        raise Damaged("it is not what was written")
    meta = json.loads(text.decode("utf-8", "surrogatepass"))
    if meta["version"] != VERSION or meta["uid"] != metadata["uid"]:
        raise Damaged(f"it is of version {meta['version']}")
    if odd := next(_odd(meta), None):
        raise Damaged(f"of its meta {odd} is not what it should be")
    meta["_crc32"] = int(metadata["cache_crc32"])
    parent = _parent_of(meta["parent"])
    if metadata["parent"] != (parent[1] if parent else ""):
        raise Damaged("its files do not agree whom it goes on from")
    at, end = meta["at"], meta["end"]
    is_sound = ids.ndim == 1 and len(ids) == end - at > 0 and (parent or at == 0)
    if not is_sound or (parent and not (at > 0 and parent[0] < number)):
        raise Damaged("its run is not one")
    return Slot(
        number,
        meta["uid"],
        parent,
        at,
        end,
        ids,
        canonical,
        meta,
        int(metadata["cache_size"]),
        used,
    )


def _odd(meta: Mapping[str, Any]) -> Iterator[str]:
    """Names of what is not of the kind that it should be."""
    yield from (n for n, kind in _HELD.items() if not isinstance(meta[n], kind))
    for name, kind in _HELD_WITHIN.items():
        if not all(isinstance(value, kind) for value in meta[name]):
            yield name
    if not all(isinstance(n, str) for run in meta["runs"] for n in run):
        yield "runs"
    if not all(isinstance(total, int) for total in meta["crc32"].values()):
        yield "crc32"
    if not all(isinstance(value, _SCALAR) for value in meta["scalars"].values()):
        yield "scalars"
    if not all(isinstance(turn["depth"], int) for turn in meta["kept"]):
        yield "kept"
    conversation = [meta["owner"]] if meta["owner"] is not None else []
    for scope in (*conversation, *(turn["scope"] for turn in meta["kept"])):
        conversation_of(scope)


def _parent_of(link: object) -> tuple[int, str] | None:
    if link is None:
        return None
    if not (isinstance(link, list) and [*map(type, link)] == [int, str]):
        raise Damaged("of its meta parent is not what it should be")
    return link[0], link[1]


def write_words(
    paths: Mapping[str, Path],
    meta: Mapping[str, Any],
    arrays: tuple[np.ndarray, np.ndarray],
    cache: tuple[int, int],
) -> None:
    """
    Write all of a slot but its KV, durably.

    Args:
        paths: of its meta and of its tokens. meta: its whole meta.
        arrays: its ids, canonical ids. cache: CRC32 of its KV's header, and its size.
    Raises:
        OSError: of the disk.
    """
    text = json.dumps(meta, ensure_ascii=False).encode("utf-8", "surrogatepass")
    with open_private(paths["meta"]) as file:
        file.write(text)
        make_durable(file)
    sums = {
        "uid": meta["uid"],
        "parent": meta["parent"][1] if meta["parent"] else "",
        "meta_crc32": str(zlib.crc32(text)),
        "cache_crc32": str(cache[0]),
        "cache_size": str(cache[1]),
        "ids_crc32": str(sum_of(*arrays)),
    }
    specs = [
        TensorSpec("tokens", "I32", arrays[0].shape),
        TensorSpec("canonical", "U32", arrays[1].shape),
    ]
    with open_private(paths["tokens"]) as file:
        write_tensors(file, specs, sums, arrays)
        make_durable(file)


def sum_of_bytes(array: np.ndarray) -> int:
    """CRC32 over an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def sum_of(ids: np.ndarray, canonical: np.ndarray) -> int:
    """CRC32 over the ids of a slot."""
    return zlib.crc32(canonical.tobytes(), zlib.crc32(ids.tobytes()))
