"""
Elements and values -> ids: those the model reads (M) and those for lookup (C).

Prompts far too long for the model are refused before they are tokenised whole: ten
megabytes take a tokenizer many seconds, and the first tenth tells as much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sidecar.core.errors import ContextLengthExceeded
from sidecar.core.prompt import (
    BEFORE_LAST_USER,
    MESSAGE_END,
    PROMPT_END,
    SYSTEM_END,
    Boundary,
    CanonicalIds,
    ModelIds,
    PlacedImage,
    SeenImage,
)
from sidecar.memory.lineage import BLOCK_LEN
from sidecar.pipeline.template.elements import Element, ImageSlot, Splice
from sidecar.pipeline.template.encoder import Encoded, PromptEncoder
from sidecar.volatile.marked_message import MarkedMessage, Span, SpanKey

_CHARS_A_TOKEN = 8  # a text below this is tokenised whole: it may well fit
_MAX_CUT = 16  # ids that a cut inside a word may add: its halves' own


def check_length(
    elements: Sequence[Element],
    encoder: PromptEncoder,
    max_tokens: int,
    param: str = "messages",
) -> None:
    """
    Refuse a prompt that certainly has more ids than allowed.

    Args:
        param: the request's field that it is made of.

    Raises:
        ContextLengthExceeded: with the number of ids that were counted.
    """
    if sum(map(_num_chars, elements)) <= max_tokens * _CHARS_A_TOKEN:
        return
    num_ids = 0
    for element in elements:
        num_ids += _min_ids(element, encoder, max_tokens - num_ids)
        if num_ids > max_tokens:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {max_tokens + 1} tokens, "
                f"and the prompt has more than {num_ids}",
                param=param,
                num_tokens=num_ids,
            )


def _num_chars(element: Element) -> int:
    if isinstance(element, str):
        return len(element)
    if isinstance(element, ImageSlot):
        return len(element.image.ids) * _CHARS_A_TOKEN
    return len(element.value if isinstance(element, Span) else element.healed.raw_text)


def _min_ids(element: Element, encoder: PromptEncoder, maximum: int) -> int:
    """Read a text in parts until it has more than so many ids; how many it has."""
    if isinstance(element, Splice):
        return len(element.healed.raw_ids)
    if isinstance(element, ImageSlot):
        return len(element.image.ids)
    text = element.value if isinstance(element, Span) else element
    num_ids = start = 0
    while start < len(text) and num_ids <= maximum:
        end = start + max(maximum, 1024) * 2
        end = text.rfind("\n", start + 1, end) + 1 or end
        found = encoder.count(text[start:end])
        num_ids += max(0, found - _MAX_CUT)
        start = end
    return num_ids


@dataclass(frozen=True, slots=True)
class Canonical:
    """
    C, and for each span the depth in C behind which it counts as matched.

    A span counts once its whole message is matched or, inside a system message, one
    more block behind it: else a block that is gone would be put before a different
    message.

    Args:
        begins: where in C messages with spans begin, their headers included if an
            added token begins those.
    """

    ids: CanonicalIds
    settled: Mapping[SpanKey, int]
    begins: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assembled:
    """
    M, and the depths in it where messages begin.

    Args:
        boundaries: (depth, message index) ascending; a checkpoint there serves any
            request that shares the messages before it.
        texts: before, between and behind images. images: where each stands, in order.
    """

    ids: ModelIds
    texts: tuple[str, ...]
    boundaries: tuple[tuple[int, int], ...]
    images: tuple[PlacedImage, ...] = ()

    @property
    def text(self) -> str:
        """All of it as text, each image as what people read of it."""
        first, *others = self.texts
        labels = [placed.image.label for placed in self.images]
        return first + "".join(map("".join, zip(labels, others, strict=True)))


def canonical_ids(
    elements: Sequence[Element], roles: Sequence[str], encoder: PromptEncoder
) -> Canonical:
    """Encode K: sentinels for spans, digests for spliced turns."""
    pieces: list[str] = []
    places: list[tuple[Span, int]] = []
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    at = 0
    for element in elements:
        if isinstance(element, Span):
            starts.setdefault(element.message, at)
            text = element.sentinel
            places.append((element, at + len(text)))
            ends[element.message] = at + len(text)
        elif isinstance(element, Splice):
            text = f"{element.healed.lead}[turn {element.healed.digest}]"
        elif isinstance(element, ImageSlot):
            text = element.image.mark
        else:
            text = element
        pieces.append(text)
        at += len(text)
    whole = "".join(pieces)
    encoded = encoder.encode(whole)
    depths = _Depths(whole, encoded, encoder)
    settled = {
        span.key: (
            depths.at(place) + BLOCK_LEN
            if roles[span.message] == "system"
            # and what ends the message, else a longer one counts as the same
            else encoded.end_of_piece(max(0, ends[span.message] - 1)) + 1
        )
        for span, place in places
    }
    begins = {
        message: encoded.tokens[encoded.piece_at(max(0, char - 1))]
        for message, char in starts.items()
    }
    return Canonical(CanonicalIds(encoded.ids), settled, begins)


class _Depths:
    """How many ids begin before a character; a piece is looked at once."""

    def __init__(self, whole: str, encoded: Encoded, encoder: PromptEncoder) -> None:
        self._whole = whole
        self._encoded = encoded
        self._encoder = encoder
        self._counts: dict[int, Callable[[int], int]] = {}

    def at(self, char: int) -> int:
        encoded = self._encoded
        number = encoded.piece_at(max(0, char - 1))
        start = encoded.chars[number]
        is_last = number + 1 == len(encoded.chars)
        end = len(self._whole) if is_last else encoded.chars[number + 1]
        if char >= end:
            return encoded.end_of_piece(max(0, char - 1))
        if char == start:
            return encoded.tokens[number]
        if number not in self._counts:
            piece = self._whole[start:end]
            self._counts[number] = self._encoder.counter_before(piece)
        return encoded.tokens[number] + self._counts[number](char - start)


def model_ids(
    elements: Sequence[Element],
    values: Mapping[SpanKey, str],
    encoder: PromptEncoder,
    header_tokens: int,
) -> Assembled:
    """
    Encode M: values for spans, raw ids for spliced turns.

    Args:
        values: values that stand in place of the request's own.
        header_tokens: added tokens in a message header, to find where it begins.
    """
    builder = _Builder(encoder, header_tokens)
    for element in elements:
        if isinstance(element, str):
            builder.add_text(element)
        elif isinstance(element, Span):
            if element.kind == "edge_ws":
                builder.note_content_start(element.message)
            value = values.get(element.key, element.value)
            builder.add_text(element.printed(value))
        elif isinstance(element, ImageSlot):
            builder.add_image(element.image)
        else:
            builder.note_content_start(element.message)
            builder.add_turn(element)
    return builder.finish()


class _Builder:
    def __init__(self, encoder: PromptEncoder, header_tokens: int) -> None:
        self._encoder = encoder
        self._header_tokens = max(1, header_tokens)
        self._ids: list[int] = []
        self._texts = [""]  # between images
        self._segment: list[str] = []
        self._segment_len = 0
        self._starts: list[tuple[int, int]] = []  # char in segment, message
        self._boundaries: dict[int, int] = {}
        self._images: list[PlacedImage] = []

    def add_text(self, text: str) -> None:
        self._segment.append(text)
        self._segment_len += len(text)

    def note_content_start(self, message: int) -> None:
        self._starts.append((self._segment_len, message))

    def add_turn(self, splice: Splice) -> None:
        self._flush()
        self._ids += splice.healed.raw_ids
        self._texts[-1] += splice.healed.raw_text

    def add_image(self, image: SeenImage) -> None:
        self._flush()
        self._images.append(PlacedImage(len(self._ids), image))
        self._ids += image.ids
        self._texts.append("")

    def finish(self) -> Assembled:
        self.note_content_start(1 << 30)  # the turn the model is to write
        self._flush()
        pairs = sorted((depth, message) for message, depth in self._boundaries.items())
        return Assembled(
            ModelIds(tuple(self._ids)),
            tuple(self._texts),
            tuple(pairs),
            tuple(self._images),
        )

    def _flush(self) -> None:
        text = "".join(self._segment)
        encoded = self._encoder.encode(text, is_start=not self._ids)
        for char, message in self._starts:
            piece = encoded.piece_at(max(0, char - 1)) - (self._header_tokens - 1)
            if message not in self._boundaries and piece >= 0:
                self._boundaries[message] = len(self._ids) + encoded.tokens[piece]
        self._ids += encoded.ids
        self._texts[-1] += text
        self._segment, self._segment_len, self._starts = [], 0, []


def says_its_text(
    said: Assembled, encoder: PromptEncoder, decode: Callable[[list[int]], str]
) -> bool:
    """CACHE_VERIFY: the ids are those of the text that was put together."""
    starts = [0, *(image.end for image in said.images)]
    ends = [*(image.start for image in said.images), len(said.ids)]
    for text, start, end in zip(said.texts, starts, ends, strict=True):
        wanted = encoder.encode(text, is_start=not start).ids
        # Some decoders add or take spaces.
        if decode(list(said.ids[start:end])) != decode(list(wanted)):
            return False
    return True


def end_of_message(found: Sequence[tuple[int, int]], message: int | None) -> int:
    """The depth at which the message behind it begins; 0 if that is not known."""
    if message is None:
        return 0
    return next((depth for depth, number in found if number > message), 0)


def rank_boundaries(
    found: Sequence[tuple[int, int]], marked: Sequence[MarkedMessage]
) -> tuple[Boundary, ...]:
    """Rank the places where messages begin by how likely a match ends there."""
    roles = [item.message.role for item in marked]
    users = [i for i, role in enumerate(roles) if role == "user"]
    first = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    ranked: dict[int, int] = {}
    for depth, message in found:
        if message == first:
            rank = SYSTEM_END
        elif users and message == users[-1]:
            rank = BEFORE_LAST_USER
        else:
            rank = PROMPT_END if message >= len(roles) else MESSAGE_END
        ranked[depth] = min(rank, ranked.get(depth, rank))
    return tuple(Boundary(d, r) for d, r in sorted(ranked.items()) if d > 0)
