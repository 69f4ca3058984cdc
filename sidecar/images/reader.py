"""
Images of a request -> what stands for them in a prompt, and their pixels when needed.

An agent sends the same screenshots with every turn. What a model is given for one is
known by the hash of its encoded bytes: an image of a past turn costs that hash, and
nothing is decoded until its KV has to be computed.
"""

import base64
import binascii
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from PIL.Image import Image as Picture

from sidecar.core.errors import (
    BadRequest,
    ImageFetchFailed,
    RequestCancelled,
    Unavailable,
)
from sidecar.core.prompt import Pixels, ProcessedImage, SeenImage
from sidecar.core.requests import Detail, Image, Message, Part
from sidecar.images.fetch import FetchLimits, ImageFetcher
from sidecar.images.percent import percent_decoded
from sidecar.images.picture import open_picture
from sidecar.images.seen import seen_image
from sidecar.infra.lru import Lru
from sidecar.infra.metrics import Counters

_NUM_THREADS = 2
_MAX_KNOWN = 65536
_KNOWN_BYTES = 64 << 20
_PIXEL_BYTES = 256 << 20
_DECODE_S = 60.0
_READ_S = 120.0  # all images of a request
_Key = tuple[
    str, bytes, Detail
]  # the API key first: nobody learns what another one sent
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """
    What is taken of a request's images.

    Args:
        max_bytes: of one, encoded. max_pixels: of one. max_images: in a request.
    """

    max_bytes: int
    max_pixels: int
    max_images: int
    fetch: FetchLimits


class ImageProcessor(Protocol):
    """A model's own way from pixels to its vision tower's input; any thread."""

    def process(self, picture: Picture) -> ProcessedImage:
        """An RGB image, as it is given to the tower."""


class ImageIntake:
    """What all models share: limits, fetching, two threads that decode."""

    def __init__(self, limits: ImageLimits) -> None:
        self.limits = limits
        self.fetcher = ImageFetcher(limits.fetch)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "images")

    def data_of(self, image: Image, salt: str, is_wanted: Callable[[], bool]) -> bytes:
        """
        An image's encoded bytes.

        Raises:
            BadRequest: the data URL is none, or too large. ImageFetchFailed: see fetch.
        """
        if image.source[:5].lower() == "data:":
            return _decoded(image, self.limits.max_bytes)
        return self.fetcher.fetch(image.source, salt, image.path, is_wanted)

    def run(self, task: Callable[[], T]) -> "Future[T]":
        """Have an image decoded."""
        return self._threads.submit(task)

    def close(self) -> None:
        """Decode nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _decoded(image: Image, max_bytes: int) -> bytes:
    head, comma, body = image.source.partition(",")
    if not comma or not head[5:].lower().startswith("image/"):
        raise BadRequest(
            f"{image.path}: a data URL must begin with data:image/", param=image.path
        )
    too_large = BadRequest(
        f"{image.path}: the image is larger than {max_bytes >> 20} MB",
        param=image.path,
    )
    if len(body) > 4 * max_bytes:  # each byte may be spelt with three characters
        raise too_large
    is_base64 = head.lower().endswith(";base64")
    try:
        is_plain = is_base64 and "%" not in body
        data = body.encode() if is_plain else percent_decoded(body)
        if is_base64:
            data = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(
            f"{image.path}: the image's base64 or percent-encoding is broken",
            param=image.path,
        ) from None
    if len(data) > max_bytes:
        raise too_large
    return data


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a decoded image came to."""

    digest: str
    size: tuple[int, int]
    processed: ProcessedImage


