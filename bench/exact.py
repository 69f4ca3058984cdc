"""
What exact prefixes alone could save, had the peer given the recorded answers.

mlx_lm.server cannot be made to say them, so its own count has none of them to reuse.
This one has: prompts as its template renders them, each followed by the recorded
answer as generated, all kept for ever.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from testkit.reuse import Served, common_len

Json = Mapping[str, Any]


def template_kwargs(turn: Served) -> dict[str, Any]:
    """What both servers' templates are told."""
    return {
        **(turn.body.get("chat_template_kwargs") or {}),
        "enable_thinking": turn.thinking,
        "preserve_thinking": True,
    }


def prefilled_exactly(served: Sequence[Served], model: Path) -> list[int]:
    """Tokens of each prompt that no earlier prompt and answer begin with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    held: list[Any] = []
    prefilled = []
    for turn in served:
        ids = np.array(_render(turn, tokenizer))
        shared_len = max((common_len(ids, earlier) for earlier in held), default=0)
        prefilled.append(len(ids) - min(shared_len, len(ids) - 1))
        said = tokenizer.encode(turn.said, add_special_tokens=False)
        held.append(np.append(ids, [*said, tokenizer.eos_token_id]))
    return prefilled


def _render(turn: Served, tokenizer: Any) -> list[int]:
    text = tokenizer.apply_chat_template(
        [_plain(message) for message in turn.body["messages"]],
        tools=turn.body.get("tools"),
        add_generation_prompt=True,
        tokenize=False,
        **template_kwargs(turn),
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _plain(message: Json) -> Json:
    """A message as mlx_lm.server hands it to the template."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call)}}
        for call in message.get("tool_calls") or ()
    ]
    plain = {**message, "content": content}
    return {**plain, "tool_calls": calls} if calls else plain


def _arguments(call: Json) -> Any:
    return json.loads(call["function"]["arguments"] or "{}")
