"""A prompt as the engine gets it: ids, images, and the `Hit` that is held of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType, Protocol

from sidecar.core.conversation import Conversation

# What the model reads and KV is stored under, against what lineage is looked up
# by and never reaches a model: the type checker keeps them apart.
ModelIds = NewType("ModelIds", tuple[int, ...])
CanonicalIds = NewType("CanonicalIds", tuple[int, ...])


# Ids from here on were made for images: above any vocabulary, below 2^31.
MADE = 1 << 30
FIRST = 1 << 29  # a bit of those with which an image begins


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


def before_image(ids: Sequence[int], depth: int) -> int:
    """Where the image begins that a prompt cut there would end within; else there."""
    while 0 < depth < len(ids) and ids[depth] >= MADE and not ids[depth] & FIRST:
        depth -= 1
    return depth


def behind_images(ids: Sequence[int]) -> int:
    """The depth behind the last image of a prompt; 0: it has none."""
    made = (at for at in range(len(ids), 0, -1) if ids[at - 1] >= MADE)
    return next(made, 0)


@dataclass(frozen=True, slots=True)
class Retreat:
    """
    Tokens of a prompt whose KV is in memory and cannot be gone on from.

    Args:
        cause: `vlm_retreat`: they end within an image; `hybrid_trim_miss`: some layers
            cannot be cut back to there, and have no checkpoint.
    """

    cause: Literal["vlm_retreat", "hybrid_trim_miss"]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Hit:
    """
    How much of a prompt need not be computed.

    Args:
        memory_len: tokens whose KV is in memory.
        disk_len: tokens whose KV is in memory once the disk's has been restored; 0: the
            disk has no more, or restoring it would take longer than computing.
        restore_s: seconds that restoring takes.
        retreat: what memory has behind `memory_len` in vain; None: nothing.
    """

    memory_len: int = 0
    disk_len: int = 0
    restore_s: float = 0.0
    retreat: Retreat | None = None

    @property
    def cached_len(self) -> int:
        """Tokens that are reused, once what the disk has is restored."""
        return max(self.memory_len, self.disk_len)


# What is held of one form of a prompt; any thread.
Lookup = Callable[[ModelIds, Conversation], Hit]


# Ranks of checkpoints: the end of the system text and the tools, the place before the
# last user message, the end of the prompt's messages, other message ends.
SYSTEM_END, BEFORE_LAST_USER, PROMPT_END, MESSAGE_END = range(4)


@dataclass(frozen=True, slots=True)
class Boundary:
    """
    A place in M worth a checkpoint: another request may end its match there.

    Args:
        rank: lower is worth more: one of the four above.
    """

    depth: int
    rank: int


LOST_SLACK = 32  # tokens: the end of a prompt is always computed


@dataclass(frozen=True, slots=True)
class EarlierTurn:
    """
    The last prompt of a conversation, against the one at hand.

    Args:
        num_tokens, num_messages: of it. num_now: messages of the one at hand.
        num_stable: messages that both begin with.
        is_rest_kept: what stands behind the first message that differs is as it was.
        tools: what differs in the tools that are offered, in words.
    """

    num_tokens: int
    num_messages: int
    num_now: int
    num_stable: int
    is_rest_kept: bool = False
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheReport:
    """
    What was done to reuse KV, for the log and the response headers.

    Args:
        key_delta_chars: see pipeline/reuse/prompt_variants.
        is_new: nothing was stored for this conversation before.
        closest_stop: the kind of value at which the closest prompt could lend no more.
        stable_len: tokens of the messages that are as they were.
        earlier: the conversation's last prompt; None: nothing is known of one.
        shared_len: what is common with the closest prompt, in canonical ids.
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
    closest_stop: str | None = None
    stable_len: int = 0
    earlier: EarlierTurn | None = None
    shared_len: int = 0

    def lost_tokens(self, num_tokens: int, cached_len: int) -> int:
        """
        Tokens of the conversation's last prompt that were computed again.

        Args:
            num_tokens: of the prompt at hand. cached_len: those of it that were reused.
        """
        if self.earlier is None:
            return 0
        lost = min(self.earlier.num_tokens, num_tokens) - cached_len
        return lost if lost > LOST_SLACK else 0


