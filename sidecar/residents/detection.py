"""
What kind of model a checkpoint is, from its files alone: nothing is loaded.

Read are config.json, modules.json (sentence-transformers) and the names of the weights'
tensors. That a library has an architecture of some name says nothing: mlx-vlm lists
llama, qwen3 and bert, and text-only conversions of vision models keep their
`vision_config`; it is the tensors that tell. A new kind is a row of `_ROWS`, and an
engine.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sidecar.engine.checkpoint_files import tensor_names

Kind = Literal["llm", "vlm", "ocr", "embedding", "reranker", "stt", "tts"]

_ENCODER_TYPES = frozenset(("bert", "xlm-roberta", "modernbert"))
_ENCODERS = ("BertModel", "XLMRobertaModel", "ModernBertModel")
_OCR_TYPES = ("deepseekocr", "dots_ocr", "glm_ocr")
_VISION_PARTS = frozenset((
    "visual", "vision_tower", "vision_model", "vision_encoder", "embed_vision",
    "multi_modal_projector",
))  # fmt: skip
# Where mlx-audio is not there to say it: what it is most often asked to load.
_STT_TYPES = ("whisper", "moonshine", "parakeet", "wav2vec2")
_TTS_TYPES = ("kokoro", "csm", "vits")


@dataclass(frozen=True)
class Evidence:
    """
    What a checkpoint's files say.

    Args:
        folder: where it is; its name may tell what it was tuned for.
    """

    folder: Path
    config: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        """The architecture's short name, in lower case."""
        return str(self.config.get("model_type", "")).lower()

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the classes it was saved from."""
        listed = self.config.get("architectures")
        return tuple(map(str, listed)) if isinstance(listed, list) else ()

    @property
    def writes_text(self) -> bool:
        """Whether it was saved as a model that continues a text."""
        return any(name.endswith("ForCausalLM") for name in self.architectures)

    def is_named(self, word: str) -> bool:
        """Whether the folder's name, or its provider's, has a word in it."""
        return word in self.folder.name.lower() or word in _hub_name(self.folder)


def kind_of(folder: Path, config: Mapping[str, Any]) -> Kind:
    """
    What a checkpoint is: the first row that fits; else it writes text.

    Args:
        config: its config.json.
    """
    evidence = Evidence(folder, config)
    return next((kind for kind, fits in _ROWS if fits(evidence)), "llm")


def sees(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether it has a vision tower: its config tells of one, its weights hold it."""
    if not isinstance(config.get("vision_config"), Mapping):
        return False
    names = tensor_names(folder)
    return any(not _VISION_PARTS.isdisjoint(name.split(".")) for name in names)


def _hub_name(folder: Path) -> str:
    """The repository's name, where the folder is a snapshot of the hub's cache."""
    repository = folder.parent.parent.name
    return repository.lower() if repository.startswith("models--") else ""


def _is_reranker(found: Evidence) -> bool:
    if any(name.endswith("ForSequenceClassification") for name in found.architectures):
        return True
    return found.writes_text and found.is_named("rerank")


def _is_embedding(found: Evidence) -> bool:
    names = found.architectures
    if any(n.endswith(_ENCODERS) or n.endswith("TextEmbedding") for n in names):
        return True
    if found.model_type in _ENCODER_TYPES or _has_pooling(found.folder):
        return True
    return found.writes_text and found.is_named("embed")


def _has_pooling(folder: Path) -> bool:
    """sentence-transformers: a list of stages, of which one pools."""
    try:
        stages = json.loads((folder / "modules.json").read_bytes())
        return any("Pooling" in str(stage["type"]) for stage in stages)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _audio(kind: str, types: tuple[str, ...]) -> Callable[[Evidence], bool]:
    def fits(found: Evidence) -> bool:
        if importlib.util.find_spec("mlx_audio") is None:
            return found.model_type in types
        from mlx_audio.registry import classify_model  # imports no MLX

        said: object = classify_model(found.model_type, found.folder)
        return said == kind

    return fits


def _is_vlm(found: Evidence) -> bool:
    return sees(found.folder, found.config)


def _is_ocr(found: Evidence) -> bool:
    return found.model_type.startswith(_OCR_TYPES) and _is_vlm(found)


_ROWS: tuple[tuple[Kind, Callable[[Evidence], bool]], ...] = (
    ("reranker", _is_reranker),
    ("embedding", _is_embedding),
    ("stt", _audio("stt", _STT_TYPES)),
    ("tts", _audio("tts", _TTS_TYPES)),
    ("ocr", _is_ocr),
    ("vlm", _is_vlm),
)
