"""
Detects a model folder's kind (text, vision, encoder, audio) from its files alone.

Read are config.json, modules.json (sentence-transformers) and the names of the weights'
tensors. That a library has an architecture of some name says nothing: mlx-vlm lists
llama, qwen3 and bert, and text-only conversions of vision models keep their
`vision_config`; it is the tensors that tell. A new kind is a row of `ROWS`, and an
engine.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar.engine.loading.checkpoint_files import tensor_names

Kind = str  # of a row: llm, vlm, ocr, embedding, reranker, classifier, stt, tts
AUDIO_KINDS = ("stt", "tts")
TEXT_KINDS = ("llm", "vlm", "ocr")

_ENCODER_TYPES = frozenset(("bert", "xlm-roberta", "modernbert"))
_ENCODERS = ("BertModel", "XLMRobertaModel", "ModernBertModel")
_OCR_TYPES = ("deepseekocr", "dots_ocr", "glm_ocr")
_VISION_PARTS = frozenset(
    (
        "visual",
        "vision",
        "vision_tower",
        "vision_model",
        "vision_encoder",
        "embed_vision",
        "multi_modal_projector",
    )
)
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

    @property
    def num_labels(self) -> int:
        """How many scores such a head gives; where nothing is said, two."""
        labels = self.config.get("id2label")
        count = self.config.get("num_labels")
        if isinstance(labels, Mapping) and labels:
            return len(labels)
        return count if isinstance(count, int) else 2

    @property
    def is_classifier(self) -> bool:
        """Whether it has a head that gives a text, or a pair of texts, a score."""
        names = self.architectures
        return any(name.endswith("ForSequenceClassification") for name in names)

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
    return next(row.kind for row in ROWS if row.fits(evidence))


def loader_of(kind: str) -> str | None:
    """Where the class is that makes residents of a kind; None: it is not served."""
    return next((row.loader for row in ROWS if row.kind == kind), None)


def sees(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether it has a vision tower: its config tells of one, its weights hold it."""
    if not isinstance(config.get("vision_config"), Mapping):
        return False
    names = tensor_names(folder)
    return any(not _VISION_PARTS.isdisjoint(name.split(".")) for name in names)


def is_library_there() -> bool:
    """Whether mlx-vlm is installed, of the extra `vision`."""
    return importlib.util.find_spec("mlx_vlm") is not None


def can_see(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether it has a vision tower, and the library that runs one is installed."""
    return is_library_there() and sees(folder, config)


def missing_library(kind: Kind, folder: Path, config: Mapping[str, Any]) -> str | None:
    """What has to be installed before a checkpoint can be loaded; None: nothing."""
    writes_text = Evidence(folder, config).writes_text
    is_encoder = kind in ("embedding", "reranker") and not writes_text
    if is_encoder and not is_library_there():
        return "it needs mlx-vlm: install litellm-mlx[vision]"
    if kind in AUDIO_KINDS and importlib.util.find_spec("mlx_audio") is None:
        return "it needs mlx-audio: install litellm-mlx[audio]"
    return None


def _hub_name(folder: Path) -> str:
    """The repository's name, where the folder is a snapshot of the hub's cache."""
    repository = folder.parent.parent.name
    return repository.lower() if repository.startswith("models--") else ""


def _is_reranker(found: Evidence) -> bool:
    if found.is_classifier:
        return found.num_labels == 1
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

        # By its name alone only what says no more of itself: a person's folder or a
        # text model may be called like an audio model.
        name = "" if found.model_type else found.folder.name
        said: object = classify_model(found.model_type, name)
        return said == kind

    return fits


def _is_vlm(found: Evidence) -> bool:
    return sees(found.folder, found.config)


def _is_ocr(found: Evidence) -> bool:
    return found.model_type.startswith(_OCR_TYPES) and _is_vlm(found)


_TEXT_LOADER = "sidecar.residents.text_resident:TextLoader"
_ENCODER_LOADER = "sidecar.residents.encoder_loader:EncoderLoader"
_AUDIO_LOADER = "sidecar.residents.audio_loader:AudioLoader"


@dataclass(frozen=True, slots=True)
class Row:
    """
    A kind of model.

    Args:
        fits: whether a checkpoint is one; the first row that fits is its kind.
        loader: where the class is that makes residents of its kind, `module:name`,
            built of the configuration and of what all models share; None: it is
            listed, and not served.
    """

    kind: str
    fits: Callable[[Evidence], bool]
    loader: str | None = None


ROWS: tuple[Row, ...] = (
    Row("reranker", _is_reranker, _ENCODER_LOADER),
    Row("classifier", lambda found: found.is_classifier),
    Row("embedding", _is_embedding, _ENCODER_LOADER),
    Row("stt", _audio("stt", _STT_TYPES), _AUDIO_LOADER),
    Row("tts", _audio("tts", _TTS_TYPES), _AUDIO_LOADER),
    Row("ocr", _is_ocr, _TEXT_LOADER),
    Row("vlm", _is_vlm, _TEXT_LOADER),
    Row("llm", lambda found: True, _TEXT_LOADER),
)
