"""A running server as the tools see it: JSON out, JSON or a stream back."""

import argparse
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]

_TIMEOUT_S, _LOOK_S = 900.0, 60.0


class ServerError(Exception):
    """It did not answer, or it refused; the message is for people."""


class NotAnswering(ServerError):
    """Nobody is there."""


@dataclass(frozen=True, slots=True)
class Reply:
    """
    One answer. Lengths are the server's own counts.

    Args:
        message: the assistant message as the client keeps it, without its thinking.
        ttft_s: seconds to the first piece of the answer, or to its end.
        pinned: kinds of volatile values that the server pinned in the prompt.
    """

    message: Json
    prompt_len: int
    cached_len: int
    completion_len: int
    ttft_s: float
    pinned: tuple[str, ...] = ()


class Server:
    """
    Asks one server. One thread.

    Args:
        url: its root, with or without /v1. key: sent as bearer token, if any.
    Raises:
        ServerError: no request can carry the key.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"User-Agent": "mlx-sidecar-tools"}
        if key:
            if not (key.isascii() and key.isprintable()):
                raise ServerError("the key has characters that no request can carry")
            self._headers["Authorization"] = f"Bearer {key}"
        # A proxy of the environment must not see loopback traffic, and whom a server
        # points to must not see the key.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), _NoRedirects
        )

    def get(self, path: str) -> Any:
        """
        The JSON of a path.

        Raises:
            ServerError: with the server's own reason.
        """
        return self._json(path, None)

    def chat(self, body: Json) -> Reply:
        """
        Stream one chat completion.

        Raises:
            ServerError: refused, or broken off.
        """
        started = time.perf_counter()
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._open("/v1/chat/completions", asked) as response:
            pinned = response.headers.get("x-mlx-pinned") or ""
            reply = _read_stream(_events(response), started)
        return replace(reply, pinned=tuple(filter(None, pinned.split(","))))

    def post(self, path: str, body: Json) -> Any:
        """
        The JSON that a change is answered with.

        Raises:
            ServerError: with the server's own reason.
        """
        return self._json(path, body)

    def steps(self, path: str) -> Iterator[Json]:
        """
        The events of something that is begun by a POST without a body.

        Raises:
            ServerError: refused, or broken off.
        """
        with self._open(path, {}) as response:
            yield from _events(response)

    def _json(self, path: str, body: Json | None) -> Any:
        # A change, such as a load, may take its time; a look may not.
        limit_s = _LOOK_S if body is None else _TIMEOUT_S
        with self._open(path, body, limit_s) as response:
            try:
                return json.loads(_whole(response, limit_s))
            except ValueError:
                raise _not_ours(self.url) from None
            except (OSError, HTTPException) as error:
                raise ServerError(f"{path}: the answer broke off: {error}") from None

    def _open(self, path: str, body: Json | None, limit_s: float = _TIMEOUT_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            return self._opener.open(request, timeout=limit_s)
        except urllib.error.HTTPError as error:
            with error:
                if "html" in error.headers.get("Content-Type", ""):
                    raise _not_ours(self.url) from None
                raise ServerError(f"{path}: {_reason(error)}") from None
        except (OSError, HTTPException) as error:
            why = getattr(error, "reason", error)
            raise NotAnswering(f"{self.url} does not answer: {why}") from None


def _whole(response: Any, limit_s: float) -> bytes:
    """A body, read to its end by a deadline: one that trickles has none."""
    deadline, data = time.monotonic() + limit_s, b""
    while piece := response.read1(1 << 16):
        data += piece
        if time.monotonic() > deadline:
            raise TimeoutError(f"no end within {limit_s:g} s")
    if response.length:
        raise IncompleteRead(data, response.length)
    return data


def _not_ours(url: str) -> ServerError:
    text = f"what answers at {url} is no sidecar: name yours by --url or MLX_PORT"
    return ServerError(text)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: it is told."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


def server_of(options: argparse.Namespace) -> Server:
    """
    The server that the flags of `add_server_flags` name.

    The environment's key is for the environment's own server, and goes to no other.

    Raises:
        ServerError: no request can carry the key.
    """
    environ = os.environ  # noqa: TID251 - what the server reads, a tool reads too
    key = options.key
    if key is None and options.url == _own_url(environ):
        names = options.key_names
        key = next((environ[name] for name in names if environ.get(name)), None)
    return Server(options.url, key)


def settings_file() -> Path:
    """The `.env` of the folder that the launcher names, else of the one at hand."""
    named = os.environ.get("LITELLM_MLX_FOLDER", "")  # noqa: TID251 - as the launcher
    return Path(named).expanduser() / ".env"


def add_server_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """
    `--url` and `--key`; without them the environment says where and with what.

    Args:
        names: settings that may hold the key, the first one that is set counts.
    """
    own = _own_url(os.environ)  # noqa: TID251 - where it listens, it is asked
    parser.add_argument("--url", type=_url, default=own, help="server (%(default)s)")
    text = f"{' or '.join(names)}, if the server has one (from the environment)"
    parser.add_argument("--key", help=text)
    parser.set_defaults(key_names=names)


def _own_url(environ: Mapping[str, str]) -> str:
    """Where a server of this environment listens."""
    host = (environ.get("MLX_HOST") or "127.0.0.1").strip("[]")
    if host in ("0.0.0.0", "::"):  # all of them: this machine's own is one
        host = "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{environ.get('MLX_PORT') or 8080}"


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of a flag that takes a whole number, `least` or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be {minimum} or more, got {text!r}")
        return int(text)

    return parse


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"{text!r} is no http:// address")
    return text


def _reason(error: urllib.error.HTTPError) -> str:
    text = error.read(2000).decode(errors="replace")
    try:
        return f"{error.code} {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {text[:200]}"


def _events(response: Any) -> Iterator[Json]:
    try:
        for line in response:  # by b"\n": other line ends may stand in the JSON
            data = line.strip().removeprefix(b"data: ")
            if data.startswith(b"{"):
                yield json.loads(data)
    except (OSError, HTTPException, ValueError) as error:
        raise ServerError(f"the answer broke off: {error}") from None


def _read_stream(events: Iterator[Json], started: float) -> Reply:
    text: list[str] = []
    calls: dict[int, Json] = {}
    usage: Json = {}
    first = None
    for event in events:
        if "error" in event:
            raise ServerError(str(event["error"].get("message")))
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if first is None and any(delta.get(name) for name in _PIECES):
                first = time.perf_counter()
            text.append(delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                _add_call(calls, call)
    if not usage:
        raise ServerError("the answer broke off: it has no usage")
    ttft_s = (first or time.perf_counter()) - started
    return _reply("".join(text), list(calls.values()), usage, ttft_s)


_PIECES = ("content", "reasoning_content", "tool_calls")


def _add_call(calls: dict[int, Json], delta: Mapping[str, Any]) -> None:
    call = calls.setdefault(
        delta["index"],
        {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
    )
    given = delta.get("function") or {}
    call["id"] = delta.get("id") or call["id"]
    call["function"]["name"] += given.get("name") or ""
    call["function"]["arguments"] += given.get("arguments") or ""


def _reply(text: str, calls: list[Json], usage: Json, ttft_s: float) -> Reply:
    message: Json = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        message,
        usage["prompt_tokens"],
        details.get("cached_tokens") or 0,
        usage["completion_tokens"],
        ttft_s,
    )
