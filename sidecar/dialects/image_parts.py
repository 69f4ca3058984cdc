"""Images in the three wire formats, and content that no model here takes."""

from typing import NoReturn

from sidecar.core.errors import BadRequest, UnsupportedContent
from sidecar.core.requests import Detail, Image, Part, Role
from sidecar.dialects.fields import Fields

_FILES = ("file", "input_file")
OPENAI_KINDS = ("image_url", "input_image", *_FILES)
_VIDEO = ("video_url", "input_video", "video")
_AUDIO = ("input_audio", "audio", "audio_url")
_KIND_LEN = 64  # characters in which a data URL says what it is
_OTHER_DATA = tuple(
    f"data:{kind}/" for kind in ("application", "audio", "font", "text", "video")
)
_SCHEMES = ("http://", "https://", "data:")


def openai_image(part: Fields) -> Image:
    """
    `image_url: {url, detail}` or `image_url: "..."`, of a chat or a Responses part.

    Or a file, which no model here reads.

    Raises:
        BadRequest: naming the field.
    """
    if part.text("type") in _FILES:
        return _openai_file(part)
    value = part.raw("image_url")
    named = Fields(value, part.path("image_url")) if isinstance(value, dict) else None
    if named is None:
        url, where = part.text("image_url"), part.path("image_url")
        detail = part.text("detail")
    else:
        url, where = named.text("url"), named.path("url")
        detail = named.text("detail") or part.text("detail")
    if url is None:
        raise BadRequest(f"{where} must be a URL or a data URL", param=where)
    return _image(url, where, part.where, detail)


def _openai_file(part: Fields) -> Image:
    """A `file` of a chat or `input_file` of Responses."""
    inner = part
    if isinstance(part.raw("file"), dict):
        inner = Fields(part.raw("file"), part.path("file"))
    return unread_file(inner.text("file_data") or "", part.where)


def unread_file(source: str, path: str) -> Image:
    """A file by its place; of a data URL, what kind of file it is."""
    return Image(source[:_KIND_LEN], path=path, is_file=True)


def anthropic_image(block: Fields) -> Image:
    """
    An `image` block, its source `base64` or `url`.

    Raises:
        BadRequest: naming the field.
    """
    source = Fields(block.raw("source"), block.path("source"))
    kind = source.text("type")
    if kind == "base64":
        media = source.required_text("media_type")
        data = source.required_text("data")
        return _image(f"data:{media};base64,{data}", block.where, block.where, None)
    if kind == "url":
        where = source.path("url")
        return _image(source.required_text("url"), where, block.where, None)
    raise BadRequest(
        f"{source.path('type')} must be base64 or url, got {str(kind)[:40]!r}",
        param=source.path("type"),
    )


def refuse(part: Fields, kind: str) -> NoReturn:
    """
    Refuse a part of a kind that is no text and no image.

    Raises:
        UnsupportedContent: naming the part.
    """
    what = "not supported here"
    if kind in _VIDEO:
        what = "video is not supported; send frames as images"
    elif kind in _AUDIO:
        what = "audio is not supported in chats"
    raise UnsupportedContent(
        f"{part.path('type')} is {kind[:40]!r}: {what}", param=part.path("type")
    )


def require_text(parts: tuple[Part, ...], role: Role) -> None:
    """
    Images stand in what users say and in what tools return.

    Raises:
        UnsupportedContent: one stands elsewhere.
    """
    image = next((part for part in parts if isinstance(part, Image)), None)
    if image is not None and role not in ("user", "tool"):
        raise UnsupportedContent(
            f"{image.path} is an image in a message of role {role}: images are "
            "taken in user and tool messages",
            param=image.path,
        )


def _image(url: str, where: str, path: str, detail: str | None) -> Image:
    if not url[:8].lower().startswith(_SCHEMES):
        raise BadRequest(f"{where} must be an http, https or data URL", param=where)
    if url[:_KIND_LEN].lower().startswith(_OTHER_DATA):
        return unread_file(url, path)
    looked: Detail = "low" if detail == "low" else "high"
    return Image(url, looked, path)
