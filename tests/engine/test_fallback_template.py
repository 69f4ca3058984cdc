"""A tokenizer without a chat template reads the turns that its tokens are for."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from sidecar.engine.loading.fallback_template import give_template
from testkit.servers import running_sidecar
from testkit.tiny_models import BUILTIN, make_model

_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Go on"},
]


def tokenizer_with(
    folder: Path, tokens: Sequence[str], bos: str | None = None
) -> object:
    """The built-in model's, its added tokens renamed, without its template."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = json.loads((BUILTIN / "tokenizer.json").read_text())
    names = iter([*tokens, *([bos] if bos else [])])
    for token in whole["added_tokens"]:
        token["content"] = next(names, f"<|other {token['id']}|>")
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    last = whole["added_tokens"][len(tokens) - 1]["content"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": last}
    config |= {"bos_token": bos} if bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("tokens", "bos", "name", "text"),
    [
        (
            ("<|im_start|>", "<|im_end|>"), None, "ChatML",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|begin|>",
            "Llama 3",
            "<|begin|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nGo on<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            ("<start_of_turn>", "<end_of_turn>"), "<bos>", "Gemma",
            "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
            "<start_of_turn>model\nYes?<end_of_turn>\n"
            "<start_of_turn>user\nGo on<end_of_turn>\n<start_of_turn>model\n",
        ),
    ],
)  # fmt: skip
def test_turns_are_those_of_its_tokens(
    tmp_path: Path, tokens: Sequence[str], bos: str | None, name: str, text: str
) -> None:
    tokenizer = tokenizer_with(tmp_path, tokens, bos)
    assert give_template(tokenizer) == name
    said = tokenizer.apply_chat_template(
        _TALK, tokenize=False, add_generation_prompt=True
    )
    assert said == text
    ids = tokenizer.encode(said, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    end = tokenizer.get_vocab()[tokens[-1]]
    assert end in tokenizer.eos_token_ids


def test_other_tokens_and_templates_stay_as_they_are(tmp_path: Path) -> None:
    plain = tokenizer_with(tmp_path / "plain", ("<a>", "<b>"))
    assert give_template(plain) is None
    assert not plain.chat_template
    own = load_tokenizer(BUILTIN)
    before = own.chat_template
    assert give_template(own) is None
    assert own.chat_template == before


def test_a_chat_goes_on_warm_without_a_template(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(make_model(tmp_path / "dense", "dense"), folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with running_sidecar({"MODEL_PATH": str(folder)}) as app:
        talk, cached = list(_TALK), list[int]()
        for _ in range(3):
            body = {"model": "local", "messages": talk, "max_tokens": 6}
            answer = httpx.post(
                f"{app.url}/v1/chat/completions", json=body, timeout=120
            ).json()
            usage = answer["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            said = answer["choices"][0]["message"]["content"] or "x"
            talk += [{"role": "assistant", "content": said},
                     {"role": "user", "content": "And then?"}]  # fmt: skip
        assert cached[0] == 0
        assert 0 < cached[1] < cached[2]
