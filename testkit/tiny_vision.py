"""
Random tiny models that see, with the built-in model's tokenizer.

One of each kind that matters to reuse: `seeing` (qwen3_vl: positions on three axes,
features for deeper layers), `seeing-25` (qwen2_5_vl), `seeing-hybrid` (qwen3_5:
recurrent layers, so checkpoints), `seeing-sliding` (gemma3: a rotating window, a fixed
number of tokens an image). fp32, so that warm and cold runs can be compared exactly.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.utils import get_model_and_args, update_module_configs
from tokenizers import AddedToken, Tokenizer

from testkit.tiny_models import BUILTIN, RECURRENT, WINDOW, mute
from tools import tiny_checkpoints

Config = dict[str, Any]
_QWEN = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_GEMMA = {
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
    "image_token_index": "<image_soft_token>",
}
GEMMA_TOKENS = 16  # an image of the gemma3 here


def make_seeing(out: Path, kind: str, *, hidden: int = 64, large: bool = False) -> Path:
    """
    Write the folder of a model that sees; an existing one is kept.

    Args:
        large: of the size of an 8 B model (of kind `seeing`), in bf16: 17 GB.
    """
    if (out / "model.safetensors").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    make, tokens, processor = _KINDS[kind]
    base = json.loads((BUILTIN / "config.json").read_text())
    vocab = _write_tokenizer(out, tokens, processor())
    config = make((max(vocab.values()) + 64) // 64 * 64, hidden)
    if large:
        _enlarge(config, out)
    config |= {name: vocab[token] for name, token in tokens.items()}
    config["eos_token_id"] = base["eos_token_id"]
    config["pad_token_id"] = base["pad_token_id"]
    mx.random.seed(7)
    model = _build(config)
    mute(model, base["eos_token_id"] - 10)
    dtype = mx.bfloat16 if large else mx.float32
    weights = {name: a.astype(dtype) for name, a in tree_flatten(model.parameters())}
    del model
    mx.eval(weights)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))
    (out / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return out


def make_bidirectional(out: Path) -> Path:
    """
    Write the folder of a tiny Gemma 4 of which the parts of an image read each other.

    mlx-vlm computes its prompts in one pass up to the last image.
    """
    tiny_checkpoints.make_seeing(out, "gemma4")
    config = json.loads((out / "config.json").read_text())
    config["text_config"]["use_bidirectional_attention"] = "vision"
    (out / "config.json").write_text(json.dumps(config))
    return out


def _build(config: Config) -> Any:
    library, _ = get_model_and_args(config=config)
    made = library.ModelConfig.from_dict(json.loads(json.dumps(config)))
    parts = ["text", "vision", "perceiver", "projector"]
    return library.Model(update_module_configs(made, library, config, parts))


def _write_tokenizer(
    out: Path, tokens: Mapping[str, str], processor: Config
) -> dict[str, int]:
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    added = [AddedToken(token, special=True) for token in tokens.values()]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = json.loads((BUILTIN / "tokenizer_config.json").read_text())
    settings["processor_class"] = processor["processor_class"]
    template = _template(tokens)
    settings["chat_template"] = template
    settings |= processor.pop("tokenizer", {})
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    (out / "chat_template.jinja").write_text(template)
    (out / "preprocessor_config.json").write_text(json.dumps(processor))
    if "config" in processor:
        (out / "processor_config.json").write_text(json.dumps(processor["config"]))
    return dict(tokenizer.get_vocab())


def _template(tokens: Mapping[str, str]) -> str:
    """The built-in model's, which prints an image where it stands."""
    plain = (BUILTIN / "chat_template.jinja").read_text()
    if "image_token_id" in tokens:
        printed = "<|vision_start|><|image_pad|><|vision_end|>"
    else:
        printed = "<start_of_image>"
    part = "{%- if part is string -%}"
    image = f"{{%- if part.type == 'image' -%}}{{{{- '{printed}' -}}}}"
    assert part in plain
    return plain.replace(part, image + "{%- elif part is string -%}")


