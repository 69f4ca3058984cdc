"""Which models a hub has: an organisation's, siblings, and names like another."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

import httpx
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import OfflineModeIsEnabled

from sidecar.engine.loading.hub_faults import HubFault, reason

# What huggingface_hub raises where a hub does not answer, or not with a list.
UNREACHABLE = (OfflineModeIsEnabled, httpx.HTTPError, ValueError, OSError)
_BITS = re.compile(r"-(?:\d{1,2}bit|bf16|fp16|mxfp[48]|nvfp4)(?:-.*)?$", re.IGNORECASE)
_MAX_LISTED = 1000
_NUM_CLOSE = 3
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class HubModel:
    """
    A repository of the hub.

    Args:
        folder: has its config.json, and whatever else is in the hub's cache.
    """

    repo_id: str
    weight_bytes: int
    folder: Path


def most_downloaded(author: str, count: int) -> list[str]:
    """
    Ids of an organisation's models for MLX, the most downloaded first.

    Raises:
        HubFault: the hub cannot be reached.
    """
    try:
        found = HfApi().list_models(
            author=author, filter="mlx", sort="downloads", limit=count
        )
        return [model.id for model in islice(found, count)]
    except UNREACHABLE as error:
        raise _unreachable(error) from error


def described(repo_id: str, weights: str, max_bytes: int) -> HubModel | None:
    """
    A model with its config.json fetched.

    Args:
        weights: the pattern of its weights' names. max_bytes: of these.
    Returns:
        None where it has no weights, or more, or the hub does not give it.
    """
    try:
        info = HfApi().model_info(repo_id, files_metadata=True, timeout=_TIMEOUT_S)
        files = info.siblings or ()
        size = sum(f.size or 0 for f in files if fnmatch(f.rfilename, weights))
        if not 0 < size <= max_bytes:
            return None
        file = hf_hub_download(repo_id, "config.json", etag_timeout=_TIMEOUT_S)
    except UNREACHABLE:
        return None
    return HubModel(repo_id, size, Path(file).parent)


def sibling(repo_id: str, bits: int) -> str:
    """
    The repository of the same model in so many bits.

    Raises:
        HubFault: there is none, or the hub cannot be reached.
    """
    author, _, name = repo_id.partition("/")
    base = _BITS.sub("", name)
    try:
        found = sorted({*_named(author, base)})
    except UNREACHABLE as error:
        raise _unreachable(error) from error
    wanted = f"{author}/{base}-{bits}bit"
    for each in found:
        if each.lower() == wanted.lower():
            return each
    others = [each for each in found if _BITS.sub("", each.partition("/")[2]) == base]
    there = f"; there are {', '.join(others)}" if others else ""
    raise HubFault(f"the hub has no {wanted}{there}")


def close_names(repo_id: str) -> str:
    """Ids that are written much like one, for the end of a message; "": none known."""
    author, _, name = repo_id.partition("/")
    begun = name.partition("-")[0]
    try:
        # The hub finds words as they are written: its own organisation's all are seen.
        found = [*_named(author, None), *_named(None, begun)]
    except UNREACHABLE:
        return ""
    names = get_close_matches(repo_id, dict.fromkeys(found), _NUM_CLOSE)
    return f"; names like it: {', '.join(names)}" if names else ""


def _named(author: str | None, words: str | None) -> Iterator[str]:
    """Ids with these words in them, the most downloaded first."""
    found = HfApi().list_models(
        author=author, search=words, sort="downloads", limit=_MAX_LISTED
    )
    ids = (model.id for model in islice(found, _MAX_LISTED))
    return (name for name in ids if name.isprintable())  # it is shown in a terminal


def _unreachable(error: Exception) -> HubFault:
    if isinstance(error, OfflineModeIsEnabled):
        return HubFault("HF_HUB_OFFLINE is set: the hub is not asked what it has")
    return HubFault(f"the hub cannot be reached ({reason(error)})")
