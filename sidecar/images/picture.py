"""Encoded images -> the pixels that a viewer shows, within limits set beforehand."""

import io

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Detail

# No TIFF: its tiles may be larger than the picture that its header tells of.
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
_LONGEST_SIDE: dict[Detail, int] = {"low": 512, "high": 2048}
_MAX_ASPECT = 200
_MAX_SCANS = 200  # of a progressive JPEG; each is a pass over all of it
_BEGINS_SCAN = b"\xff\xda"
_WHITE = (255, 255, 255, 255)


def open_picture(
    data: bytes, detail: Detail, max_pixels: int, path: str
) -> Pillow.Image:
    """
    Decode an image: its first frame, turned as its EXIF says, RGB, over white.

    Args:
        max_pixels: refused above, by its header alone.
        path: the request's field, for messages.
    Raises:
        BadRequest: it is no image, is cut off, or is too large.
    """
    try:
        with Pillow.open(io.BytesIO(data), formats=_FORMATS) as found:
            _require_sane(found, data, max_pixels, path)
            longest = _LONGEST_SIDE[detail]
            found.draft("RGB", (2 * longest, 2 * longest))
            found.load()
            small = _reduced(found, 2 * longest)
            picture = _rgb(ImageOps.exif_transpose(small) or small)
    except Pillow.DecompressionBombError:
        raise BadRequest(
            f"{path}: the image has more than {max_pixels} pixels", param=path
        ) from None
    except BadRequest:
        raise
    except Exception as error:  # decoders raise what they like on broken data
        kinds = ", ".join(_FORMATS)
        raise BadRequest(
            f"{path}: the image cannot be decoded; taken are {kinds}", param=path
        ) from error
    return _fitted(picture, longest) if max(picture.size) > longest else picture


def _require_sane(found: Pillow.Image, data: bytes, max_pixels: int, path: str) -> None:
    """Refuse by header and size what would take memory or minutes to decode."""
    width, height = found.size
    if width * height > max_pixels:
        raise BadRequest(
            f"{path}: the image has {width}x{height} pixels; at most {max_pixels} "
            "are taken",
            param=path,
        )
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise BadRequest(
            f"{path}: the image has {width}x{height} pixels; one side may be at most "
            f"{_MAX_ASPECT} times the other",
            param=path,
        )
    if found.format == "JPEG" and data.count(_BEGINS_SCAN) > _MAX_SCANS:
        raise BadRequest(
            f"{path}: the image has more than {_MAX_SCANS} scans", param=path
        )


def _reduced(picture: Pillow.Image, longest: int) -> Pillow.Image:
    """Far fewer pixels before anything is made of them, if there are far too many."""
    if picture.mode in ("1", "P", "PA") or picture.mode.startswith("I;"):  # no means
        return picture
    factor = max(picture.size) // longest
    if factor < 2:
        return picture
    return picture.reduce((min(factor, picture.width), min(factor, picture.height)))


def _fitted(picture: Pillow.Image, longest: int) -> Pillow.Image:
    scale = longest / max(picture.size)
    size = [max(1, round(side * scale)) for side in picture.size]
    return picture.resize((size[0], size[1]), Pillow.Resampling.BICUBIC)


def _rgb(picture: Pillow.Image) -> Pillow.Image:
    if picture.mode.startswith("I"):  # 16 bits a pixel; Pillow would clip, not scale
        wide = np.asarray(picture)
        picture = Pillow.fromarray((wide >> 8).clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        clear = picture.convert("RGBA")
        # Over white: dark text on a clear ground would vanish over black.
        ground = Pillow.new("RGBA", clear.size, _WHITE)
        ground.alpha_composite(clear)
        picture = ground
    return picture.convert("RGB")
