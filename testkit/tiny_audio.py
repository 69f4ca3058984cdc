"""
Random tiny models of sound, and sounds for them; nothing is downloaded.

`moonshine` and `whisper` write down what is said (in letters at random, greedily the
same for the same sound), `soprano` speaks (its codec is a part of it). The tokenizer is
one of letters, made here.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import soundfile
from mlx.utils import tree_flatten
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

AUDIO = {"moonshine": "stt", "whisper": "stt", "soprano": "tts"}
RATE = 16_000
_LETTERS = " abcdefghijklmnopqrstuvwxyz.,!?'"
_FEW_LETTERS = " etaoin."  # of what is spoken: one in five of its tokens ends a segment
_SPOKEN = ("[STOP]", "[TEXT]", "[START]", "[UNK]")
_TIMES = tuple(f"<|{step * 0.02:.2f}|>" for step in range(1501))
_HEARD = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>",
    "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>",
    "<|notimestamps|>", *_TIMES,
)  # fmt: skip


def make_audio(out: Path, kind: str) -> Path:
    """Write the folder of a model of sound; an existing one is kept."""
    if (out / "model.safetensors").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    mx.random.seed(5)
    makers = {"moonshine": _moonshine, "whisper": _whisper, "soprano": _soprano}
    model, config = makers[kind](out)
    weights = {n: a.astype(mx.float32) for n, a in tree_flatten(model.parameters())}
    if kind != "soprano":
        weights = {n: _listening(n, a) for n, a in weights.items()}
    if kind == "moonshine":  # it is read in PyTorch's order of axes
        weights = {
            n: a.swapaxes(1, 2) if "conv" in n and a.ndim == 3 else a
            for n, a in weights.items()
        }
    mx.eval(weights)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    return out


def tones(seconds: float, *, rate: int = RATE, seed: int = 1) -> np.ndarray:
    """A sound that differs everywhere: (samples,) float32; silent at each tenth s."""
    chance = np.random.default_rng(seed)
    times = np.arange(int(seconds * rate)) / rate
    pitch = np.repeat(chance.uniform(100, 900, int(seconds) + 1), rate)[: len(times)]
    sound = 0.3 * np.sin(2 * np.pi * pitch * times)
    sound += 0.05 * chance.standard_normal(len(times))
    sound[(times % 10) > 9.5] = 0
    return sound.astype(np.float32)


def sound_file(samples: np.ndarray, form: str = "WAV", rate: int = RATE) -> bytes:
    """As a file; WAV and AIFF with floats, so that nothing is rounded."""
    file = io.BytesIO()
    subtype = "FLOAT" if form in ("WAV", "AIFF") else None
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def _listening(name: str, weight: mx.array) -> mx.array:
    """So that each sound gives another text: what is heard weighs more, letters too."""
    if name == "decoder.token_embedding.weight":  # Whisper's, with 1500 times in it
        is_letter = mx.arange(len(weight)) < len(_LETTERS)
        return mx.where(is_letter[:, None], weight * 8, weight)
    if "encoder_attn" in name or "cross_attn.query" in name:
        return weight * (3 if "o_proj" in name else 20)
    if name == "encoder.conv1.weight":
        weight = weight * 20
    return weight


def _moonshine(out: Path) -> tuple[Any, Mapping[str, Any]]:
    from mlx_audio.stt.models.moonshine import moonshine

    vocab = _write_tokenizer(out, _SPOKEN)
    config = {
        "vocab_size": len(vocab), "hidden_size": 64, "intermediate_size": 128,
        "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2,
        "max_position_embeddings": 512, "bos_token_id": vocab["[START]"],
        "eos_token_id": vocab["[STOP]"], "decoder_start_token_id": vocab["[START]"],
    }  # fmt: skip
    return moonshine.Model(moonshine.ModelConfig.from_dict(config)), config


def _whisper(out: Path) -> tuple[Any, Mapping[str, Any]]:
    from mlx_audio.stt.models.whisper import whisper

    vocab = _write_tokenizer(out, _HEARD, tokenizer_class="WhisperTokenizer")
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80,
        "sampling_rate": RATE, "hop_length": 160, "n_fft": 400, "chunk_length": 30,
        "n_samples": 480_000, "nb_max_frames": 3000, "processor_class":
        "WhisperProcessor",
    }  # fmt: skip
    (out / "preprocessor_config.json").write_text(json.dumps(extractor))
    config = {
        "n_mels": 80, "n_audio_ctx": 1500, "n_audio_state": 16, "n_audio_head": 1,
        "n_audio_layer": 2, "n_vocab": len(vocab), "n_text_ctx": 64,
        "n_text_state": 16, "n_text_head": 1, "n_text_layer": 2,
    }  # fmt: skip
    return whisper.Model(whisper.ModelDimensions.from_dict(config)), config


def _soprano(out: Path) -> tuple[Any, Mapping[str, Any]]:
    from mlx_audio.tts.models.soprano import soprano

    vocab = _write_tokenizer(out, _SPOKEN, letters=_FEW_LETTERS, end="[TEXT]")
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "rms_norm_eps": 1e-6, "vocab_size": len(vocab), "rope_theta": 1e6,
        "max_position_embeddings": 2048, "tie_word_embeddings": False,
        "sample_rate": 32_000,
    }  # fmt: skip
    named = {"model_type": "soprano", "model_path": str(out), **config}
    return soprano.Model(soprano.ModelConfig.from_dict(named)), config


def _write_tokenizer(
    out: Path,
    special: tuple[str, ...],
    *,
    tokenizer_class: str = "PreTrainedTokenizerFast",
    letters: str = _LETTERS,
    end: str | None = None,
) -> dict[str, int]:
    """One of letters; the last special tokens are the last ids."""
    vocab = {token: index for index, token in enumerate((*letters, *special))}
    unknown = special[-1] if special[-1] == "[UNK]" else special[0]
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": tokenizer_class, "pad_token": special[0],
        "eos_token": end or special[0], "bos_token": special[0], "unk_token": unknown,
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocab
