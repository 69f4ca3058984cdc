"""Prompt text -> ids."""

import threading
from typing import Any

from sidecar.core.prompt import ChatTokenizer, ModelIds

_SAMPLE = "zq: user text,\n\tcode(1) naïve 東京 \U0001f600 <|im_start|>x"


class PromptEncoder:
    """
    Tokenises whole texts. Safe from any thread.

    A fast tokenizer's Rust core is called directly: it takes no lock and does not
    touch the truncation state, which the Python layer sets on every call.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._core = _usable_core(tokenizer)

    def encode(self, text: str) -> ModelIds:
        """Ids of a rendered prompt; special tokens are added unless it has them."""
        bos = self._tokenizer.bos_token
        return ModelIds(tuple(self._ids(text, not (bos and text.startswith(bos)))))

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._core is not None:
            encoded = self._core.encode(text, add_special_tokens=add_special_tokens)
            return list(encoded.ids)
        with self._lock:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _usable_core(tokenizer: ChatTokenizer) -> Any:
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return None
    for special in (True, False):
        wanted = tokenizer.encode(_SAMPLE, add_special_tokens=special)
        if list(core.encode(_SAMPLE, add_special_tokens=special).ids) != wanted:
            return None
    return core
