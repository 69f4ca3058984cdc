"""Small pictures for tests: noise, told apart by their seed."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int, width: int = 96, height: int = 64) -> Image.Image:
    """A picture of noise."""
    noise = np.random.default_rng(seed).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    return Image.fromarray(noise)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture as a file holds it."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    """A picture as clients send it."""
    data = base64.b64encode(encoded(image, kind)).decode()
    return f"data:image/{kind.lower()};base64,{data}"


def image_part(seed: int, **named: Any) -> dict[str, Any]:
    """A part of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(picture(seed))}, **named}
