"""
Random tiny models that encode, with the built-in model's tokenizer.

`bert-embed` (pools what its checkpoint says), `qwen3-embed` (a decoder, last token),
`xlmr-rerank` (a cross-encoder), `qwen3-rerank` (a decoder that answers yes or no).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.models import bert, xlm_roberta
from tokenizers import AddedToken, Tokenizer, processors

from testkit.tiny_models import BUILTIN, make_model

ENCODERS = ("bert-embed", "qwen3-embed", "xlmr-rerank", "qwen3-rerank")


def make_encoder(out: Path, kind: str, *, pooling: str | None = None) -> Path:
    """
    Write the folder of a model that encodes; an existing one is kept.

    Args:
        pooling: what its `1_Pooling` says; None: it has none.
    """
    if (out / "model.safetensors").exists():
        return out
    if kind.startswith("qwen3"):
        make_model(out, "dense", keep_special=True, write_tokenizer=_with_words)
        _edit(out / "config.json", architectures=["Qwen3ForCausalLM"])
    else:
        _make_bert(out, kind)
    if pooling is not None:
        (out / "1_Pooling").mkdir()
        asked = {f"pooling_mode_{pooling}": True, "word_embedding_dimension": 64}
        (out / "1_Pooling" / "config.json").write_text(json.dumps(asked))
    return out


def _with_words(out: Path) -> tuple[str, ...]:
    """A tokenizer in which yes and no are a token each."""
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUILTIN / name, out / name)
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(out / "tokenizer.json"))
    return ("<|im_end|>",)


def _make_bert(out: Path, kind: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    vocab = _write_tokenizer(out)
    is_classifier = kind == "xlmr-rerank"
    config: dict[str, Any] = {
        "model_type": "xlm-roberta" if is_classifier else "bert",
        "architectures": [
            "XLMRobertaForSequenceClassification" if is_classifier else "BertModel"
        ],
        "vocab_size": vocab,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "max_position_embeddings": 514,
        "type_vocab_size": 1 if is_classifier else 2,
        "pad_token_id": 1 if is_classifier else vocab - 3,  # positions begin behind it
        "layer_norm_eps": 1e-5,
        "num_labels": 1,
    }
    library: Any = xlm_roberta if is_classifier else bert
    name = "SequenceClassificationModel" if is_classifier else "Model"
    mx.random.seed(11)
    known = {k: v for k, v in config.items() if k != "architectures"}
    model = getattr(library, name)(library.ModelConfig.from_dict(known))
    weights = {n: a.astype(mx.float32) for n, a in tree_flatten(model.parameters())}
    mx.eval(weights)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))


def _write_tokenizer(out: Path) -> int:
    """The built-in one, with what BERT puts around texts; its vocabulary's size."""
    tokenizer = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("[CLS]", "[SEP]", "[PAD]")]
    )
    vocab = tokenizer.get_vocab()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.save(str(out / "tokenizer.json"))
    settings = json.loads((BUILTIN / "tokenizer_config.json").read_text())
    settings |= {"pad_token": "[PAD]", "model_max_length": 512, "eos_token": "[SEP]"}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return max(vocab.values()) + 3


def _edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
