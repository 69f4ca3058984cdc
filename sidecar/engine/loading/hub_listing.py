"""
Which models a hub has: an organisation's, siblings, and names like another.

Each question has a deadline, whatever the hub does, and each answer that is none is a
HubFault: huggingface_hub (1.33) waits for a list without end, and takes it as it comes.
"""

import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import OfflineModeIsEnabled

from sidecar.engine.loading.closed_network import guard_libraries
from sidecar.engine.loading.hub_faults import HubFault, reason

T = TypeVar("T")

_BITS = re.compile(r"-(?:\d{1,2}bit|bf16|fp16|mxfp[48]|nvfp4)(?:-.*)?$", re.IGNORECASE)
_MAX_LISTED = 1000
_NUM_CLOSE = 3
_TIMEOUT_S = 10.0
_DEADLINE_S = 30.0


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
    return _in_time(lambda: _listed(count, author=author, filter="mlx"))


def described(repo_id: str, weights: str, max_bytes: int) -> HubModel | None:
    """
    A model with its config.json fetched.

    Args:
        weights: the pattern of its weights' names. max_bytes: of these.
    Returns:
        None where it has no weights, or more.
    Raises:
        HubFault: the hub does not give it.
    """

    def describe() -> HubModel | None:
        info = HfApi().model_info(repo_id, files_metadata=True, timeout=_TIMEOUT_S)
        files = info.siblings or ()
        size = sum(f.size or 0 for f in files if fnmatch(f.rfilename, weights))
        if not 0 < size <= max_bytes:
            return None
        file = hf_hub_download(repo_id, "config.json", etag_timeout=_TIMEOUT_S)
        return HubModel(repo_id, size, Path(file).parent)

    return _in_time(describe)


def sibling(repo_id: str, bits: int) -> str:
    """
    The repository of the same model in so many bits.

    Raises:
        HubFault: there is none, or the hub cannot be reached.
    """
    author, _, name = repo_id.partition("/")
    base = _BITS.sub("", name)
    listed = _in_time(lambda: _listed(_MAX_LISTED, author=author, search=base))
    found = sorted({*listed})
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
        found = _in_time(lambda: _listed(_MAX_LISTED, author=author))
        found += _in_time(lambda: _listed(_MAX_LISTED, search=begun))
    except HubFault:
        return ""
    names = get_close_matches(repo_id, dict.fromkeys(found), _NUM_CLOSE)
    return f"; names like it: {', '.join(names)}" if names else ""


def _listed(count: int, **asked: str) -> list[str]:
    """Ids, the most downloaded first; those that a terminal can show."""
    found = HfApi().list_models(sort="downloads", limit=count, **asked)
    return [m.id for m in islice(found, count) if m.id.isprintable()]


def _in_time(ask: Callable[[], T]) -> T:
    """
    What a hub answers.

    Raises:
        HubFault: it does not, or too late, or with what is no answer.
    """
    guard_libraries()
    answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except Exception as error:  # noqa: BLE001 - raised below
            answers.put(error)

    # A daemon: nobody waits for a line that hangs, and Ctrl-C ends it.
    threading.Thread(target=run, name="hub", daemon=True).start()
    try:
        answer = answers.get(timeout=_DEADLINE_S)
    except queue.Empty:
        raise HubFault(f"the hub did not answer within {_DEADLINE_S:g} s") from None
    if isinstance(answer, Exception):
        raise _fault(answer) from answer
    return answer


def _fault(error: Exception) -> HubFault:
    if isinstance(error, HubFault):
        return error
    if isinstance(error, OfflineModeIsEnabled):
        return HubFault("HF_HUB_OFFLINE is set: the hub is not asked what it has")
    if isinstance(error, (TypeError, KeyError, AttributeError, RecursionError)):
        return HubFault("the hub answers with what is no list of models")
    return HubFault(f"the hub cannot be reached ({reason(error)})")
