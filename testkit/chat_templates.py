"""
Tokenizer folders with chat templates of the kinds that models come with.

The vocabulary is the built-in model's, with the added tokens of the template's family
under names of their own; `spm` is a sentence-piece-like tokenizer trained here on a
page of text. All are loaded as in production.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mlx_lm.utils import load_tokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)

BUILTIN = Path(__file__).parents[1] / "sidecar" / "builtin_model"

_CHATML = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ CONTENT }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

_WITH_CALLS = """\
{%- if tools -%}<|im_start|>system
{%- for t in tools %}
{{ t | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ CONTENT }}{% for c in m.tool_calls or [] %}
<tool_call>{"name": "{{ c.function.name }}", "arguments": \
{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

_LLAMA3 = """\
{{ bos_token }}
{%- for m in messages -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>

{% endif -%}"""

# As GLM-4.5's: no end of turn, for the next role's token ends it; an empty think block
# is printed before past answers, and calls behind them.
_GLM = r"""
{{- '[gMASK]<sop>' -}}
{%- if tools -%}{{- '<|system|>' -}}
{%- for t in tools -%}{{- '\n' + (t | tojson) -}}{%- endfor -%}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|observation|>' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|assistant|>\n<think>' + (m.reasoning_content or '') + '</think>' -}}
{%- if m.content | trim -%}{{- '\n' + (m.content | trim) -}}{%- endif -%}
{%- for c in m.tool_calls or [] -%}
{{- '\n<tool_call>' + c.function.name -}}
{%- for k, v in c.function.arguments.items() -%}
{{- '\n<arg_key>' + k + '</arg_key>\n<arg_value>' -}}
{{- (v if v is string else v | tojson) + '</arg_value>' -}}
{%- endfor -%}{{- '\n</tool_call>' -}}{%- endfor -%}
{%- else -%}{{- '<|' + m.role + '|>\n' + m.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '\n<think></think>' -}}
{%- endif -%}{%- endif -%}"""

# The system text stands in the last user turn, as in Mistral's templates.
_REORDERING = """\
{{ bos_token }}
{%- set ns = namespace(system='') -%}
{%- if messages[0].role == 'system' -%}{%- set ns.system = messages[0].content -%}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}
{{ raise_exception('only user and assistant roles are supported') }}
{%- elif m.role == 'user' -%}[INST] {% if loop.last and ns.system -%}
{{ ns.system }}

{% endif -%}{{ m.content }}[/INST]
{%- elif m.role == 'assistant' -%} {{ m.content }}</s>
{%- endif -%}
{%- endfor -%}"""

# Calls instead of text, as in Llama 3.1's template.
_CALLS_ONLY = _WITH_CALLS.replace(
    "{{ CONTENT }}{% for", "{% if not m.tool_calls %}{{ CONTENT }}{% endif %}{% for"
)

_INST = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' %} {{ m.content }}</s>
{%- else -%}
{%- if loop.first %}<s>{% endif %}[INST] {{ m.content }} [/INST]
{%- endif -%}
{%- endfor -%}"""

_ALTERNATING = """\
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{%- if messages[0].role == 'system' -%}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate user/assistant') }}
{%- endif -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

_SYSTEM_FIRST = """\
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}
{{ raise_exception('system message must be at the beginning') }}
{%- endif %}"""

_NO_TOOLS = """\
{%- for m in messages -%}
{%- if m.role in ('system', 'user', 'assistant') -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif -%}
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

# The prompt opens the think block; of past turns only the answer is printed.
_OPENS_THINK = _WITH_CALLS.replace(
    "<|im_start|>assistant\n{% endif -%}",
    "<|im_start|>assistant\n<think>\n{% endif -%}",
)

_TEMPLATES = {
    "effort": _CHATML.replace("CONTENT", "m.content")
    + "{%- if reasoning_effort %}effort {{ reasoning_effort }}{% endif -%}",
    "opens_think": _OPENS_THINK.replace("CONTENT", "m.content"),
    "plain": _WITH_CALLS.replace("CONTENT", "m.content"),
    "trim": _WITH_CALLS.replace("CONTENT", "m.content | trim"),
    "escape": _CHATML.replace("CONTENT", "m.content | tojson"),
    "urlencode": _CHATML.replace("CONTENT", "m.content | urlencode"),
    "reorder": _REORDERING,
    "system_first": _SYSTEM_FIRST
    + _WITH_CALLS.replace("CONTENT", "m.content").replace(
        "{%- for m in messages -%}\n", ""
    ),
    "alternate": _ALTERNATING,
    "no_tools": _NO_TOOLS,
    "calls_only": _CALLS_ONLY.replace("CONTENT", "m.content"),
    "llama3": _LLAMA3,
    "glm": _GLM,
    "spm": _INST,
    "none": None,
}
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                 "<|eot_id|>")  # fmt: skip
_GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
               "<|observation|>")  # fmt: skip
_INST_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]")
_FAMILY_TOKENS = {"llama3": _LLAMA_TOKENS, "glm": _GLM_TOKENS, "reorder": _INST_TOKENS}

KINDS = ("builtin", *_TEMPLATES)


@cache
def tokenizer_of(kind: str) -> Any:
    """A loaded tokenizer: `builtin` or one of the kinds above."""
    if kind == "builtin":
        return load_tokenizer(BUILTIN)
    folder = Path(mkdtemp(prefix=f"tokenizer-{kind}-"))
    try:
        _write(folder, kind)
        return load_tokenizer(folder)
    finally:
        shutil.rmtree(folder)


def template_of(kind: str) -> str | None:
    """The text of a kind's template."""
    return _TEMPLATES[kind]


def write_template(folder: Path, template: str | None) -> dict[str, Any]:
    """Put a template into a folder; the built-in tokenizer's settings without one."""
    config: dict[str, Any] = json.loads((BUILTIN / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    config.pop("additional_special_tokens")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return config


def _write(folder: Path, kind: str) -> None:
    config = write_template(folder, _TEMPLATES[kind])
    if kind == "spm":
        core = _train_sentence_pieces()
        config |= {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    else:
        core = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
        names = _FAMILY_TOKENS.get(kind, ())
        core.add_special_tokens([AddedToken(n, special=True) for n in names])
        if kind in ("llama3", "reorder"):
            _add_bos(core, names[0])
            config |= {"bos_token": names[0], "eos_token": names[3]}
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _add_bos(core: Tokenizer, bos: str) -> None:
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B",
        special_tokens=[(bos, core.token_to_id(bos))],
    )  # fmt: skip


def _train_sentence_pieces() -> Tokenizer:
    """As Llama 2's: the first word of every piece is marked, bytes as a way out."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", *byte_tokens], show_progress=False
    )
    page = (Path(__file__).parents[1] / "LICENSE").read_text().split("\n\n")
    core.train_from_iterator(page, trainer)
    # The trainer made added tokens of the bytes: they must be plain pieces instead.
    made = json.loads(core.to_str())
    made["added_tokens"] = [t for t in made["added_tokens"] if t["id"] == 0]
    core = Tokenizer.from_str(json.dumps(made))
    core.add_special_tokens([AddedToken(n, special=True) for n in _INST_TOKENS])
    _add_bos(core, "<s>")
    return core
