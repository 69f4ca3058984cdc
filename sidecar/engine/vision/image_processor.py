"""A model's own image processor: RGB pictures -> ids and arrays for its tower."""

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sidecar.core.prompt import ProcessedImage

if TYPE_CHECKING:  # of the extra `vision`
    from PIL.Image import Image as Picture

logger = logging.getLogger(__name__)

_PAD_NAMES = (
    "image_token_id",
    "image_token_index",
    "image_pad_token_id",
    "mm_image_token_id",
)
_MEDIA_NAMES = (
    "image_token",
    "video_token",
    "audio_token",
    "boi_token",
    "eoi_token",
    "vision_start_token",
    "vision_end_token",
)
_SAMPLE = (64, 64)
_PROBE = ("zqbefore", "zqbehind")


class LibraryProcessor:
    """mlx-vlm's processor of a model. Any thread; one image at a time."""

    def __init__(
        self, folder: Path, config: dict[str, Any], tokenizer: Any, *, trust: bool
    ) -> None:
        """
        Load it, and find what stands for images in prompts.

        Raises:
            ValueError: that cannot be found out.
        """
        from mlx_vlm.utils import load_processor, process_inputs

        self._lock = threading.Lock()
        self._run: Any = process_inputs
        self._processor: Any = load_processor(
            folder, add_detokenizer=False, trust_remote_code=trust
        )
        self._tokenizer = tokenizer
        self.pad = _pad_id(config)
        self._printed = self._printed_image()
        self._first_ids = tuple(tokenizer.encode("", add_special_tokens=True))
        self._sample = self.process(_blank())

    @property
    def media_tokens(self) -> frozenset[str]:
        """Texts that stand for images and other media in the model's prompts."""
        added = self._tokenizer.get_added_vocab()
        named = [getattr(self._processor, name, None) for name in _MEDIA_NAMES]
        given = frozenset(self._sample.ids)
        return frozenset(
            token
            for token, number in added.items()
            if number in given or token in named or token in self._printed
        )

    def process(self, picture: "Picture") -> ProcessedImage:
        """The ids that stand for an image, and arrays by the model's own names."""
        with self._lock:
            found = dict(self._run(self._processor, [self._printed], images=[picture]))
        ids = tuple(int(i) for i in np.array(found.pop("input_ids")).reshape(-1))
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            found.pop(name, None)
        if self._first_ids and ids[: len(self._first_ids)] == self._first_ids:
            ids = ids[len(self._first_ids) :]
        if self.pad not in ids:
            raise ValueError("the processor gives no place to an image")
        given = {name: value for name, value in found.items() if value is not None}
        arrays: dict[str, Any] = {}
        for name, value in given.items():
            array = np.array(value)
            if array.dtype.kind in "biuf":
                arrays[name] = array
            elif isinstance(value, str):  # a word for the model
                arrays[name] = value
        if "images" in arrays:  # what mlx-vlm's own models are given it as
            arrays["pixel_values"] = arrays.pop("images")
        if "pixel_values" not in arrays:
            raise ValueError("its processor gives no pixels")
        return ProcessedImage(ids, self.pad, arrays)

    def _printed_image(self) -> str:
        """What the chat template prints for an image, else the processor's token."""
        before, behind = _PROBE
        content = [
            {"type": "text", "text": before},
            {"type": "image"},
            {"type": "text", "text": behind},
        ]
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}], tokenize=False
                )
            )
            printed = text.partition(before)[2].partition(behind)[0].strip()
        except Exception as error:  # noqa: BLE001 - templates raise what they like
            logger.debug("the template was asked for an image: %s", error)
            printed = ""
        own = [getattr(self._processor, n, None) for n in ("boi_token", "image_token")]
        fitting = [token for token in own if isinstance(token, str)]
        if printed or fitting:
            return printed or fitting[0]
        raise ValueError("nothing is known to stand for an image in its prompts")


def _blank() -> "Picture":
    from PIL import Image

    return Image.new("RGB", _SAMPLE)


def _pad_id(config: dict[str, Any]) -> int:
    parts = [config.get(name) or {} for name in ("text_config", "vision_config")]
    for place in (config, *parts):
        for name in _PAD_NAMES:
            if isinstance(place.get(name), int):
                return int(place[name])
    raise ValueError("its config does not say which id stands for images")
