"""What the pipeline hands to the engine, and what it needs from below."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

# What the model reads and KV is stored under, against what lineage is looked up
# by and never reaches a model: the type checker keeps them apart.
ModelIds = NewType("ModelIds", tuple[int, ...])
CanonicalIds = NewType("CanonicalIds", tuple[int, ...])


IMPLICIT = "implicit-"  # begins the ids of sessions that no client named


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose prompt it is: values never leave the key, seldom the thread."""

    api_key: str | None
    session: str
    thread: str


def is_implicit(session: str) -> bool:
    """Whether a session id was made here."""
    return session.startswith(IMPLICIT)


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
        key_delta_chars: see pipeline/reuse/first_difference.
        is_new: nothing was stored for this conversation before.
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


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt first differs from the closest one before it."""

    depth: int
    message: int
    role: str
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class ModelPrompt:
    """
    What a text model is given to go on from.

    Args:
        ids: what it reads.
        boundaries: places worth a checkpoint, ascending.
        is_guest: a helper call beside the session's main thread.
        session: whose conversation it is, for caps and logs.
        own_len: tokens up to the end of the first turn that the model wrote for this
            conversation; 0: none is known.
        salt: what is stored under another cache salt is not for it.
        epoch: of the KV store when it was begun (core/ports); None: of its admission.
    """

    ids: ModelIds
    boundaries: tuple[Boundary, ...] = ()
    is_guest: bool = False
    session: str = ""
    own_len: int = 0
    salt: str = ""
    epoch: int | None = None
