"""
A model that sees: mlx-vlm's, with the face of a text model.

The tower runs once an image, on that image's own run of ids: what it gives for the run
is the same wherever the run stands, so a prompt's embeddings are put together from
texts and runs, chunk by chunk. Positions and their shift are always given to the model,
for it keeps those of the last request else.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models import cache as text_caches

from sidecar.core.prompt import Pixels, SeenImage
from sidecar.engine.vision.image_processor import LibraryProcessor
from sidecar.engine.vision.vision_inputs import VisionInputs
from sidecar.infra.lru import Lru
from sidecar.kv.kv_layers import KVLayers, atoms

TOKEN_TYPES = "mm_token_type_ids"  # 1 where an image stands
_AXES = 3  # time, height, width
_SHARED_CLASSES = ("KVCache", "RotatingKVCache", "CacheList")
# What a model may give for an image's run besides its embeddings, one row a token.
_KNOWN = frozenset(
    (
        "inputs_embeds",
        "deepstack_visual_embeds",
        "visual_pos_masks",
        "per_layer_inputs",
        "attention_mask_4d",
        "position_ids",
        "rope_deltas",
        "attention_mask",
    )
)


@dataclass(frozen=True, slots=True)
class Features:
    """
    What the model is given for a run of ids, one row for each.

    Args:
        embeds: (tokens, width). deep: for deeper layers, of the image's pads alone.
        pads: (tokens,), whether a token is a pad. layers: inputs for each layer.
    """

    embeds: mx.array
    deep: tuple[mx.array, ...] = ()
    pads: np.ndarray | None = None
    layers: mx.array | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        more = () if self.layers is None else (self.layers,)
        return sum(array.nbytes for array in (self.embeds, *self.deep, *more))

    def cut(self, start: int, end: int) -> "Features":
        """Those of tokens [start, end)."""
        deep: tuple[mx.array, ...] = ()
        pads = None
        if self.pads is not None:
            pads = self.pads[start:end]
            first = int(self.pads[:start].sum())
            deep = tuple(a[first : first + int(pads.sum())] for a in self.deep)
        layers = None if self.layers is None else self.layers[start:end]
        return Features(self.embeds[start:end], deep, pads, layers)


class SeeingModel(nn.Module):  # type: ignore[misc]
    """mlx-vlm's model as engines call one: ids and caches in, logits out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.whole = model
        self._has_axes = hasattr(model.language_model, "get_rope_index")

    @property
    def layers(self) -> Any:
        """Of the language model: one cache each."""
        return self.whole.language_model.layers

    def make_cache(self) -> KVLayers:
        """Empty caches, of mlx-lm's classes where those serve."""
        language = self.whole.language_model
        if hasattr(language, "make_cache"):
            return [_shared(layer) for layer in language.make_cache()]
        return [text_caches.KVCache() for _ in self.layers]

    def __call__(
        self,
        ids: mx.array,
        cache: Any = None,
        vision_inputs: VisionInputs | None = None,
    ) -> mx.array:
        """Logits of (rows, tokens) ids."""
        kwargs = dict(vision_inputs.embedded or {}) if vision_inputs else {}
        if self._has_axes:
            positions = vision_inputs.positions if vision_inputs else None
            if positions is None:
                positions = _counted(
                    ids, cache, vision_inputs.shifts if vision_inputs else None
                )
            kwargs["position_ids"] = positions
        found = self.whole.language_model(ids, cache=cache, **kwargs)
        logits: mx.array = found.logits
        return logits

    def text_features(self, ids: Sequence[int]) -> Features:
        """Of text, which needs no tower."""
        found = self.whole.get_input_embeddings(mx.array([ids]), None)
        return _features(found.to_dict(), None)

    def embedded(self, ids: Sequence[int], image: SeenImage) -> dict[str, Any]:
        """What mlx-vlm makes of ids that hold one image, by its own names."""
        assert image.pixels is not None
        arrays = to_arrays(image.pixels.get())
        pixels, row = arrays.pop("pixel_values"), mx.array([ids])
        found: Any = self.whole.get_input_embeddings(
            row, pixels, mask=mx.ones_like(row), **arrays
        )
        config: dict[str, Any] = found.to_dict()
        return config

    def image_features(self, image: SeenImage, pad: int) -> Features:
        """Of an image's whole run; the tower runs."""
        found = self.embedded(image.read_ids, image)
        features = _features(found, np.array(image.read_ids) == pad)
        if features.embeds.shape[0] != len(image.read_ids):
            raise ValueError("its embeddings are more or fewer than its ids")
        mx.eval(features.embeds, list(features.deep), features.layers)
        return features

    def positions(
        self, ids: Sequence[int], images: Sequence[SeenImage]
    ) -> tuple[np.ndarray | None, int]:
        """Positions of a whole prompt, (3, tokens), and how far its end is shifted."""
        if not self._has_axes:
            return None, 0
        get = self.whole.language_model.get_rope_index
        asked = inspect.signature(get).parameters
        kwargs = {
            name: mx.array(np.concatenate([image.grid[name] for image in images]))
            for name in images[0].grid
            if name in asked
        }
        found, shift = get(mx.array([ids]), **kwargs)
        positions = np.array(found)
        if positions.ndim == 2:
            positions = np.broadcast_to(positions[None], (_AXES, *positions.shape))
        return positions[:, 0], int(np.array(shift).reshape(-1)[0])


