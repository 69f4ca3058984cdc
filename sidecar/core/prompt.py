"""What the pipeline hands to the engine, and what it needs from below."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that are cut out of a text before anything else."""

    def get_vocab(self) -> dict[str, int]:
        """All tokens and their ids."""

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> Any:
        """Render messages (transformers' own, in jinja's sandbox)."""


class PrefixMatcher(Protocol):
    """Asks the KV store how much of a prompt it holds; ids only, any thread."""

    def match_len(self, model_ids: ModelIds) -> int:
        """Length in tokens of the longest stored prefix."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """
    A place in M worth a checkpoint: another request may end its match there.

    Args:
        rank: lower is worth more (0 end of system and tools, 1 before the last user
            message, 2 end of the prompt's messages, 3 other message ends).
    """

    depth: int
    rank: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """
    What was done to reuse KV, for the log and the response headers.

    Args:
        key_delta_chars: see pipeline.drift.key_delta_chars.
        is_new: nothing was stored for this conversation before.
        counted: the counters that this request moved while it was prepared, and by
            how much.
    """

    match: str = "none"
    strict_len: int = 0
    reused_len: int = 0
    is_proved: bool = True
    stable_messages: int = 0
    changes: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    restated: tuple[str, ...] = ()
    num_spliced: int = 0
    stopped_by: str | None = None
    divergence: "Divergence | None" = None
    is_new: bool = False
    key_delta_chars: int = 0
    counted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt first differs from the closest one before it."""

    depth: int
    message: int
    role: str
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """
    A prompt ready for the engine.

    Args:
        model_ids: what the model reads. text: the same as text.
        opens_thinking: the prompt ends in an open think block.
        thinking: whether the model was told to reason.
        boundaries: places worth a checkpoint, ascending.
        is_guest: a helper call beside the session's main thread.
        session: whose conversation it is, for caps and logs.
        turn: random id of the turn that will be written, for its tokens.
        own_len: tokens up to the end of the first turn that the model wrote for this
            conversation; 0: none is known.
        salt: what is stored under another cache salt is not for it.
        draft: what the pipeline remembers of it if it finishes cleanly.
    """

    model_ids: ModelIds
    text: str
    opens_thinking: bool
    thinking: bool
    boundaries: tuple[Boundary, ...] = ()
    is_guest: bool = False
    session: str = ""
    own_len: int = 0
    turn: str = ""
    salt: str = ""
    report: CacheReport = CacheReport()
    draft: Any = field(default=None, repr=False)