def _enlarge(config: Config, folder: Path) -> None:
    """The sizes of Qwen3-VL-8B, and images as large as it takes them."""
    config["vocab_size"] = 151936
    config["text_config"] |= {
        "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36,
        "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    config["text_config"]["rope_scaling"]["mrope_section"] = [24, 20, 20]
    config["vision_config"] |= {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "out_hidden_size": 4096, "patch_size": 16, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    }  # fmt: skip
    file = folder / "preprocessor_config.json"
    processor = json.loads(file.read_text()) | {"patch_size": 16, "max_pixels": 1 << 24}
    file.write_text(json.dumps(processor))


def _text(vocab: int, hidden: int) -> Config:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "intermediate_size": hidden * 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    }


def _qwen_vision(model_type: str, hidden: int) -> Config:
    return {
        "model_type": model_type,
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": hidden,
        "patch_size": 8,
        "spatial_patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [],
    }


def _qwen3_vl(vocab: int, hidden: int) -> Config:
    text = {"model_type": "qwen3_vl_text", "rope_theta": 1e6, **_text(vocab, hidden)}
    text["rope_scaling"] = {
        "rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True,
    }  # fmt: skip
    vision = _qwen_vision("qwen3_vl", hidden) | {"deepstack_visual_indexes": [0]}
    return {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "text_config": text,
        "vision_config": vision,
    }


def _qwen25_vl(vocab: int, hidden: int) -> Config:
    rope = {"type": "mrope", "mrope_section": [6, 5, 5]}
    vision = _qwen_vision("qwen2_5_vl", hidden)
    text = _text(vocab, hidden) | {"rope_theta": 1e6, "rope_scaling": rope}
    return {
        **text,
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": text | {"model_type": "qwen2_5_vl"},
        "vision_config": vision
        | {"window_size": 32, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    }


def _qwen35_vl(vocab: int, hidden: int) -> Config:
    text = _text(vocab, hidden) | RECURRENT
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "text_config": text,
        "vision_config": _qwen_vision("qwen3_5", hidden),
    }


def _gemma3(vocab: int, hidden: int) -> Config:
    text = _text(vocab, hidden) | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 32,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1e6,
        "mm_tokens_per_image": GEMMA_TOKENS,
    }
    text.pop("tie_word_embeddings")
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vocab_size": vocab,
        "mm_tokens_per_image": GEMMA_TOKENS,
        "hidden_size": hidden,
        "text_config": text,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "patch_size": 8,
            "image_size": 64,
            "layer_norm_eps": 1e-6,
        },
    }


def _qwen_processor(name: str) -> Config:
    return {
        "processor_class": name,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 16 * 16,
        "max_pixels": 256 * 256,
        "size": {"shortest_edge": 16 * 16, "longest_edge": 256 * 256},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _gemma_processor() -> Config:
    sized = {"height": 64, "width": 64}
    return {
        "processor_class": "Gemma3Processor",
        "image_processor_type": "Gemma3ImageProcessor",
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
        "do_resize": True, "do_pan_and_scan": False,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "rescale_factor": 1 / 255,
        "resample": 2,
        "size": sized,
        "image_seq_length": GEMMA_TOKENS,
        "config": {
            "processor_class": "Gemma3Processor", "image_seq_length": GEMMA_TOKENS,
        },
        "tokenizer": {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    }  # fmt: skip


_KINDS: Mapping[
    str, tuple[Callable[[int, int], Config], Mapping[str, str], Callable[[], Config]]
] = {
    "seeing": (_qwen3_vl, _QWEN, lambda: _qwen_processor("Qwen3VLProcessor")),
    "seeing-25": (_qwen25_vl, _QWEN, lambda: _qwen_processor("Qwen2_5_VLProcessor")),
    "seeing-hybrid": (_qwen35_vl, _QWEN, lambda: _qwen_processor("Qwen3VLProcessor")),
    "seeing-sliding": (_gemma3, _GEMMA, _gemma_processor),
}
BIDIRECTIONAL = "seeing-bidirectional"
SEEING: Sequence[str] = tuple(_KINDS)
