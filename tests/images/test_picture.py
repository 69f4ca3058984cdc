"""Decoding: the pixels that a viewer shows, and refusals before anything is decoded."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from sidecar.core.errors import BadRequest
from sidecar.images.picture import open_picture
from testkit.pictures import encoded, picture

MAX = 1_000_000
PLACE = "messages[0].content[1]"


def opened(data: bytes, detail: str = "high") -> Image.Image:
    return open_picture(data, "low" if detail == "low" else "high", MAX, PLACE)


def pixel(image: Image.Image, x: int, y: int) -> tuple[int, ...]:
    found = image.getpixel((x, y))
    assert isinstance(found, tuple)
    return found


def test_a_png_is_what_was_drawn() -> None:
    drawn = picture(1)
    assert np.array_equal(np.asarray(opened(encoded(drawn))), np.asarray(drawn))


def test_it_is_turned_as_its_camera_says() -> None:
    drawn = Image.new("RGB", (40, 20), "red")
    drawn.paste("blue", (0, 0, 10, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    turned = opened(encoded(drawn, "PNG", exif=exif))
    assert turned.size == (20, 40)
    assert pixel(turned, 10, 2) == (0, 0, 255)
    assert pixel(turned, 10, 35) == (255, 0, 0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_clear_is_white(mode: str) -> None:
    """Over black, dark text on a clear ground would vanish."""
    drawn = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    drawn.putpixel((3, 3), (0, 0, 0, 255))
    found = opened(encoded(drawn.convert(mode) if mode != "RGBA" else drawn))
    assert found.mode == "RGB"
    assert pixel(found, 0, 0) == (255, 255, 255)
    assert pixel(found, 3, 3) == (0, 0, 0)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    wide = np.full((8, 8), 0x8000, np.uint16)
    wide[0, 0] = 0xFFFF
    found = opened(encoded(Image.fromarray(wide)))
    assert pixel(found, 4, 4) == (128, 128, 128)
    assert pixel(found, 0, 0) == (255, 255, 255)


def test_cmyk_is_shown_in_its_colours() -> None:
    found = opened(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))
    red, green, blue = pixel(found, 8, 8)
    assert red > 200
    assert green < 60
    assert blue < 60


def test_of_what_moves_the_first_frame_is_shown() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixel(opened(data), 4, 4) == (255, 0, 0)


@pytest.mark.parametrize(("detail", "longest"), [("low", 512), ("high", 900)])
def test_the_longest_side_is_cut(detail: str, longest: int) -> None:
    assert opened(encoded(picture(1, 900, 90)), detail).size[0] == longest


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises what its few bytes do not hold."""

    def chunk(name: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", body)
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(1001, 1000), (30_000, 30_000), (100_000, 100_000)])
def test_too_many_pixels_are_refused_by_the_header(size: tuple[int, int]) -> None:
    with pytest.raises(BadRequest, match="pixels") as refused:
        opened(bomb(*size))
    assert refused.value.param == PLACE


@pytest.mark.parametrize(
    "data",
    [b"", b"no image", encoded(picture(1))[:700], encoded(picture(1), "JPEG")[:900],
     bomb(100, 100), b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%!PS-Adobe-3.0"],
    ids=["empty", "text", "half a PNG", "half a JPEG", "few rows", "SVG", "PostScript"],
)  # fmt: skip
def test_what_cannot_be_decoded_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="cannot be decoded") as refused:
        opened(data)
    assert refused.value.param == PLACE


@pytest.mark.parametrize("size", [(60_000, 1), (1, 4000), (201, 1)])
def test_ribbons_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(BadRequest, match="times the other"):
        opened(encoded(Image.new("L", size)))


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each of them is a pass over all its pixels: minutes, of a few megabytes."""
    scans = encoded(picture(1), "JPEG") + b"\xff\xda" * 300
    with pytest.raises(BadRequest, match="scans"):
        opened(scans)
    usual = opened(encoded(picture(1, 256, 256), "JPEG", progressive=True))
    assert usual.size == (256, 256)


def test_a_format_whose_tiles_may_be_larger_than_it_says_is_refused() -> None:
    with pytest.raises(BadRequest, match="cannot be decoded"):
        opened(encoded(picture(1), "TIFF"))


def test_far_too_many_pixels_are_reduced_before_anything_is_made_of_them() -> None:
    """To what reducing at once and fitting then gives, to a shade."""
    drawn = picture(1, 64, 48).resize((9000, 6750), Image.Resampling.NEAREST)
    found = open_picture(encoded(drawn), "high", 1 << 30, PLACE)
    assert found.size == (2048, 1536)
    fitted = drawn.resize((2048, 1536), Image.Resampling.BICUBIC)
    apart = np.abs(np.asarray(found, int) - np.asarray(fitted, int))
    assert apart.mean() < 3