@dataclass(frozen=True, slots=True)
class Divergence:
    """
    Where a prompt first differs from the closest one before it.

    Args:
        is_image: one of them has an image there.
        is_own: that one is of the same conversation.
        line_before, line_now: the lines in which they part, as far as is known.
    """

    depth: int
    message: int
    role: str
    before: str
    now: str
    is_image: bool = False
    is_own: bool = True
    line_before: str = ""
    line_now: str = ""


_SMALL = 4096  # bytes
Pixels = Mapping[str, Any]  # the model's own names -> NumPy arrays


class PixelSource(Protocol):
    """Gives an image's pixels when they are needed; any thread."""

    def start(self) -> None:
        """Have them decoded, without waiting for it."""

    def wait(self) -> None:
        """Until they are decoded."""

    def is_ready(self, timeout_s: float) -> bool:
        """Whether they are here, or have failed, within so many seconds."""

    def get(self) -> Pixels:
        """The arrays; may wait for them."""


def _size(value: Any) -> int:
    return int(getattr(value, "nbytes", 0))


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """
    An image as a model's own processor gives it.

    Args:
        ids: what stands for it in a prompt. pad: which of them its features replace.
        pixels: what the vision tower takes.
    """

    ids: tuple[int, ...]
    pad: int
    pixels: Pixels

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(map(_size, self.pixels.values()))

    @property
    def grid(self) -> Pixels:
        """The small arrays: how its patches lie."""
        return {n: a for n, a in self.pixels.items() if _size(a) <= _SMALL}


@dataclass(frozen=True, slots=True, eq=False)
class SeenImage:
    """
    An image as a model is given it.

    Args:
        mark: stands for it in texts; equal marks, equal images.
        digest: SHA-256 of its pixels and their size, in hex.
        size: width and height in pixels, as the model's processor got it.
        ids: what stands for it in the prompt's key: made ids that no other image has,
            in place of the model's pads (docs/reuse.md).
        read_ids: the same as the model reads it, with the pads.
        grid: how its patches lie, by the model's own names.
        pixels: where what the model's vision tower takes comes from; None: nowhere.
    """

    mark: str
    digest: str
    size: tuple[int, int]
    ids: tuple[int, ...]
    read_ids: tuple[int, ...]
    grid: Pixels
    pixels: "PixelSource | None"

    @property
    def num_bytes(self) -> int:
        """Bytes it takes, about."""
        return 200 + 72 * len(self.ids) + sum(map(_size, self.grid.values()))

    @property
    def label(self) -> str:
        """What people read of it."""
        return f"[image {self.digest[:8]} {self.size[0]}x{self.size[1]}]"


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a prompt: its ids stand from `start` on."""

    start: int
    image: SeenImage

    @property
    def end(self) -> int:
        """Behind its last id."""
        return self.start + len(self.image.ids)


@dataclass(frozen=True, slots=True)
class ModelPrompt:
    """
    What a model is given to go on from.

    Args:
        ids: what it reads, and the key of its KV.
        boundaries: places worth a checkpoint, ascending.
        conversation: that asks; None: no client's, and as new as its admission.
        images: what stands in `ids` for images.
        adapter: the row of the model's bank that it is read with; 0: no adapter.
        window: tokens of it that a context which rotates keeps; None: all.
    """

    ids: ModelIds
    boundaries: tuple[Boundary, ...] = ()
    conversation: Conversation | None = None
    images: tuple[PlacedImage, ...] = ()
    adapter: int = 0
    window: int | None = None

    @property
    def reusable_ids(self) -> ModelIds:
        """As much of it as is computed and kept as any prompt is."""
        return self.ids if self.window is None else ModelIds(self.ids[: self.window])

    @property
    def session(self) -> str:
        """What its conversation is called; "": nothing."""
        return self.conversation.session if self.conversation else ""

    @property
    def is_subagent(self) -> bool:
        """Whether another thread of its session is the main one."""
        return self.conversation is not None and self.conversation.is_subagent

    @property
    def is_batch(self) -> bool:
        """Whether nobody waits for its answer."""
        return self.conversation is not None and self.conversation.is_batch

    @property
    def salt(self) -> str:
        """The prefix tree that holds its KV."""
        return self.conversation.salt if self.conversation else ""

    @property
    def read_ids(self) -> tuple[int, ...]:
        """The ids as the model reads them: pads where images stand."""
        if not self.images:
            return self.ids
        ids = list(self.ids)
        for placed in self.images:
            ids[placed.start : placed.end] = placed.image.read_ids
        return tuple(ids)