class ImageReader:
    """The images of one model's requests. Any thread."""

    def __init__(self, intake: ImageIntake, processor: ImageProcessor) -> None:
        self._intake = intake
        self._processor = processor
        self._known: Lru[_Key, SeenImage] = Lru(
            _MAX_KNOWN, _KNOWN_BYTES, lambda key, seen: seen.num_bytes
        )
        self._prepared_by_key: Lru[_Key, _Prepared] = Lru(
            _MAX_KNOWN,
            _PIXEL_BYTES,
            lambda key, prepared: prepared.processed.num_bytes,
        )
        self.counters = Counters(("images_seen", "images_decoded"))

    def forget(self) -> None:
        """Know no image any more."""
        self._known.clear()
        self._prepared_by_key.clear()
        self._intake.fetcher.forget()

    def read(
        self,
        messages: Sequence[Message],
        salt: str,
        is_wanted: Callable[[], bool],
    ) -> tuple[tuple[Message, ...], tuple[SeenImage, ...]]:
        """
        The messages with a mark for each image, and the images in order.

        Args:
            salt: what is known under another one is not known here.
        Raises:
            BadRequest: naming the image. RequestCancelled: the client is gone.
        """
        found = [image for message in messages for image in message.images]
        maximum = self._intake.limits.max_images
        if len(found) > maximum:
            path = found[maximum].path
            raise BadRequest(f"{path}: at most {maximum} images a request", param=path)
        deadline, seen = time.monotonic() + _READ_S, list[SeenImage]()
        for image in found:
            if time.monotonic() > deadline:
                path = image.path
                raise ImageFetchFailed(
                    f"{path}: the images of this request took more than {_READ_S:g} s",
                    param=path,
                )
            seen.append(self._see(image, salt, is_wanted))
        self.counters.add("images_seen", len(seen))
        following = iter(seen)

        def marked(part: Part) -> Part:
            if isinstance(part, Image):
                return part.marked(next(following).mark)
            return part

        marked_messages = tuple(
            replace(message, parts=tuple(map(marked, message.parts)))
            for message in messages
        )
        return marked_messages, tuple(seen)

    def _see(self, image: Image, salt: str, is_wanted: Callable[[], bool]) -> SeenImage:
        if not is_wanted():
            raise RequestCancelled("the client closed the connection")
        data = self._intake.data_of(image, salt, is_wanted)
        key = (salt, hashlib.sha256(data).digest(), image.detail)
        known = self._known.get(key)
        pixels = _LazyPixels(lambda: self._prepare(key, data, image), self._intake)
        if known is None:
            since = self._known.num_clears
            try:
                known = _named(pixels.prepared(), image)
            except BadRequest:  # what was fetched may have been half of it
                self._intake.fetcher.drop(image.source, salt)
                raise
            pixels.drop()  # for how long they are kept is the memo's to say
            self._known.put(key, known, since)
        return replace(known, pixels=pixels)

    def _prepare(self, key: _Key, data: bytes, image: Image) -> _Prepared:
        """Decode an image, unless what it came to is still here."""
        if (kept := self._prepared_by_key.get(key)) is not None:
            return kept
        since = self._prepared_by_key.num_clears
        maximum = self._intake.limits.max_pixels
        picture = open_picture(data, image.detail, maximum, image.path)
        named = f"{picture.mode} {picture.size}".encode()
        digest = hashlib.sha256(named + picture.tobytes()).hexdigest()
        try:
            processed = self._processor.process(picture)
        except Exception as error:  # a library's, of shapes it cannot take
            raise BadRequest(
                f"{image.path}: the model's processor does not take an image of "
                f"{picture.width}x{picture.height} pixels",
                param=image.path,
            ) from error
        prepared = _Prepared(digest, picture.size, processed)
        self.counters.add("images_decoded")
        self._prepared_by_key.put(key, prepared, since)
        return prepared


class _LazyPixels:
    """An image's pixels, decoded on a thread for that, when they are first needed."""

    def __init__(self, decode: Callable[[], _Prepared], intake: ImageIntake) -> None:
        self._decode = decode
        self._intake = intake
        self._lock = threading.Lock()
        self._coming: Future[_Prepared] | None = None

    def start(self) -> None:
        """Have them decoded, without waiting for it."""
        self._begun()

    def get(self) -> Pixels:
        """
        The arrays, once; what is not asked for again is not kept here.

        Raises:
            BadRequest: the image cannot be decoded.
        """
        prepared = self.prepared()
        self.drop()
        return prepared.processed.pixels

    def drop(self) -> None:
        """Hold them no more; they are decoded again if they are asked for."""
        with self._lock:
            self._coming = None

    def is_ready(self, timeout_s: float) -> bool:
        """Whether they are here, or have failed, within so many seconds."""
        done, _ = futures.wait([self._begun()], timeout_s)
        return bool(done)

    def wait(self) -> None:
        """Until they are decoded."""
        self.prepared()

    def prepared(self) -> _Prepared:
        """All that is found out about the image."""
        try:
            return self._begun().result(_DECODE_S)
        except futures.TimeoutError:
            raise Unavailable(
                "other images are being decoded", retry_after_s=5
            ) from None

    def _begun(self) -> "Future[_Prepared]":
        with self._lock:
            if self._coming is None:
                self._coming = self._intake.run(self._decode)
            return self._coming


def _named(prepared: _Prepared, image: Image) -> SeenImage:
    try:
        return seen_image(prepared.digest, prepared.size, prepared.processed)
    except ValueError as error:
        raise BadRequest(
            f"{image.path}: the image: {error}", param=image.path
        ) from None
