"""What the pipeline hands to the engine, and what it needs from below."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

# What the model reads and KV is stored under, against what lineage is looked up
# by and never reaches a model: the type checker keeps them apart.
ModelIds = NewType("ModelIds", tuple[int, ...])
CanonicalIds = NewType("CanonicalIds", tuple[int, ...])


class ChatTokenizer(Protocol):
    """The part of a tokenizer the pipeline uses; called from any thread."""

    chat_template: Any
    bos_token: str | None
    eos_token_ids: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""

    def get_vocab(self) -> dict[str, int]:
        """All tokens and their ids."""

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> Any:
        """Render messages (transformers' own, in jinja's sandbox)."""


class PrefixMatcher(Protocol):
    """Asks the KV store how much of a prompt it holds; ids only, any thread."""

    def match_len(self, model_ids: ModelIds) -> int:
        """Length in tokens of the longest stored prefix."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """
    A prompt ready for the engine.

    Args:
        model_ids: what the model reads.
        text: the rendered prompt.
        opens_thinking: the prompt ends in an open think block.
        thinking: whether the model was told to reason.
    """

    model_ids: ModelIds
    text: str
    opens_thinking: bool
    thinking: bool
