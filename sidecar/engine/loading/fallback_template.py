"""
A chat template for a tokenizer without one, known by the tokens that it has.

A model of these three families reads its turns so; with other tokens it gets plain
`role: content` lines (pipeline/template/chat_template).
"""

import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""
_LLAMA3 = """\
{{ bos_token }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}"""
# Gemma has no system turn: its text begins the first one of the user.
_GEMMA = """\
{{ bos_token }}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content + '\\n\\n' -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\\n' + (system if loop.first and system else '') }}
{{- message.content + '<end_of_turn>\\n' }}
{%- endfor -%}
{{ '<start_of_turn>model\\n' if add_generation_prompt else '' }}"""


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    opening: str
    end: str
    template: str


_FORMATS = (
    _Format("ChatML", "<|im_start|>", "<|im_end|>", _CHATML),
    _Format("Llama 3", "<|start_header_id|>", "<|eot_id|>", _LLAMA3),
    _Format("Gemma", "<start_of_turn>", "<end_of_turn>", _GEMMA),
)


def give_template(tokenizer: Any) -> str | None:
    """
    Have a tokenizer without a chat template print the turns that its tokens are for.

    Returns:
        The format's name; None: it has a template, or none of these tokens.
    """
    if tokenizer.has_chat_template or tokenizer.chat_template:
        return None
    added = tokenizer.get_added_vocab()
    for known in _FORMATS:
        if known.opening in added and known.end in added:
            tokenizer.chat_template = known.template
            tokenizer.has_chat_template = True
            tokenizer.add_eos_token(str(added[known.end]))
            logger.warning(
                "the model has no chat template: it gets that of %s, by its tokens",
                known.name,
            )
            return known.name
    return None
