"""Files and Batches of the OpenAI API: what a client may ask for."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs

from sidecar.core.batches import BatchOrder
from sidecar.core.errors import BadRequest, ValidationFailed

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses",
)  # fmt: skip
_FIELDS = {"input_file_id", "endpoint", "completion_window", "metadata"}
_MAX_HOURS = 720
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MAX_NAME = 255
_MAX_PAGE, _MAX_FILES = 100, 10_000


@dataclass(frozen=True, slots=True)
class Upload:
    """A file as it came."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """
    Which part of a list is asked for.

    Args:
        after: the id before it.
        is_ascending: the oldest first.
        purpose: of files; None: any.
    """

    after: str | None
    limit: int
    is_ascending: bool = False
    purpose: str | None = None


def parse_upload(
    fields: Mapping[str, str],
    files: Mapping[str, bytes],
    names: Mapping[str, str],
    repeated: Collection[str] = (),
) -> Upload:
    """
    A form with `purpose` and `file`.

    Raises:
        BadRequest: a part is missing, or asks for what is not done here.
    """
    if unknown := sorted(fields.keys() - {"purpose"} | files.keys() - {"file"}):
        name = unknown[0][:64]
        raise BadRequest(f"{name} is no field of an upload here", param=name)
    for name in repeated:
        raise BadRequest(f"{name[:64]} must be there once", param=name[:64])
    if fields.get("purpose") != "batch":
        raise BadRequest("purpose must be batch", param="purpose")
    if "file" not in files:
        raise BadRequest("file is missing", param="file")
    if not files["file"]:
        raise BadRequest("file must not be empty", param="file")
    return Upload((names.get("file") or "batch.jsonl")[:_MAX_NAME], files["file"])


def parse_order(body: Any) -> BatchOrder:
    """
    The body of a new batch.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object")
    if unknown := sorted(body.keys() - _FIELDS):
        name = unknown[0][:64]
        raise BadRequest(f"{name} is no field of a batch here", param=name)
    file_id, endpoint = body.get("input_file_id"), body.get("endpoint")
    if not isinstance(file_id, str) or not file_id:
        raise BadRequest(
            "input_file_id must be the id of a file", param="input_file_id"
        )
    if endpoint not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise BadRequest(f"endpoint must be one of {known}", param="endpoint")
    window, metadata = body.get("completion_window"), body.get("metadata")
    return BatchOrder(file_id, endpoint, _hours(window), _metadata(metadata))


def _hours(window: Any) -> int:
    digits = window[:-1] if isinstance(window, str) and window.endswith("h") else ""
    is_number = digits.isascii() and digits.isdigit() and digits[0] != "0"
    is_number = is_number and len(digits) <= 3
    if not is_number or not 1 <= int(digits) <= _MAX_HOURS:
        raise ValidationFailed(
            f"completion_window must be 1h..{_MAX_HOURS}h, such as 24h",
            param="completion_window",
        )
    return int(digits)


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > _MAX_PAIRS:
        raise BadRequest(
            f"metadata must be an object of at most {_MAX_PAIRS} texts",
            param="metadata",
        )
    for key, value in given.items():
        is_text = isinstance(value, str) and len(value) <= _MAX_VALUE
        if not is_text or not 0 < len(key) <= _MAX_KEY:
            raise BadRequest(
                f"metadata must have keys of 1..{_MAX_KEY} characters and texts of at "
                f"most {_MAX_VALUE}",
                param="metadata",
            )
    return dict(given)


def parse_page(query: str) -> Page:
    """
    `after` and `limit` of a query.

    Raises:
        ValidationFailed: limit is no number in range.
    """
    return _page(parse_qs(query), "20", _MAX_PAGE)


def parse_file_page(query: str) -> Page:
    """The same, and `order` and `purpose`."""
    given = parse_qs(query)
    order = given.get("order", ["desc"])[-1]
    if order not in ("asc", "desc"):
        raise ValidationFailed("order must be asc or desc", param="order")
    page = _page(given, str(_MAX_FILES), _MAX_FILES)
    purpose = given.get("purpose", [None])[-1]
    return replace(page, is_ascending=order == "asc", purpose=purpose)


def _page(given: Mapping[str, Sequence[str]], usual: str, most: int) -> Page:
    text = given.get("limit", [usual])[-1]
    is_number = text.isascii() and text.isdigit() and len(text) <= 6
    if not is_number or not 1 <= int(text) <= most:
        raise ValidationFailed(f"limit must be 1..{most}", param="limit")
    after = given.get("after")
    return Page(after[-1] if after else None, int(text))


def page_of(objects: Sequence[Mapping[str, Any]], page: Page) -> dict[str, Any]:
    """
    A part of a list, as the OpenAI API has it.

    Raises:
        BadRequest: nothing has the id that `after` names.
    """
    first = 0
    if page.after is not None:
        ids = [one["id"] for one in objects]
        if page.after not in ids:
            raise BadRequest("after must be the id of one of the list", param="after")
        first = ids.index(page.after) + 1
    part = objects[first : first + page.limit]
    return {
        "object": "list",
        "data": part,
        "first_id": part[0]["id"] if part else None,
        "last_id": part[-1]["id"] if part else None,
        "has_more": len(objects) > first + page.limit,
    }
