"""Checks a request's head: what two parsers may read differently is refused."""

import io
import re
import secrets
from email import errors
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException
from urllib.parse import urlsplit

from sidecar.core.errors import (
    BadRequest,
    HeadersTooLarge,
    MethodNotAllowed,
    SidecarError,
)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_HEAD_BYTES = 64 * 1024
_MAX_LINE_ENDS = 4 * 1024  # what lines have beside their names and values
# What decides who may come in, or where a body ends.
_ONLY_ONCE = (
    "host",
    "origin",
    "authorization",
    "x-api-key",
    "content-length",
    "transfer-encoding",
)
_BROKEN = (
    errors.MissingHeaderBodySeparatorDefect,
    errors.FirstHeaderLineIsContinuationDefect,
    errors.MisplacedEnvelopeHeaderDefect,
    errors.InvalidHeaderDefect,
)


class HeadReader:
    """
    The lines of one request's head; says no before more is kept than a head may have.

    The stdlib's parser reads a hundred lines of 64 KiB first. And it takes a bare CR
    for the end of a line, others do not: what stands behind it would be a header to
    one reader and a value to the next.

    Args:
        first: the request line, read already.
    """

    def __init__(self, stream: io.BufferedReader, first: bytes) -> None:
        self._stream = stream
        self._left = _MAX_HEAD_BYTES + _MAX_LINE_ENDS
        self.is_broken = _is_broken(first)

    def readline(self, limit: int) -> bytes:
        """Raises HTTPException, which the parser answers with 431."""
        line = self._stream.readline(limit)
        self._left -= len(line)
        if self._left < 0:
            raise HTTPException(f"headers must be at most {_MAX_HEAD_BYTES} bytes")
        self.is_broken = self.is_broken or _is_broken(line)
        return line


def _is_broken(line: bytes) -> bool:
    text = line.removesuffix(b"\n").removesuffix(b"\r")
    return b"\r" in text or b"\0" in text


def read_headers(parsed: Message) -> dict[str, str]:
    """
    The headers under their names in lower case.

    Raises:
        BadRequest: a line is no header, is folded, or repeats what may come once.
        HeadersTooLarge.
    """
    rest = parsed.get_payload()
    if (
        any(isinstance(defect, _BROKEN) for defect in parsed.defects)
        or parsed.get_unixfrom()
        or (isinstance(rest, str) and rest)
    ):
        raise BadRequest("a header line is not of the form `name: value`")
    headers: dict[str, str] = {}
    for name, value in parsed.items():
        key = name.lower()
        if key in headers and key in _ONLY_ONCE:
            raise BadRequest(f"the header {key} may be sent only once")
        if "\r" in value or "\n" in value:
            raise BadRequest(f"the header {key[:64]} must be on one line")
        headers[key] = value
    if sum(len(key) + len(value) for key, value in parsed.items()) > _MAX_HEAD_BYTES:
        raise HeadersTooLarge(f"headers must be at most {_MAX_HEAD_BYTES} bytes")
    return headers


def path_of(target: str) -> str:
    """The path of a request target, without a slash at its end; "?" if it has none."""
    try:
        return urlsplit(target).path.rstrip("/") or "/"
    except ValueError:  # a bracket in the host part that nothing closes
        return "?"


def parser_error(code: int, message: str | None) -> SidecarError:
    """A complaint of the stdlib's parser as an error of ours; it names no 5xx."""
    if code == HTTPStatus.NOT_IMPLEMENTED:
        return MethodNotAllowed(message or "no such method")
    if code in (
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        HTTPStatus.REQUEST_URI_TOO_LONG,
    ):
        return HeadersTooLarge(message or "the request head is too large")
    return BadRequest(message or HTTPStatus(code).phrase)


def request_id(given: str) -> str:
    """The id that a client gave its request, if it is a plain one, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
