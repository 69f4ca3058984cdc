"""
The images of one prompt while it is computed: towers, embeddings, positions.

A chunk may end anywhere, within an image too. What is embedded is put together from
texts and from images' runs, each of which was embedded by itself.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from sidecar.core.prompt import ModelPrompt, PlacedImage, behind_images
from sidecar.engine.vision.vision_encoder import (
    TOKEN_TYPES,
    Features,
    VisionEncoder,
)
from sidecar.engine.vision.vision_inputs import VisionInputs

_PATIENCE_S = 0.005  # of the GPU thread with an image that is being decoded


class PromptImages:
    """The images of one prompt while it is computed. GPU thread only."""

    def __init__(self, vision_encoder: VisionEncoder, prompt: ModelPrompt) -> None:
        self._vision_encoder = vision_encoder
        self._ids = prompt.read_ids
        self._images = prompt.images
        self._salt = prompt.salt
        self._features: dict[int, Features] = {}
        images = [placed.image for placed in prompt.images]
        due = sum(image.read_ids.count(vision_encoder.pad) for image in images)
        if self._ids.count(vision_encoder.pad) != due:
            raise ValueError("the prompt has pads that are no image's")
        # In one pass up to there, where what an image is reads itself.
        self.whole_until = 0 if vision_encoder.is_causal else behind_images(prompt.ids)
        self._positions, self.shift = vision_encoder.model.positions(self._ids, images)

    def unseen(self, start: int, end: int) -> PlacedImage | None:
        """The first image in [start, end) without features; the next is decoded."""
        due = [
            placed
            for placed in self._images
            if placed.end > start and placed.start not in self._features
        ]
        for placed in due[:2]:
            if placed.image.pixels is not None:
                placed.image.pixels.start()
        return due[0] if due and due[0].start < end else None

    def encode(self, placed: PlacedImage) -> bool:
        """
        Have an image's features; the tower may run.

        Returns:
            False if its pixels are still being decoded: streams are not to wait.
        """
        vision_encoder, pixels = self._vision_encoder, placed.image.pixels
        is_known = pixels is None or vision_encoder.memo.has(placed.image, self._salt)
        if pixels is not None and not is_known and not pixels.is_ready(_PATIENCE_S):
            return False
        found = vision_encoder.memo.get(
            vision_encoder.model, placed.image, vision_encoder.pad, self._salt
        )
        self._features[placed.start] = found
        return True

    def vision_inputs(self, start: int, end: int) -> VisionInputs:
        """What the model is given besides the ids in [start, end)."""
        runs = list(self._runs(start, end))
        embedded = _joined(runs)
        for placed in self._images:
            if placed.end <= end:  # all of it is KV now
                self._features.pop(placed.start, None)
        if start < self.whole_until:
            pads = np.array([self._ids[start:end]]) == self._vision_encoder.pad
            embedded[TOKEN_TYPES] = mx.array(pads.astype(np.int32))
        positions = self._positions
        if positions is None:
            return VisionInputs(embedded)
        return VisionInputs(embedded, mx.array(positions[:, None, start:end]))

    def _runs(self, start: int, end: int) -> "Sequence[Features]":
        runs: list[Features] = []
        at = start
        for placed in self._images:
            if placed.end <= at or placed.start >= end:
                continue
            if placed.start > at:
                runs.append(self._text(at, placed.start))
                at = placed.start
            last = min(placed.end, end)
            features = self._features[placed.start]
            runs.append(features.cut(at - placed.start, last - placed.start))
            at = last
        if at < end:
            runs.append(self._text(at, end))
        return runs

    def _text(self, start: int, end: int) -> Features:
        return self._vision_encoder.model.text_features(self._ids[start:end])


def _joined(runs: Sequence[Features]) -> dict[str, Any]:
    """Keywords of the language model for runs behind each other."""
    kwargs: dict[str, Any] = {
        "inputs_embeds": mx.concatenate([run.embeds for run in runs])[None]
    }
    if any(run.layers is not None for run in runs):
        layers = [run.layers for run in runs if run.layers is not None]
        kwargs["per_layer_inputs"] = mx.concatenate(layers)[None]
    deep = [run.deep for run in runs if run.deep]
    if deep:
        pads = [
            np.zeros(run.embeds.shape[0], bool) if run.pads is None else run.pads
            for run in runs
        ]
        kwargs["visual_pos_masks"] = mx.array(np.concatenate(pads))[None]
        kwargs["deepstack_visual_embeds"] = [
            mx.concatenate(list(level)) for level in zip(*deep, strict=True)
        ]
    return kwargs
