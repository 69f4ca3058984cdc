"""
What a request's body may be before LiteLLM parses it.

LiteLLM has no limit: 60 MB of empty lists become 2 GB, and nobody else is served while
they are parsed, nor while the name of a model of 2 MB is looked through for secrets.
JSON that is no object, and on some routes what is no JSON at all, it answers with 500.
So the body is read here, counted as it comes, and handed on whole.
"""

import asyncio
import re
from dataclasses import dataclass
from email.message import Message
from email.utils import collapse_rfc2231_value

import orjson

from litellm_mlx.asgi import Receive
from litellm_mlx.body_types import is_ours, rules_for, wrong_field
from litellm_mlx.control_fields import NOT_FOR_CLIENTS
from litellm_mlx.head_fields import MODEL_NAME_LEN, is_model_name

# Long conversations have a hundred thousand. LiteLLM walks through all of them, several
# times; what the sidecar itself takes is more.
MAX_VALUES = 250_000
MAX_IDS = 1_000_000  # prompts of token ids are lists of numbers
_MAX_FORM_BYTES = 1 << 20  # a password, not a file
_FREE_BYTES = 1 << 20  # of each body: small ones are served beside large ones
_MIN_HELD_BYTES = 512 << 20
_MAX_PART_HEAD = 4096  # bytes behind its first line
# Their standard parser takes time that grows with a line's square.
_MAX_PARTS, _MAX_LINE, _MAX_TYPE = 256, 1024, 1024
_GAP_S, _BODY_S = 60.0, 600.0  # as the sidecar waits: between two pieces, and in all
_MARKS = b"[{,:"
_PART_HEAD = re.compile(rb"(?:\A|\n)(?i:content-disposition)[ \t]*:([^\r\n]*)")
# A form says how often to try again as text, which is not looked at.
_NOT_IN_FORMS = NOT_FOR_CLIENTS | {"num_retries", "max_retries"}
_TAKES_IDS = re.compile(r"(?:/.*)?/(completions|embeddings)")
_CHAT = re.compile(r"(?:/.*)?/chat/completions")
_HALVES = re.compile(  # each run of backslashes is looked at once
    rb"(?<!\\)(?P<slashes>\\++)u(?:(?P<high>[dD][89abAB][0-9a-fA-F]{2})"
    rb"(?P<low>\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[dD][c-fC-F][0-9a-fA-F]{2})"
)
_MAX_SIGNS = 500_000  # whole pairs, too; with more the body stays as it is
# Here LiteLLM takes what it cannot parse for a fault of its own.
_UNCHECKED = re.compile(
    r"(/v1)?/(moderations|rerank|audio/speech|images/generations)|/v2/rerank"
)


def is_written(method: str) -> bool:
    """Whether a request of this method has a body that LiteLLM reads."""
    return method in ("POST", "PUT", "PATCH", "DELETE")


class BadBody(Exception):
    """
    A body that LiteLLM shall not see.

    `status` is 400, 408, 413, or 503 for what may be sent again later; `param` is the
    field at fault, if one is.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Disconnected(Exception):
    """The client left before its body was whole."""


@dataclass(frozen=True, slots=True)
class ProxyBodyHead:
    """
    What is known of a body before it comes.

    Args:
        asks_a_model: LiteLLM makes arguments of it; else it is only counted.
    """

    method: str
    path: str
    content_type: str
    asks_a_model: bool = True

    @property
    def media_type(self) -> str:
        """Its type without parameters; of two headers neither is one."""
        return self.content_type.partition(";")[0].strip().lower()

    @property
    def is_multipart(self) -> bool:
        """Files: LiteLLM puts them on the disk, and limits their number."""
        return self.media_type == "multipart/form-data"

    @property
    def boundary(self) -> bytes:
        """What stands between the parts of a multipart form; empty: it is not said."""
        message = Message()
        message["content-type"] = self.content_type
        found = message.get_param("boundary", "")
        return found.encode("latin-1", "replace") if isinstance(found, str) else b""

    @property
    def is_form(self) -> bool:
        """Fields in one line."""
        return self.media_type == "application/x-www-form-urlencoded"

    @property
    def is_json(self) -> bool:
        """Whether LiteLLM parses it as JSON: all that is no form."""
        return not (self.is_form or self.is_multipart)

    @property
    def is_unchecked(self) -> bool:
        """Whether LiteLLM parses it without asking what it is."""
        return self.method == "POST" and bool(_UNCHECKED.fullmatch(self.path))

    @property
    def must_be_json(self) -> bool:
        """Whether no form is taken."""
        return self.is_unchecked or is_ours(self.path)

    @property
    def max_values(self) -> int:
        """How many values its JSON may hold."""
        is_ids = _TAKES_IDS.fullmatch(self.path) and not _CHAT.fullmatch(self.path)
        return MAX_IDS if is_ids else MAX_VALUES


class ProxyBodyBudget:
    """
    What all bodies together may take; belongs to one event loop.

    Args:
        limit_bytes: the largest body allowed; some of that size fit beside each other.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._max = max(4 * limit_bytes, _MIN_HELD_BYTES)
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """
        Take bytes, or give them back.

        Raises:
            BadBody: there are not so many.
        """
        if num_bytes > 0 and self.held_bytes + num_bytes > self._max:
            raise BadBody(503, "too many large bodies at once")
        self.held_bytes += num_bytes


