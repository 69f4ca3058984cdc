"""Speech to text, a window of sound at once: each is one turn of the GPU thread."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from sidecar.core.errors import BadRequest
from sidecar.engine.audio.audio_model import AudioModel

_RATE = 16_000  # of nearly all models that hear


@dataclass(frozen=True, slots=True)
class HeardPart:
    """A part of what was said, with its place in its window in seconds."""

    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Heard:
    """
    What was said in a window.

    Args:
        parts: as the model cuts it; none if it does not.
        language: as the model calls it, "" if it does not say.
    """

    text: str
    parts: tuple[HeardPart, ...]
    language: str


class Hearing:
    """Writes down what is said. Any thread."""

    def __init__(self, model: AudioModel) -> None:
        self.model = model

    def rate(self) -> int:
        """Samples a second that the model hears."""
        return self.model.turn(_rate_of)

    def hear(
        self,
        samples: np.ndarray,
        language: str | None,
        prompt: str | None,
        temperature: float | None,
    ) -> Heard:
        """
        Write down one window; what a model has no use for is left out.

        Args:
            samples: (n,) float32 at `rate`; at most 30 seconds.
        Raises:
            BadRequest: the model does not know the language.
        """
        named: dict[str, Any] = {"language": language, "temperature": temperature}
        named |= dict.fromkeys(("initial_prompt", "context"), prompt)
        taken = self.model.parameters
        kwargs = {k: v for k, v in named.items() if v is not None and k in taken}

        def hear(model: Any) -> Heard:
            if "language" in kwargs:
                kwargs["language"] = _known_language(model, kwargs["language"])
            return _heard(model.generate(mx.array(samples), **kwargs))

        return self.model.turn(hear)


def _known_language(model: Any, language: str) -> str:
    """As the model's own table has it, if there is one."""
    module = sys.modules.get(type(model).__module__)
    codes = getattr(module, "LANGUAGES", None)
    names = getattr(module, "TO_LANGUAGE_CODE", {})
    if not isinstance(codes, Mapping) or not isinstance(names, Mapping):
        return language
    code = str(names.get(language.lower(), language.lower()))
    if code not in codes:
        raise BadRequest(
            f"language must be one that this model knows (en, de, ...), "
            f"got {language[:40]!r}",
            param="language",
        )
    return code


def _rate_of(model: Any) -> int:
    for owner in (model, getattr(model, "preprocessor_config", None)):
        rate = getattr(owner, "sample_rate", None)
        if isinstance(rate, int) and rate > 0:
            return rate
    return _RATE


def _heard(found: Any) -> Heard:
    """Of any of the library's results."""
    sentences = getattr(found, "sentences", None)
    listed: Iterable[Any] = sentences or getattr(found, "segments", None) or ()
    language = getattr(found, "language", None)
    return Heard(
        str(found.text),
        tuple(part for item in listed if (part := _part(item)) is not None),
        language if isinstance(language, str) else "",
    )


def _part(item: Any) -> HeardPart | None:
    """None: it does not say when, or nothing is said."""
    fields = item if isinstance(item, Mapping) else vars(item)
    start, end, text = (fields.get(name) for name in ("start", "end", "text"))
    numbers = [v for v in (start, end) if isinstance(v, (int, float, np.number))]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or not text:
        return None
    if not numbers[1] > numbers[0]:
        return None
    return HeardPart(float(numbers[0]), float(numbers[1]), str(text))
