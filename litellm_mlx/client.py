"""
The sidecar over httpx: sends a call, reads its answer, cancels it.

No connection is kept for another call: on loopback a new one costs a fraction of a
millisecond, and a kept one may have died with a restarted sidecar, which a POST cannot
be repeated for. An async call even has a pool of its own: when its client leaves, it is
cancelled, and a cancel that meets httpcore's clean-up leaves the connection open in its
pool, with nobody who could still close it but the pool itself.
"""

import asyncio
import functools
import logging
import ssl
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

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

_background: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly


class Exchange:
    """One call and its answer, on an event loop; whoever opens it releases it."""

    def __init__(self, call: SidecarCall) -> None:
        self._call = call
        self._http = _async_client()
        self._sending: asyncio.Task[httpx.Response] | None = None

    async def open(self, *, stream: bool) -> httpx.Response:
        """
        Send the call; with `stream` return as soon as the headers are there.

        What it raises is released; if this task is cancelled, the call is too.

        Raises:
            A litellm exception for a refusal or a failed connection.
        """
        call = self._call
        self._sending = asyncio.ensure_future(self._send(stream=stream))
        try:
            response = await finished(self._sending)
        except httpx.HTTPError as exc:
            await self.release(cancel=not _is_unsent(exc))
            raise errors.from_transport(exc, call.model, started=False) from exc
        except asyncio.CancelledError:
            await self.release(cancel=True)
            raise
        if not response.is_success:
            await self.release(cancel=False)
            raise errors.from_response(response, call.model)
        return response

    async def release(self, *, cancel: bool) -> None:
        """Close it all, cancel the call if asked; a cancelled task does not stop it."""
        await asyncio.shield(in_background(self._release(cancel=cancel)))

    async def _send(self, *, stream: bool) -> httpx.Response:
        call = self._call
        request = self._http.build_request("POST", call.url, **_request_parts(call))
        response = await self._http.send(request, stream=stream)
        if not response.is_success:
            await response.aread()
        return response

    async def _release(self, *, cancel: bool) -> None:
        if self._sending is not None:  # else what it just opens would stay
            await asyncio.wait((self._sending,), timeout=_CONNECT_TIMEOUT_S)
        await self._http.aclose()
        if cancel:
            await _cancel(self._call.cancel_url, _auth(self._call))


async def send(call: SidecarCall) -> httpx.Response:
    """
    Send a call and read the whole answer; cancelling this task cancels the call.

    Raises:
        A litellm exception for a refusal or a failed connection.
    """
    exchange = Exchange(call)
    response = await exchange.open(stream=False)
    await exchange.release(cancel=False)
    return response


async def finished(work: "asyncio.Task[T]") -> T:
    """
    Wait for a task that talks to the sidecar; cancels it, once, if cancelled itself.

    In a task of LiteLLM's httpcore would never come to an end: when a client leaves,
    those are cancelled again and again.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.cancel()
        raise


def cancel_soon(url: str, headers: Mapping[str, str]) -> None:
    """Tell the sidecar on this loop that nobody waits for a call any more."""
    in_background(_cancel(url, headers))


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


async def _cancel(url: str, headers: Mapping[str, str]) -> None:
    try:
        async with _async_client() as http:
            await http.post(url, headers=headers, timeout=_CANCEL_TIMEOUT)
    except httpx.HTTPError as exc:
        logger.debug("cancel not delivered url=%s error=%r", url, exc)


def _async_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(**_OPTIONS, verify=_tls())


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)  # 10 ms, too long for each call


@functools.cache
def _sync_client() -> httpx.Client:
    return httpx.Client(**_OPTIONS, verify=_tls())


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