class Body:
    """One body, from its first byte to the end of its answer."""

    def __init__(self, head: ProxyBodyHead, budget: ProxyBodyBudget) -> None:
        self._head, self._budget = head, budget
        self._values = ValueCounter()
        self._pieces: list[bytes] = []
        self._size = self._taken = 0

    async def read(self, receive: Receive) -> bytes:
        """
        All of it.

        Raises:
            BadBody: when the rest has come, too: who still sends hears no answer.
            Disconnected.
        """
        is_wrong = self._head.must_be_json and not self._head.is_json
        is_wrong = is_wrong or "," in self._head.media_type
        if is_wrong or len(self._head.content_type) > _MAX_TYPE:
            raise BadBody(400, "the content type must be application/json")
        try:
            async with asyncio.timeout(_BODY_S):
                whole = await self._read(receive)
        except TimeoutError:
            raise BadBody(408, "the body took too long to arrive") from None
        return self._checked(whole)

    async def _read(self, receive: Receive) -> bytes:
        refused: BadBody | None = None
        num_skipped, is_more = 0, True
        while is_more and num_skipped <= self._budget.limit_bytes:
            async with asyncio.timeout(_GAP_S):
                message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            piece, is_more = message.get("body", b""), message.get("more_body", False)
            if refused is not None:
                num_skipped += len(piece)
                continue
            try:
                self._add(piece)
            except BadBody as why:
                refused = why
                self._pieces.clear()
        if refused is not None:
            raise refused
        whole = b"".join(self._pieces)
        self._pieces.clear()
        return whole

    def close(self) -> None:
        """Give back what it took."""
        self._budget.take(-self._taken)
        self._taken = 0

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        maximum = _MAX_FORM_BYTES if self._head.is_form else self._budget.limit_bytes
        if self._size > maximum:
            raise BadBody(413, f"the body must be at most {maximum} bytes")
        wanted = max(0, self._size - _FREE_BYTES)
        self._budget.take(wanted - self._taken)
        self._taken = wanted
        max_values = self._head.max_values
        if self._head.is_json and self._values.add(piece) > max_values:
            raise BadBody(413, f"a body must hold at most {max_values} JSON values")
        self._pieces.append(piece)

    def _checked(self, whole: bytes) -> bytes:
        """The body as LiteLLM can read it."""
        is_empty = not (self._head.is_unchecked or whole.strip())
        if self._head.is_multipart:
            _check_form(whole, self._head.boundary)
        if is_empty or not self._head.is_json:
            return whole
        if not (self._head.asks_a_model or self._head.is_unchecked):
            return whole  # it was counted, and LiteLLM says what is wrong with it
        try:
            whole, value = _parsed(whole)
        except ValueError as error:
            raise BadBody(400, f"the body must be JSON: {error}") from None
        if not isinstance(value, dict):
            raise BadBody(400, "the body must be a JSON object")
        rules = rules_for(self._head.path, is_known=self._head.asks_a_model)
        wrong = wrong_field(value, rules)
        if wrong is not None:
            raise BadBody(400, wrong.message, wrong.param)
        return whole


