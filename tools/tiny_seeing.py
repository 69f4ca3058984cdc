"""Tiny configurations of mlx-vlm's architectures that see."""

import dataclasses
import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.tiny_configs import HIDDEN, Config, filled, names
from tools.tiny_processors import IMAGE, PATCH, token_ids
from tools.tiny_seeing_overrides import SEEING_OVERRIDES

WIDTH = 32  # of the tower
_LAYERS = 2

# Field name -> value, of towers and what joins them to the text model.
_TINY: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "width", "d_model"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "depth", "layers", "n_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_global_layers"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim"), WIDTH // 2),
    **dict.fromkeys(("intermediate_size", "projection_intermediate_size"), 64),
    **dict.fromkeys(("patch_size", "spatial_patch_size", "image_patch_size"), PATCH),
    **dict.fromkeys(("image_size", "crop_size"), IMAGE),
    **dict.fromkeys(("num_channels", "in_channels", "in_chans"), 3),
    **dict.fromkeys(("spatial_merge_size", "temporal_patch_size"), 2),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "projection_dim"), HIDDEN),
    **dict.fromkeys(("projector_output_dim", "output_proj_dims"), HIDDEN),
    **dict.fromkeys(("output_size", "proj_out_dim", "n_embed"), HIDDEN),
    **dict.fromkeys(("num_position_embeddings",), 256),
    **dict.fromkeys(("position_embedding_size",), 256),
    **dict.fromkeys(("num_positions", "num_patches"), (IMAGE // PATCH) ** 2),
    **dict.fromkeys(("init_pos_emb_height", "init_pos_emb_width"), IMAGE // PATCH),
    **dict.fromkeys(("pos_emb_height", "pos_emb_width"), IMAGE // PATCH),
    **dict.fromkeys(("deepstack_visual_indexes", "fullatt_block_indexes"), [1]),
    **dict.fromkeys(("window_size",), 4 * PATCH),
    **dict.fromkeys(("resampler_depth", "resampler_n_heads"), 2),
    **dict.fromkeys(("resampler_head_dim", "resampler_n_latents"), 16),
    **dict.fromkeys(("layer_norm_eps", "rms_norm_eps", "norm_eps"), 1e-6),
    **dict.fromkeys(("rope_theta",), 10000.0),
}
# Of the config's own fields, beside its parts.
_TINY_WHOLE: Mapping[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "out_hidden_size", "projector_hidden_size"), HIDDEN
    ),
    **dict.fromkeys(("mm_hidden_size", "vit_hidden_size", "pixel_hidden_size"), WIDTH),
    **dict.fromkeys(("image_size", "force_image_size"), IMAGE),
    **dict.fromkeys(("patch_size",), PATCH),
    **dict.fromkeys(("vision_feature_layer",), -1),
    **dict.fromkeys(("tie_word_embeddings", "skip_vision"), False),
}
# They embed, detect, segment, draw or read out: nobody chats with them.
_NO_CHAT = frozenset((
    "clef", "colidefics3", "colqwen2_5", "d1_omni", "embedding_gemma2",
    "falcon_perception", "florence2", "llama_nemotron_vl_embedding", "nemotron_parse",
    "pp_doclayout_v3", "qwen3_vl_embedding", "rfdetr", "rt_detr_v2",
    "sam3", "sam3_1", "sam3d_body", "sam3d_objects", "siglip", "video_depth_anything",
))  # fmt: skip
_TEXT_PARTS = ("text_config", "llm_config", "language_config")


def seeing_architectures() -> list[str]:
    """Packages of mlx-vlm with a tower and a chat model; from their source alone."""
    import mlx_vlm.models as library

    found = []
    for package in sorted(Path(library.__path__[0]).iterdir()):
        opening = package / "__init__.py"
        if not opening.exists() or package.name in _NO_CHAT:
            continue
        if all(part in opening.read_text() for part in ("VisionConfig", "Model")):
            found.append(package.name)
    return found


def seeing_config(name: str, vocab_size: int, vocab: Mapping[str, int]) -> Config:
    """The config.json of a tiny model that sees."""
    library = importlib.import_module(f"mlx_vlm.models.{name}")
    overrides = SEEING_OVERRIDES.get(name, {})
    config = filled(library.ModelConfig, vocab_size, _TINY_WHOLE)
    for field in dataclasses.fields(library.ModelConfig):
        made_from = _part_class(library, field)
        if made_from is None:
            continue
        tiny = {} if field.name in _TEXT_PARTS else {"tiny": _TINY}
        part = filled(made_from, vocab_size, **tiny)
        if isinstance(known := _default(made_from, "model_type"), str):
            part["model_type"] = known
        config[field.name] = part | token_ids(vocab, name, names(made_from))
    config |= token_ids(vocab, name, names(library.ModelConfig))
    config["model_type"] = name
    config = merged(config, overrides)
    # Some configs have no part for the text model: its fields stand among the others.
    return {**config.get("text_config", {}), **config}


def merged(config: Config, more: Mapping[str, Any]) -> Config:
    """A config with values replaced, in its parts as well; None takes a value away."""
    result = dict(config)
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


def build(config: Config) -> Any:
    """The model of a config as mlx-vlm makes it before it reads weights."""
    from mlx_vlm import utils

    config = json.loads(json.dumps(config))
    parts_of: Any = utils.update_module_configs  # mlx-vlm has no types for it
    library, _ = utils.get_model_and_args(config=config)
    config.setdefault("text_config", config.pop("llm_config", {}))
    for part in ("vision_config", "audio_config"):
        config.setdefault(part, {})
    made = library.ModelConfig.from_dict(config)
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    return library.Model(parts_of(made, library, config, parts))


def _part_class(library: Any, field: "dataclasses.Field[Any]") -> Any:
    """The class of a part that every checkpoint has."""
    if not field.name.endswith("_config") or "quantization" in field.name:
        return None
    wanted = field.name.removesuffix("_config").title().replace("_", "") + "Config"
    found = getattr(library, wanted, None)
    if found is None and inspect.isclass(field.type):
        found = field.type
    if not dataclasses.is_dataclass(found):
        return None
    is_basic = field.name in (*_TEXT_PARTS, "vision_config")
    return found if is_basic or field.default is dataclasses.MISSING else None


def _default(made_from: Any, name: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(made_from)}
    return fields[name].default if name in fields else None
