"""Tokenizers, templates and image processors of tiny models that see."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from testkit.tiny_models import BUILTIN

Config = dict[str, Any]
IMAGE = 64
PATCH = 8

# Architecture -> the token that stands for one row of an image, and what a chat
# template prints for an image.
_PLAIN = ("<image>", "<image>")
_QWEN = ("<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>")
_GLM = ("<|image|>", "<|begin_of_image|><|image|><|end_of_image|>")
_KIMI = (
    "<|media_pad|>",
    "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
)
_MISTRAL = ("[IMG]", "[IMG]")
_TOKENS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _QWEN),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "clef", "indic_ocr", "mage_vl"), _QWEN),
    **dict.fromkeys(("qwen3_omni_moe", "youtu_vl", "qwen4_exp"), _QWEN),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr", "glm5_next"), _GLM),
    **dict.fromkeys(("kimi_vl", "kimi_k25"), _KIMI),
    **dict.fromkeys(("mistral3", "pixtral"), _MISTRAL),
    **dict.fromkeys(("internvl", "internvl_chat"), ("<IMG_CONTEXT>", "<image>")),
    "aya_vision": ("<|IMG_PATCH|>", "<image>"),
    "dots_ocr": ("<|imgpad|>", "<|img|><|imgpad|><|endofimg|>"),
    "gemma3": ("<image_soft_token>", "<start_of_image>"),
    "gemma3n": ("<image_soft_token>", "<image_soft_token>"),
    "gemma4": ("<|image|>", "<|image|>"),
    "gemma4_unified": ("<|image|>", "<|image|>"),
    "jina_vlm": ("<im_patch>", "<|image|>"),
    "kimi_k3": ("<|media_pad|>", "<|kimi_image_placeholder|>"),
    "llama4": ("<|patch|>", "<|image|>"),
    "minicpmv4_6": ("<|image_pad|>", "<|image_pad|>"),
    "minicpmv4_7": ("<|image_pad|>", "<|image_pad|>"),
    "mllama": ("<|image|>", "<|image|>"),
    "molmo2": ("<im_patch>", "<|image|>"),
    "muse_glimmer": ("<|patch|>", "<|image_start|><|patch|><|image_end|>"),
    "paddleocr_vl": (
        "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    ),
    "phi3_v": ("<|image_1|>", "<|image_1|>"),
    "step3p7": ("<im_patch>", "<im_patch>"),
}  # fmt: skip
_MORE_TOKENS = (
    "<s>", "<boa>", "<eoa>", "<image>", "<|image_pad|>", "<|video_pad|>",
    "<|vision_start|>", "<|vision_end|>",
    "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>",
    "<|begin_of_video|>", "<|end_of_video|>", "<|media_start|>", "<|media_content|>",
    "<|media_pad|>", "<|media_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>",
    "</img>", "<IMG_CONTEXT>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>", "<boi>", "<eoi>", "<audio_soft_token>", "<|audio|>",
    "<video>", "<|image>", "<image|>", "<fake_token_around_image>", "<global-img>",
    "<end_of_utterance>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<im_patch>",
    "<im_start>", "<im_end>", "<im_col>", "<|tile_x_separator|>",
    "<|tile_y_separator|>", "<|img_row_1_col_1|>", "<|img_thumbnail|>", "<|imgpad|>",
    "<|img|>", "<|endofimg|>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>",
    "<|IMG_LINE_BREAK|>", "<TILE_GLOBAL>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>",
    "<|IMAGE_END|>", "<|image_1|>", "<|kimi_image_placeholder|>", "<image_id>",
    "</image_id>", "</image>", "<slice>", "</slice>",
)  # fmt: skip
# Field of a config -> the token of which it is the id; the others are an image's.
_MARKS: Mapping[str, str] = {
    **dict.fromkeys(
        ("vision_start_token_id", "image_start_token_id"), "<|vision_start|>"
    ),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id"), "<|vision_end|>"),
    **dict.fromkeys(("video_token_id", "video_token_index"), "<|video_pad|>"),
    **dict.fromkeys(("boi_token_id", "boi_token_index"), "<start_of_image>"),
    **dict.fromkeys(("eoi_token_id", "eoi_token_index"), "<end_of_image>"),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), "<|audio|>"),
}
_IMAGE_IDS = (
    "image_token_id", "image_token_index", "media_placeholder_token_id", "im_patch_id",
    "img_context_token_id", "image_patch_id", "image_patch_token_id", "vision_token_id",
)  # fmt: skip


def token_ids(vocab: Mapping[str, int], architecture: str, fields: set[str]) -> Config:
    """Values of the fields of a config that are ids of tokens."""
    image, _ = _TOKENS.get(architecture, _PLAIN)
    ids = {name: vocab[image] for name in _IMAGE_IDS if name in fields}
    return ids | {n: vocab[token] for n, token in _MARKS.items() if n in fields}


def write_tokenizer(out: Path, architecture: str) -> Mapping[str, int]:
    """The built-in model's, with all tokens that stand for images; its vocabulary."""
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    known = tokenizer.get_vocab()
    new = [t for t in _MORE_TOKENS if t not in known]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in new])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = json.loads((BUILTIN / "tokenizer_config.json").read_text())
    image, printed = _TOKENS.get(architecture, _PLAIN)
    template = _template(printed)
    settings |= {
        "chat_template": template, "image_token": image,
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
        "audio_token": "<|audio|>", "boa_token": "<boa>", "eoa_token": "<eoa>",
        "bos_token": "<s>",
        "image_boundary_token": "<fake_token_around_image>",
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    (out / "chat_template.jinja").write_text(template)
    return dict(tokenizer.get_vocab())


def write_processor(out: Path, architecture: str, overrides: Config) -> None:
    """Settings of the image processor, by all names that libraries read them by."""
    image, _ = _TOKENS.get(architecture, _PLAIN)
    square = {"height": IMAGE, "width": IMAGE}
    settings: Config = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
        "do_resize": True, "rescale_factor": 1 / 255, "resample": 2,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "size": square, "crop_size": square, "patch_size": PATCH, "image_size": IMAGE,
        "merge_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "min_pixels": 16 * 16, "max_pixels": 256 * 256,
    }  # fmt: skip
    settings |= overrides.get("image_processor", {})
    whole: Config = {
        "patch_size": PATCH, "image_token": image, "image_size": IMAGE,
        "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
        "spatial_merge_size": 2,
    }  # fmt: skip
    whole |= overrides.get("processor", {})
    (out / "preprocessor_config.json").write_text(json.dumps(settings))
    (out / "processor_config.json").write_text(
        json.dumps(whole | {"image_processor": settings})
    )


def _template(printed: str) -> str:
    """The built-in model's, which prints an image where it stands."""
    plain = (BUILTIN / "chat_template.jinja").read_text()
    part = "{%- if part is string -%}"
    image = f"{{%- if part.type == 'image' -%}}{{{{- '{printed}' -}}}}"
    assert part in plain
    return plain.replace(part, image + "{%- elif part is string -%}")
