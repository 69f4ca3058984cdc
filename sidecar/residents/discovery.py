"""
Which models are on this machine: folders of them, and the hub's cache. Nothing loads.

A folder is searched two deep: each folder in it is a model, or a provider with models
in it (`provider/model`). The hub's cache is read without the network, and its models
are loaded by their snapshot's folder: by id, a repository without `refs/main` would not
be found, and one that is half downloaded would be handed out without a word.
"""

import functools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from sidecar.engine.checkpoint_files import (
    config_fault,
    names_fault,
    special_fault,
    weight_bytes,
    weights_fault,
)
from sidecar.engine.model_source import knows_architecture
from sidecar.residents.detection import Kind, kind_of

logger = logging.getLogger(__name__)

HUB = "hub"  # in MODEL_DIR: the hub's cache

Usable = Literal["unloaded", "unavailable", "incomplete", "broken"]


@dataclass(frozen=True, slots=True)
class Found:
    """
    A model on this machine.

    Args:
        aliases: other names that are its alone.
        size_bytes: of the weights that would be loaded.
        is_cached: whether it is in the hub's cache.
        context_len: most tokens it was made for; None: it does not say.
        state: `unloaded`: it can be loaded; else why not is in `reason`.
    """

    id: str
    aliases: tuple[str, ...]
    folder: Path
    kind: Kind
    size_bytes: int
    context_len: int | None = None
    is_cached: bool = False
    state: Usable = "unloaded"
    reason: str | None = None


def discover(places: Sequence[str]) -> tuple[Found, ...]:
    """
    All models in some places, each folder once, ids unique.

    Args:
        places: folders, and the word `hub`.
    """
    named: dict[Path, _Named] = {}
    for place in places:
        found = _in_hub() if place == HUB else _in_folder(Path(place))
        for one in found:
            named.setdefault(one.folder.resolve(), one)
    return tuple(
        _described(folder, one, names, _stamp(folder))
        for (folder, one), names in zip(
            named.items(), _settled(named.values()), strict=True
        )
    )


@dataclass(frozen=True, slots=True)
class _Named:
    """A model's folder, its short name, and the longer one that is surely its own."""

    folder: Path
    name: str
    qualified: str
    is_cached: bool = False


def _in_folder(root: Path) -> Iterator[_Named]:
    if _is_model(root):
        yield _Named(root, root.name, f"{root.parent.name}/{root.name}")
        return
    for folder in _folders(root):
        if _is_model(folder):
            yield _Named(folder, folder.name, f"{root.name}/{folder.name}")
            continue
        for child in _folders(folder):
            if _is_model(child):
                yield _Named(child, child.name, f"{folder.name}/{child.name}")


def _folders(root: Path) -> list[Path]:
    """Those that are not hidden; a loop of links is a folder that was seen before."""
    try:
        inside = sorted(entry for entry in root.iterdir() if entry.is_dir())
    except OSError as error:
        logger.warning("models folder %s cannot be read: %s", root, error.strerror)
        return []
    own = root.resolve()
    return [
        entry
        for entry in inside
        if not entry.name.startswith(".") and not own.is_relative_to(entry.resolve())
    ]


def _is_model(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file()
    except OSError:  # not ours to look into
        return False


def _in_hub() -> Iterator[_Named]:
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError) as error:
        logger.debug("no hub cache: %s", error)
        return
    for repository in sorted(repositories, key=lambda repo: repo.repo_id):
        revisions = [r for r in repository.revisions if _is_model(r.snapshot_path)]
        if repository.repo_type != "model" or not revisions:
            continue
        newest = max(revisions, key=lambda r: ("main" in r.refs, r.last_modified))
        name = repository.repo_id.rpartition("/")[2]
        yield _Named(newest.snapshot_path, name, repository.repo_id, True)


def _settled(named: Iterable[_Named]) -> list[tuple[str, tuple[str, ...]]]:
    """Id and aliases of each: a name that two of them have is neither's."""
    all_named = list(named)
    short = Counter(one.name for one in all_named)
    taken: Counter[str] = Counter()
    settled = []
    for one in all_named:
        is_own = short[one.name] == 1
        by_short = is_own and not one.is_cached
        chosen = one.name if by_short else one.qualified
        taken[chosen] += 1
        if taken[chosen] > 1:
            chosen = f"{chosen}@{taken[chosen]}"  # the same names in two places
        others = {one.qualified, one.name} if is_own else {one.qualified}
        settled.append((chosen, tuple(sorted(others - {chosen} - set(taken)))))
    return settled


_Stamp = tuple[tuple[str, int, int, int], ...]


def _stamp(folder: Path) -> _Stamp:
    """Changes with any file in the folder."""
    try:
        entries = sorted(folder.iterdir())
        found = [(e.name, e.stat() if e.exists() else e.lstat()) for e in entries]
    except OSError:
        return ()
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in found)


@functools.lru_cache(maxsize=4096)
def _described(
    folder: Path, named: _Named, names: tuple[str, tuple[str, ...]], stamp: _Stamp
) -> Found:
    """Read its files; not again while they stay as they are: it is asked often."""
    own_id, aliases = names
    blank = Found(own_id, aliases, folder, "llm", 0, is_cached=named.is_cached)
    try:
        # First: what is no file may keep its reader for ever.
        if fault := special_fault(folder):
            return replace(blank, state="broken", reason=fault)
        return _read(blank, named)
    except Exception as error:  # of whatever a stranger has put there
        logger.warning("model folder %s cannot be read", folder, exc_info=True)
        return replace(blank, state="broken", reason=f"it cannot be read: {error}")


def _read(found: Found, named: _Named) -> Found:
    folder = found.folder
    config = _config_of(folder)
    if config is None:
        return replace(found, state="broken", reason=_words(folder, "broken"))
    # The name it was found by tells what it is, not the folder a link leads to.
    kind = kind_of(named.folder, config)
    found = replace(found, kind=kind, size_bytes=_size(folder))
    return _judged(replace(found, context_len=context_len(config)), folder)


def _judged(found: Found, folder: Path) -> Found:
    """With what keeps it from being loaded, as far as its files show it."""
    files = [entry.name for entry in folder.iterdir() if entry.is_file()]
    is_text = found.kind in ("llm", "vlm", "ocr")
    if is_text and (fault := config_fault(folder, knows_architecture)):
        return replace(found, state="unavailable", reason=fault)
    if fault := names_fault(files) or weights_fault(folder):
        return replace(found, state="incomplete", reason=fault)
    return found


def _words(folder: Path, fallback: str) -> str:
    return config_fault(folder, lambda config: True) or fallback


def _config_of(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def context_len(config: dict[str, Any]) -> int | None:
    """Most tokens that a config.json says the model was made for."""
    for part in (config, config.get("text_config")):
        length = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(length, int) and length > 0:
            return length
    return None


def _size(folder: Path) -> int:
    try:
        return weight_bytes(folder) or _all_bytes(folder)
    except OSError:
        return 0


def _all_bytes(folder: Path) -> int:
    """Of weights by other names than mlx-lm's: encoders, audio."""
    return sum(os.stat(file).st_size for file in folder.glob("*.safetensors"))
