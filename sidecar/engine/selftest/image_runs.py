"""The self-test of a vision encoder, on pictures of noise."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from sidecar.core.prompt import ModelIds, ModelPrompt, Pixels, PlacedImage, SeenImage
from sidecar.engine.loading.loaded_model import LoadedModel
from sidecar.engine.selftest.array_distance import (
    Difference,
    logits_distance,
    rounding_of,
)
from sidecar.engine.selftest.rows import Steps
from sidecar.engine.vision.prompt_images import PromptImages
from sidecar.engine.vision.vision_encoder import TOKEN_TYPES, VisionEncoder
from sidecar.images.seen import seen_image
from sidecar.kv import kv_layers

_SAMPLE = (96, 128)  # height, width


class ImageRuns:
    """
    The test of images: what is put together of runs is what the library computes.

    Chunks end within the image. Another image of equal size must not look the same.
    """

    def __init__(
        self, model: LoadedModel, vision_encoder: VisionEncoder, ids: ModelIds
    ) -> None:
        self._model = model
        self._vision_encoder = vision_encoder
        self._ids = ids

    def run(self, measured_noise: Callable[[], Steps[float]]) -> Steps[Difference]:
        """Compare; it yields after each computation, a look at an image being one."""
        one, other = (
            self._prompt(sample_image(self._vision_encoder, seed)) for seed in (1, 2)
        )
        expected = yield from as_library(self._vision_encoder, one)
        found = yield from self._computed(one)
        differs = yield from self._computed(other)
        noise = yield from measured_noise()
        rounding = rounding_of(expected)
        computed = logits_distance([expected], [found])
        difference = Difference(0.0, computed, rounding, noise)
        if logits_distance([found], [differs]) <= difference.limit:
            raise ValueError("another image looks the same")
        return difference

    def _prompt(self, image: SeenImage) -> ModelPrompt:
        ids = ModelIds((*self._ids[:24], *image.ids, *self._ids[24:64]))
        return ModelPrompt(ids, images=(PlacedImage(24, image),))

    def _computed(self, prompt: ModelPrompt) -> Steps[mx.array]:
        """The last logits, in chunks as the engine does."""
        prompt_images = PromptImages(self._vision_encoder, prompt)
        (placed,) = prompt.images
        prompt_images.encode(placed)
        yield
        cache, ids, start = self._model.new_cache(), prompt.read_ids, 0
        middle = (placed.start + placed.end) // 2
        ends = (placed.start - 5, middle, placed.end + 3, len(ids))
        for end in (e for e in ends if e >= prompt_images.whole_until):
            vision_inputs = prompt_images.vision_inputs(start, end)
            logits = self._model.forward(
                mx.array([ids[start:end]]), cache, vision_inputs
            )
            mx.eval(logits)
            kv_layers.evaluate(cache)
            start = end
            yield
        return logits[:, -1]


class _ReadyPixels:
    """Pixels that are there already."""

    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels

    def start(self) -> None:
        """Nothing is to be decoded."""

    def wait(self) -> None:
        """Nothing is to be decoded."""

    def is_ready(self, timeout_s: float) -> bool:
        """Always."""
        return True

    def get(self) -> Pixels:
        """The arrays."""
        return self._pixels


def sample_image(
    vision_encoder: VisionEncoder, seed: int, size: tuple[int, int] = _SAMPLE
) -> SeenImage:
    """A picture of noise, to try a vision encoder on."""
    from PIL import Image

    chance = np.random.default_rng(seed)
    noise = chance.integers(0, 256, (*size, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    processed = vision_encoder.processor.process(picture)
    digest = hashlib.sha256(picture.tobytes()).hexdigest()
    image = seen_image(digest, picture.size, processed)
    return replace(image, pixels=_ReadyPixels(processed.pixels))


def as_library(vision_encoder: VisionEncoder, prompt: ModelPrompt) -> Steps[mx.array]:
    """
    The last logits of a prompt with one image, all of it by mlx-vlm's own way.

    It yields behind the look, and behind the rest.
    """
    model = vision_encoder.model
    (placed,) = prompt.images
    found = model.embedded(prompt.read_ids, placed.image)
    kwargs = {name: value for name, value in found.items() if value is not None}
    mx.eval([array for _, array in tree_flatten(kwargs) if isinstance(array, mx.array)])
    yield
    if not vision_encoder.is_causal:
        kwargs[TOKEN_TYPES] = mx.array(
            [[int(i == vision_encoder.pad) for i in prompt.read_ids]]
        )
    ids = mx.array([prompt.read_ids])
    output = model.whole.language_model(ids, cache=model.make_cache(), **kwargs)
    logits: mx.array = output.logits[:, -1]
    mx.eval(logits)
    yield
    return logits
