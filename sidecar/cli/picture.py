"""Pictures that the probe shows: noise, each from a number."""

import base64
import random
import struct
import zlib

from sidecar.cli.server import Json

_WIDTH, _HEIGHT = 320, 240
_CELL = 16  # pixels of a side that have one colour


def picture_part(name: str) -> Json:
    """A part of a message: a PNG that no other name gives."""
    url = "data:image/png;base64," + base64.b64encode(_png(name)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def _png(name: str) -> bytes:
    colours = random.Random(name)
    rows = []
    for _ in range(_HEIGHT // _CELL):
        cells = (colours.randbytes(3) * _CELL for _ in range(_WIDTH // _CELL))
        rows += [b"\0" + b"".join(cells)] * _CELL
    header = struct.pack(">IIBBBBB", _WIDTH, _HEIGHT, 8, 2, 0, 0, 0)
    body = zlib.compress(b"".join(rows))
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + checksum