def _parsed(whole: bytes) -> tuple[bytes, object]:
    """
    A body and what it says, U+FFFD for half a surrogate pair.

    JavaScript writes that escape for a text cut in the middle of a sign; it has no
    UTF-8, so that a conversation with one in it would be refused at each later turn.
    """
    try:
        return whole, orjson.loads(whole)
    except ValueError:
        mended = _HALVES.sub(_whole, whole, count=_MAX_SIGNS)
        return mended, orjson.loads(mended)


def _whole(found: re.Match[bytes]) -> bytes:
    is_escape = len(found["slashes"]) % 2 == 1
    if is_escape:
        return found[0] if found["low"] else found["slashes"] + b"ufffd"
    if found["low"]:  # behind an escaped backslash, which is text as what follows it
        return found["slashes"] + b"u" + found["high"] + b"\\ufffd"
    return found[0]


class ValueCounter:
    """
    Counts the values of a JSON text that comes in pieces, before it is parsed.

    Each value but the first stands behind an opening bracket, a comma or a colon that
    is no part of a string. Of a text that is not JSON the count says nothing, but that
    its parse will not make more values either.
    """

    def __init__(self) -> None:
        self._num_values = 1
        self._is_inside = False
        self._held = b""

    def add(self, piece: bytes) -> int:
        """The number so far; linear in the piece."""
        text = self._held + piece
        run = len(text) - len(text.rstrip(b"\\"))
        # Not between a backslash and what it escapes.
        end = len(text) - run % 2
        text, self._held = text[:end], text[end:]
        plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = plain.split(b'"')
        outside = b"".join(pieces[self._is_inside :: 2])
        self._num_values += sum(outside.count(bytes((mark,))) for mark in _MARKS)
        self._is_inside ^= len(pieces) % 2 == 0
        return self._num_values


def _check_form(form: bytes, boundary: bytes) -> None:
    """
    Let no multipart form name a field that is not for clients, or an odd model.

    Parts are named as the form's own parser reads it (python-multipart has the
    standard library's): in any case, with blanks, percent signs or in pieces.

    Raises:
        BadBody: saying which field, or that the parts are too many or too long.
    """
    for number, head in enumerate(_PART_HEAD.finditer(form)):
        if number >= _MAX_PARTS or len(head[1]) > _MAX_LINE:
            raise BadBody(
                400,
                f"a form must have at most {_MAX_PARTS} parts, each named in at most "
                f"{_MAX_LINE} bytes",
            )
        named = _named(head)
        for _, name in named:
            if name in _NOT_IN_FORMS:
                why = f"{name} must be left out: it is not for clients"
                raise BadBody(400, why, name)
        is_model = any(key.startswith("name") and n == "model" for key, n in named)
        if is_model and not _is_one_model(form, head.end(), boundary):
            why = f"model must be one name of at most {MODEL_NAME_LEN} characters"
            raise BadBody(400, why, "model")


def _is_one_model(form: bytes, end_of_head: int, boundary: bytes) -> bool:
    """Whether a part that names a model does so in one line."""
    begin = form.find(b"\r\n\r\n", end_of_head, end_of_head + _MAX_PART_HEAD)
    line = form[begin + 4 : begin + 4 + 4 * MODEL_NAME_LEN]
    name = line.partition(b"\r\n")[0]
    if begin < 0 or not is_model_name(name.decode("latin-1")):
        return False
    end = begin + 4 + len(name)
    closes = form[end : end + len(boundary) + 6]
    ends = (b"\r\n--" + boundary + b"\r\n", b"\r\n--" + boundary + b"--")
    return bool(boundary) and closes in ends


def _named(head: re.Match[bytes]) -> list[tuple[str, str]]:
    """What a part's head names, and as what: its field, its file."""
    message = Message()
    message["content-disposition"] = head[1].decode("latin-1")
    said = message.get_params(header="content-disposition") or []
    texts = ((key.lower(), collapse_rfc2231_value(value)) for key, value in said[1:])
    return [(key, text.strip().partition("[")[0]) for key, text in texts]
