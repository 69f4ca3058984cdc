"""
Which models are on this machine: folders of them, and the hub's cache. Nothing loads.

A folder is searched two deep: each folder in it is a model, or a provider with models
in it (`provider/model`). The hub's cache is read without the network, and its models
are loaded by their snapshot's folder: by id, a repository without `refs/main` would not
be found, and one that is half downloaded would be handed out without a word.
"""

import functools
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from sidecar.engine.loading.checkpoint_files import (
    Stamp,
    access_fault,
    config_fault,
    context_len,
    named_weights_fault,
    names_fault,
    read_config,
    sizes_fault,
    special_fault,
    vector_len,
    weight_bytes,
    weights_fault,
)
from sidecar.engine.loading.checkpoint_files import stamp as files_stamp
from sidecar.engine.loading.model_source import knows_architecture
from sidecar.residents.detection import (
    AUDIO_KINDS,
    TEXT_KINDS,
    Kind,
    is_library_there,
    kind_of,
    missing_library,
)

logger = logging.getLogger(__name__)

HUB = "hub"  # in MODEL_DIR: the hub's cache

Usable = Literal["unloaded", "unavailable", "incomplete", "broken"]


@dataclass(frozen=True, slots=True)
class DiscoveredModel:
    """
    A model on this machine.

    Args:
        aliases: other names that are its alone.
        size_bytes: of the weights that would be loaded.
        is_cached: whether it is in the hub's cache.
        context_len: most tokens it was made for; None: it does not say.
        vector_len: numbers of an embedding; None: of another kind, or not told.
        takes_images: whether it sees, and what it takes for that is installed.
        state: `unloaded`: it can be loaded; else why not is in `reason`.
    """

    id: str
    aliases: tuple[str, ...]
    folder: Path
    kind: Kind
    size_bytes: int
    context_len: int | None = None
    vector_len: int | None = None
    takes_images: bool = False
    is_cached: bool = False
    state: Usable = "unloaded"
    reason: str | None = None


def discover(places: Sequence[str]) -> tuple[DiscoveredModel, ...]:
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
        _described(folder, one, *names, files_stamp(folder))
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


@functools.lru_cache(maxsize=4096)
def _described(
    folder: Path, named: _Named, own_id: str, aliases: tuple[str, ...], stamp: Stamp
) -> DiscoveredModel:
    """Read its files; not again while they stay as they are: it is asked often."""
    blank = DiscoveredModel(
        own_id, aliases, folder, "llm", 0, is_cached=named.is_cached
    )
    try:
        # First: what is no file may keep its reader for ever.
        if fault := access_fault(folder) or special_fault(folder):
            return replace(blank, state="broken", reason=fault)
        return _read(blank, named)
    except Exception as error:  # of whatever a stranger has put there
        logger.warning("model folder %s cannot be read", folder, exc_info=True)
        return replace(blank, state="broken", reason=f"it cannot be read: {error}")


def _read(found: DiscoveredModel, named: _Named) -> DiscoveredModel:
    folder = found.folder
    config = read_config(folder)
    if config is None:
        return replace(found, state="broken", reason=_words(folder, "broken"))
    # The name it was found by tells what it is, not the folder a link leads to.
    kind = kind_of(named.folder, config)
    size = _all_bytes(folder) if kind in AUDIO_KINDS else _size(folder)
    found = replace(found, kind=kind, size_bytes=size)
    found = replace(found, takes_images=_takes_images(kind))
    if fault := missing_library(kind, named.folder, config):
        return replace(found, state="unavailable", reason=fault)
    if fault := sizes_fault(folder):
        return replace(found, state="broken", reason=fault)
    width = vector_len(folder, config) if kind == "embedding" else None
    found = replace(found, context_len=context_len(config), vector_len=width)
    return _judged(found, folder)


@dataclass(frozen=True, slots=True)
class NamedFolder:
    """What the config of a folder says that is named, not found."""

    kind: Kind = "llm"
    takes_images: bool = False
    context_len: int | None = None


def described_folder(folder: Path | None) -> NamedFolder:
    """What it is; None: a model that is still to be fetched."""
    config = None if folder is None else read_config(folder)
    if folder is None or config is None:
        return NamedFolder()
    kind = kind_of(folder, config)
    return NamedFolder(kind, _takes_images(kind), context_len(config))


def _takes_images(kind: Kind) -> bool:
    """Such a kind has a vision tower; whether what runs one is installed."""
    return kind in ("vlm", "ocr") and is_library_there()


def _judged(found: DiscoveredModel, folder: Path) -> DiscoveredModel:
    """With what keeps it from being loaded, as far as its files show it."""
    if found.kind in AUDIO_KINDS:
        fault = named_weights_fault(folder)
        return replace(found, state="incomplete", reason=fault) if fault else found
    files = [entry.name for entry in folder.iterdir() if entry.is_file()]
    is_text = found.kind in TEXT_KINDS
    if is_text and (fault := config_fault(folder, knows_architecture)):
        return replace(found, state="unavailable", reason=fault)
    if fault := names_fault(files) or weights_fault(folder):
        return replace(found, state="incomplete", reason=fault)
    return found


def _words(folder: Path, fallback: str) -> str:
    return config_fault(folder, lambda config: True) or fallback


def _size(folder: Path) -> int:
    try:
        return weight_bytes(folder) or _all_bytes(folder)
    except OSError:
        return 0


def _all_bytes(folder: Path) -> int:
    """Of weights by other names than mlx-lm's: encoders; audio, with its codecs."""
    files = (*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors"))
    return sum(os.stat(file).st_size for file in files)
