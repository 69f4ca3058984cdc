"""
An image in a prompt: a mark in its text, a hash in the key of its KV.

What a model reads for images differs by nothing but their number of pads. In the key of
the KV each of an image's ids, those around the pads too, is replaced by 29 bits of the
image's hash, above any vocabulary: so a match with another image ends where it begins.
The first id of an image says that it is one (core/prompt.FIRST).
"""

import hashlib
import hmac
from array import array
from collections.abc import Sequence

from sidecar.core.lasting_secret import secret_for
from sidecar.core.prompt import FIRST, MADE, ProcessedImage, SeenImage
from sidecar.core.requests import IMAGE_MARK

_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_MIN_IDS = 3  # 87 bits: fewer could be the same for two images by many tries


def seen_image(
    digest: str, size: tuple[int, int], processed: ProcessedImage
) -> SeenImage:
    """
    An image as prompts hold it; its pixels come from elsewhere.

    Args:
        digest: SHA-256 of its pixels, in hex. size: width and height.
    Raises:
        ValueError: so few ids stand for it that others might have the same.
    """
    if len(processed.ids) < _MIN_IDS:
        raise ValueError("it is too small")
    # What stands on a web page cannot hold a mark.
    secret = secret_for("image")
    keyed = hmac.new(secret, digest.encode(), hashlib.sha256).hexdigest()
    return SeenImage(
        mark=IMAGE_MARK + keyed[:32].translate(_LETTERS),
        digest=digest,
        size=size,
        ids=tuple(_made_ids(digest, size, len(processed.ids))),
        read_ids=processed.ids,
        grid=processed.grid,
        pixels=None,
    )


def _made_ids(digest: str, size: tuple[int, int], count: int) -> Sequence[int]:
    seed = f"image {digest} {size} {count}".encode()
    words = array("I", hashlib.shake_256(seed).digest(4 * count))
    made = [MADE | (word & (FIRST - 1)) for word in words]
    return [made[0] | FIRST, *made[1:]]
