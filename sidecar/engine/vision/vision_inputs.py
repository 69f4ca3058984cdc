"""What a model that sees is given besides the ids of its prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class VisionInputs:
    """
    What a forward call is given besides ids.

    Args:
        embedded: keywords of the language model: embeddings of the chunk and more.
        positions: (3, rows, tokens); None: counted from the caches.
        shifts: (rows, 1), how far a row's positions are from its number of tokens.
    """

    embedded: Mapping[str, Any] | None = None
    positions: mx.array | None = None
    shifts: mx.array | None = None
