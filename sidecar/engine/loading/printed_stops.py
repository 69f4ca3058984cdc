"""
What a chat template prints in past turns for the token that ended them.

gpt-oss ends its last answer with `<|return|>`; in later prompts `<|end|>` stands there.
KV of the one is no KV of the other, and where layers cannot be cut back (a window, a
recurrent state) all of the answer would be computed again. So the model is fed what
will be printed: what it would say behind its end nobody asks.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sidecar.core.prompt import ChatTokenizer

_ASK = {"role": "user", "content": "zq ask"}
_ANSWER = {"role": "assistant", "content": "zq answer"}
_NEXT = {"role": "user", "content": "zq next"}


def printed_stops(
    tokenizer: ChatTokenizer, stop_ids: Collection[int]
) -> Mapping[int, int]:
    """A stop token -> the token that stands in its place once another turn follows."""
    if not tokenizer.chat_template:
        return {}
    last = _behind_answer(tokenizer, [_ASK, _ANSWER])
    past = _behind_answer(tokenizer, [_ASK, _ANSWER, _NEXT])
    added = set(tokenizer.get_added_vocab().values())
    is_other = last in stop_ids and past in added and past != last
    return {last: past} if is_other and last is not None and past is not None else {}


def _behind_answer(
    tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, Any]]
) -> int | None:
    """The first token behind the answer's text; None if there is none."""
    try:
        text = str(tokenizer.apply_chat_template([*messages], tokenize=False))
    except Exception:  # noqa: BLE001 - a template may refuse what it likes
        return None
    _, _, behind = text.partition(_ANSWER["content"])
    ids = tokenizer.encode(behind, add_special_tokens=False) if behind else []
    return ids[0] if ids else None
