"""
The sidecar over httpx: send a call, take it back.

One async client per event loop and one sync client, made at first use. They keep no
idle connections: on loopback a new one costs a fraction of a millisecond, and a
kept one may have died with a restarted sidecar, which a POST cannot be repeated for.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import httpx

from litellm_mlx import errors
from litellm_mlx.translate import SidecarCall

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 60.0
_CANCEL_TIMEOUT = httpx.Timeout(5.0)
_OPTIONS: dict[str, Any] = {
    # The sidecar admits or refuses; a second queue in here would only hide it.
    "limits": httpx.Limits(max_connections=None, max_keepalive_connections=0),
    "headers": {"Connection": "close", "Accept-Encoding": "identity"},
    "trust_env": False,  # a proxy from the environment must not see loopback traffic
}

_async_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
    WeakKeyDictionary()
)
_background: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly


async def send(call: SidecarCall, *, stream: bool) -> httpx.Response:
    """
    Send a call; with `stream` return as soon as the headers are there.

    Cancels the call at the sidecar when this task is cancelled or time runs out.

    Raises:
        A litellm exception for a refusal or a failed connection.
    """
    sending = asyncio.ensure_future(_send(call, stream=stream))
    try:
        response = await finished(sending)
    except httpx.HTTPError as exc:
        if not _is_unsent(exc):
            await release(None, call, cancel=True)
        raise errors.from_transport(exc, call.model, started=False) from exc
    except asyncio.CancelledError:
        # The answer may have come in the very moment; a cancelled send closes its own.
        came = sending.done() and not sending.cancelled() and not sending.exception()
        await release(sending.result() if came else None, call, cancel=True)
        raise
    if not response.is_success:
        raise errors.from_response(response, call.model)
    return response


async def finished(work: "asyncio.Task[T]") -> T:
    """
    Wait for a task that talks to the sidecar; cancels it, once, if cancelled itself.

    Nothing of httpcore may run in a task of LiteLLM's: when a client leaves, those are
    cancelled again and again, and a clean-up of httpcore's that is cut short leaves
    its socket open for good.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.cancel()
        raise


async def release(
    response: httpx.Response | None, call: SidecarCall, *, cancel: bool
) -> None:
    """Close the answer, cancel the call if asked; a cancelled task does not stop it."""
    await asyncio.shield(in_background(_release(response, call, cancel=cancel)))


def in_background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run it to its end on this loop, whoever waits for it."""
    task = asyncio.ensure_future(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task


def send_sync(call: SidecarCall, *, stream: bool) -> httpx.Response:
    """The same as `send` for callers without an event loop."""
    client = _sync_client()
    request = client.build_request("POST", call.url, **_request_parts(call))
    try:
        response = client.send(request, stream=stream)
        if not response.is_success:
            response.read()
    except httpx.HTTPError as exc:
        if not _is_unsent(exc):
            cancel_sync(call)
        raise errors.from_transport(exc, call.model, started=False) from exc
    except KeyboardInterrupt:
        cancel_sync(call)
        raise
    if not response.is_success:
        raise errors.from_response(response, call.model)
    return response


def cancel_sync(call: SidecarCall) -> None:
    """Tell the sidecar that nobody waits for this call any more; never raises."""
    try:
        _sync_client().post(
            call.cancel_url, headers=_auth(call), timeout=_CANCEL_TIMEOUT
        )
    except httpx.HTTPError as exc:
        logger.debug("cancel not delivered call_id=%s error=%r", call.call_id, exc)


async def _send(call: SidecarCall, *, stream: bool) -> httpx.Response:
    client = _async_client()
    request = client.build_request("POST", call.url, **_request_parts(call))
    response = await client.send(request, stream=stream)
    if not response.is_success:
        await response.aread()
    return response


async def _release(
    response: httpx.Response | None, call: SidecarCall, *, cancel: bool
) -> None:
    if response is not None:
        with contextlib.suppress(httpx.HTTPError):
            await response.aclose()
    if not cancel:
        return
    try:
        await _async_client().post(
            call.cancel_url, headers=_auth(call), timeout=_CANCEL_TIMEOUT
        )
    except httpx.HTTPError as exc:
        logger.debug("cancel not delivered call_id=%s error=%r", call.call_id, exc)


def _async_client() -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    client = _async_clients.get(loop)
    if client is None:
        client = httpx.AsyncClient(**_OPTIONS)
        _async_clients[loop] = client
    return client


@functools.cache
def _sync_client() -> httpx.Client:
    return httpx.Client(**_OPTIONS)


def _request_parts(call: SidecarCall) -> dict[str, Any]:
    timeout = httpx.Timeout(
        connect=_CONNECT_TIMEOUT_S,
        read=call.read_timeout_s,
        write=_WRITE_TIMEOUT_S,
        pool=None,
    )
    return {"headers": call.headers, "content": call.content, "timeout": timeout}


def _auth(call: SidecarCall) -> dict[str, str]:
    return {k: v for k, v in call.headers.items() if k.lower() == "authorization"}


def _is_unsent(error: httpx.HTTPError) -> bool:
    kinds = httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol
    return isinstance(error, kinds)
