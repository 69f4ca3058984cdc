"""
A model's libraries reach no network and start no program while they load or compute.

Audio models name codecs, tokenizers and voices by hub ids and fetch them where they are
missing; text libraries install dictionaries by pip. Within `closed_network` a thread
opens no connection and starts no program, and what goes through huggingface_hub is
answered as if the machine were offline: what is in the hub's cache is found. Other
threads are not touched.
"""

import contextlib
import functools
import logging
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import huggingface_hub
from huggingface_hub.errors import OfflineModeIsEnabled

from sidecar.engine.loading.hub_faults import HubFault

logger = logging.getLogger(__name__)

_LEADS_OUT = frozenset(
    (
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "os.forkpty",
    )
)
_REPOSITORY = re.compile(
    r"/api/models/(?P<listed>[\w.-]+/[\w.-]+)|/(?P<file>[\w.-]+/[\w.-]+)/resolve/"
)
_NAMES_OF_FILES = ("ETag", "X-Linked-ETag", "X-Repo-Commit")
_NO_PATH = re.compile(r"[^/\\\x00-\x1f]{0,200}")


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.wanted: list[str] | None = None


_thread = _ThreadState()


class NotFetched(ConnectionError):
    """Something was not there and would have been fetched; the message names it."""


@contextlib.contextmanager
def closed_network() -> Iterator[None]:
    """
    Keep this thread from fetching anything.

    Raises:
        NotFetched: in place of whatever the library raises, if it tried to.
    """
    guard_libraries()
    wanted: list[str] = []
    before = _thread.wanted
    _thread.wanted = wanted
    try:
        yield
    except (Exception, SystemExit) as error:
        if not wanted or not _comes_of_it(error):
            raise
        what = next((name for name in wanted if "/" in name), wanted[0])
        raise NotFetched(
            f"it needs {what}, which is not in its folder, and nothing is fetched"
        ) from error
    finally:
        _thread.wanted = before


def _comes_of_it(error: BaseException) -> bool:
    """Whether what a library raises is what it made of a refusal."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, (NotFetched, OfflineModeIsEnabled)):
            return True
        found = found.__cause__ or found.__context__
    return False


@functools.cache
def guard_libraries() -> None:
    """
    For the whole process, once: have each answer of a hub looked at.

    Threads are kept from fetching only where they are shut in.
    """
    sys.addaudithook(_audit)
    huggingface_hub.set_client_factory(_client)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _LEADS_OUT and _thread.wanted is not None:
        what = "another program" if event[0] != "s" or "Popen" in event else "a server"
        _thread.wanted.append(what)
        raise NotFetched(f"{event} is not allowed here")


def _client() -> httpx.Client:
    """As huggingface_hub makes it, but for threads that are shut in."""
    from huggingface_hub.utils._http import default_client_factory

    client: httpx.Client = default_client_factory()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [_refuse, *hooks.get("request", [])],
        "response": [_refuse_paths, *hooks.get("response", [])],
    }
    return client


def _refuse_paths(response: httpx.Response) -> None:
    """
    What becomes the name of a file in the hub's cache must not lead out of it.

    huggingface_hub (1.33) takes these heads as they come.

    Raises:
        HubFault: it would.
    """
    for head in _NAMES_OF_FILES:
        name = response.headers.get(head, "").removeprefix("W/").strip('"')
        if name in (".", "..") or not _NO_PATH.fullmatch(name):
            raise HubFault(f"the hub names a file by what is none: {head}")


def _refuse(request: httpx.Request) -> None:
    if _thread.wanted is None:
        return
    found = _REPOSITORY.match(request.url.path)
    name = (found["listed"] or found["file"]) if found else "a server"
    _thread.wanted.append(name)
    raise OfflineModeIsEnabled(f"{request.url.path[:200]} is not fetched")