def _shared(layer: Any) -> Any:
    """A cache as mlx-lm's class of the same name, which the store can take apart."""
    name = type(layer).__name__
    if name not in _SHARED_CLASSES or type(layer).__module__.startswith("mlx_lm."):
        return layer
    if name == "CacheList":
        return text_caches.CacheList(*map(_shared, layer.caches))
    if name == "RotatingKVCache":
        return text_caches.RotatingKVCache(max_size=layer.max_size, keep=layer.keep)
    return text_caches.KVCache()


def _counted(ids: mx.array, cache: Any, shifts: mx.array | None) -> mx.array:
    """Positions behind what the caches hold, (3, rows, tokens)."""
    rows, length = ids.shape
    counts = [atom.offset for atom in atoms(cache or ()) if hasattr(atom, "offset")]
    held = counts[0] if counts else 0
    start = held.reshape(-1, 1) if isinstance(held, mx.array) else mx.array([[held]])
    if shifts is not None:
        start = start + shifts
    positions = start + mx.arange(length)[None]
    return mx.broadcast_to(positions[None], (_AXES, rows, length))


def _features(found: Mapping[str, Any], pads: np.ndarray | None) -> Features:
    strange = {name for name, value in found.items() if value is not None} - _KNOWN
    if strange:
        raise ValueError(f"its images need {', '.join(sorted(strange))}")
    deep = found.get("deepstack_visual_embeds")
    layers = found.get("per_layer_inputs")
    return Features(
        found["inputs_embeds"][0],
        tuple(deep) if deep is not None else (),
        pads,
        layers[0] if layers is not None else None,
    )


def to_arrays(pixels: Pixels) -> dict[str, Any]:
    """For the model; words that a processor has for it stay as they are."""
    return {n: a if isinstance(a, str) else mx.array(a) for n, a in pixels.items()}


class FeatureMemo:
    """What towers gave for images, so that a branch does not run them again."""

    def __init__(self, max_bytes: int) -> None:
        self._known: Lru[tuple[str, str], Features] = Lru(
            65536, max_bytes, lambda mark, features: features.num_bytes
        )
        self.num_runs = 0

    def get(
        self, model: SeeingModel, image: SeenImage, pad: int, salt: str
    ) -> Features:
        """An image's features; the tower runs if they are not here under a salt."""
        known = self._known.get((salt, image.mark))
        if known is None:
            self.num_runs += 1
            since = self._known.num_clears
            known = model.image_features(image, pad)
            self._known.put((salt, image.mark), known, since)
        return known

    def has(self, image: SeenImage, salt: str) -> bool:
        """Whether an image's features are here."""
        return self._known.get((salt, image.mark)) is not None

    def forget(self) -> None:
        """Keep nothing."""
        self._known.clear()


@dataclass(frozen=True)
class VisionEncoder:
    """
    What a loaded model sees with.

    Args:
        processor: gives images their ids and arrays. memo: of its tower.
        is_causal: False: the ids of an image read each other, which the library
            computes in one pass from a prompt's beginning to its last image only.
    """

    model: SeeingModel
    processor: LibraryProcessor
    memo: FeatureMemo
    is_causal: bool = True

    @property
    def pad(self) -> int:
        """The id that stands for images in what the model reads."""
        return self.processor.pad


def read_seeing(folder: Path) -> tuple[SeeingModel, dict[str, Any]]:
    """
    A model and its config by mlx-vlm; its weights are not computed yet.

    Raises:
        Exception: of any kind, if mlx-vlm does not take it.
    """
    from mlx_vlm.utils import load_config, load_model  # takes seconds, and is an extra

    return SeeingModel(load_model(folder, lazy=True)), load_config(folder)


def open_vision_encoder(
    model: SeeingModel,
    folder: Path,
    config: dict[str, Any],
    tokenizer: Any,
    memo: FeatureMemo,
    *,
    trust: bool,
) -> VisionEncoder:
    """
    What a model that was read sees with.

    Args:
        folder, config, tokenizer: the model's.
        trust: let the folder bring code of its own.
    Raises:
        ValueError: images of this architecture are not taken, with the reason.
    """
    processor = LibraryProcessor(folder, config, tokenizer, trust=trust)
    return VisionEncoder(model, processor, memo, _is_causal(model.whole))


def _is_causal(whole: Any) -> bool:
    """
    Whether ids of an image read only what stands before them.

    Raises:
        ValueError: they do not, and the library is not given where images are.
    """
    language = whole.language_model
    asked = {
        getattr(one, "use_bidirectional_attention", None)
        for one in (getattr(language, "config", None), getattr(whole, "config", None))
    } - {None, False}
    if not asked:
        return True
    inner = getattr(language, "model", None)
    parameters = inspect.signature(type(inner).__call__).parameters if inner else {}
    if asked != {"vision"} or TOKEN_TYPES not in parameters:
        raise ValueError("its attention within images is not causal")
    return False
