"""
Prompt text -> ids, incrementally.

Text is cut where an added token begins, each piece starting with its token, and the
ids of a piece come from a cache: a turn costs its new text, not the whole history.
That pieces give the ids of the whole is checked per tokenizer at load; where it does
not hold, whole texts are encoded.
"""

import bisect
import itertools
import re
import threading
from array import array
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sidecar.core.prompt import ChatTokenizer
from sidecar.infra.lru import Lru

_MAX_PIECES = 65536
_MAX_SYSTEM_TEXTS = 256
_MAX_CACHED_CHARS = 8 << 20  # with their ids some 10 bytes each
_LONG = 2048
_LINE = re.compile(r"\n(?=\S)")
_SAMPLE = "zq: user text,\n\tcode(1) naïve 東京 \U0001f600 tail  "


@dataclass(frozen=True, slots=True)
class Encoded:
    """
    Ids of a text and where its pieces begin.

    Args:
        chars, tokens: offset of each piece in characters and in ids, ascending.
    """

    ids: tuple[int, ...]
    chars: tuple[int, ...]
    tokens: tuple[int, ...]

    def piece_at(self, char: int) -> int:
        """Number of the piece that holds a character."""
        return max(0, bisect.bisect_right(self.chars, char) - 1)

    def end_of_piece(self, char: int) -> int:
        """Where, in ids, the piece that holds a character ends."""
        following = self.piece_at(char) + 1
        return self.tokens[following] if following < len(self.tokens) else len(self.ids)


class PromptEncoder:
    """
    Tokenises prompts. Safe from any thread.

    A fast tokenizer's Rust core is called directly: it takes no lock and does not
    touch the truncation state, which the Python layer sets on every call.
    """

    def __init__(self, tokenizer: ChatTokenizer, as_text: Collection[str] = ()) -> None:
        """
        Find out how a tokenizer can be fed.

        Args:
            as_text: added tokens that a text cannot name: in it they are characters.
        """
        self._tokenizer = tokenizer
        self._as_text = _any_of(as_text)
        self._lock = threading.Lock()
        self._core = _usable_core(tokenizer)
        self._pieces: Lru[str, tuple[int, ...]] = Lru(
            _MAX_PIECES, _MAX_CACHED_CHARS, lambda text, ids: len(text)
        )
        # Offsets are asked for in system texts only, and those are few.
        self._starts: Lru[str, array[int]] = Lru(
            _MAX_SYSTEM_TEXTS, _MAX_CACHED_CHARS, lambda text, starts: len(text)
        )
        self._tokens = _added_tokens(tokenizer)
        self._stops = _stop_tokens(tokenizer)
        self._cut = self._tokens
        self._first_ids = self._special_ids()
        self._cuts_lines = False
        if self._cut is not None and not self._pieces_agree():
            self._cut = None
        self._cuts_lines = self._cut is not None and self._lines_agree()

    @property
    def num_remembered(self) -> int:
        """Texts whose ids are kept."""
        return len(self._pieces) + len(self._starts)

    def clear(self) -> None:
        """Forget all texts."""
        self._pieces.clear()
        self._starts.clear()

    @property
    def is_incremental(self) -> bool:
        """Whether this tokenizer can be fed piece by piece."""
        return self._cut is not None

    def encode(self, text: str, *, is_start: bool = True) -> Encoded:
        """
        Ids of a rendered text.

        Args:
            is_start: the prompt begins here: special tokens are added unless the
                text has them.
        """
        if self._as_text is not None and self._as_text.search(text):
            return self._in_pieces(text, is_start=is_start)
        return self._encode(text, is_start=is_start)

    def _in_pieces(self, text: str, *, is_start: bool) -> Encoded:
        """Cut inside of each token that shall be text: no half of one is a token."""
        assert self._as_text is not None
        cuts = [0, *(m.start() + 1 for m in self._as_text.finditer(text)), len(text)]
        ids: list[int] = []
        chars: list[int] = []
        tokens: list[int] = []
        for start, end in itertools.pairwise(cuts):
            part = self._encode(text[start:end], is_start=is_start and not start)
            chars += [start + char for char in part.chars]
            tokens += [len(ids) + token for token in part.tokens]
            ids += part.ids
        return Encoded(tuple(ids), tuple(chars), tuple(tokens))

    def _encode(self, text: str, *, is_start: bool) -> Encoded:
        bos = self._tokenizer.bos_token
        special = is_start and not (bos and text.startswith(bos))
        if self._cut is None:
            ids = tuple(self._ids(text, special))
            return Encoded(ids, (0,), (0,))
        return self._join(self._split(text), self._first_ids if special else ())

    def count(self, text: str) -> int:
        """How many ids a text has by itself; nothing of it is remembered."""
        return len(self._ids(text, add_special_tokens=False))

    def counter_before(self, text: str) -> Callable[[int], int]:
        """For a piece: how many of its ids begin before a character of it."""
        if self._core is None:
            num_ids = len(self.encode(text, is_start=False).ids)
            return lambda char: num_ids
        starts = self._starts.get(text)
        if starts is None:
            (encoded,) = self._core.encode_batch([text], add_special_tokens=False)
            offsets = encoded.offsets
            starts = array("I", (start for start, _ in offsets))
            self._starts.put(text, starts)
        found = starts
        return lambda char: bisect.bisect_left(found, char)

    def before_token(self, text: str, at: int) -> int:
        """The last place up to `at` that is inside no added token."""
        for match in self._tokens.finditer(text) if self._tokens else ():
            if match.start() < at < match.end():
                return match.start()
        return at

    def begins_token(self, text: str, at: int) -> bool:
        """Whether an added token begins there, or the text ends."""
        return at == len(text) or bool(self._tokens and self._tokens.match(text, at))

    def find_stop(self, text: str) -> int:
        """Where the first token that ends a turn begins; -1: there is none."""
        for match in self._tokens.finditer(text) if self._tokens else ():
            if match.group() in self._stops:
                return match.start()
        return -1

    def _split(self, text: str) -> Iterable[str]:
        assert self._cut is not None
        starts = [match.start() for match in self._cut.finditer(text)]
        if not starts or starts[0] > 0:
            starts.insert(0, 0)
        ends = [*starts[1:], len(text)]
        return (text[a:b] for a, b in zip(starts, ends, strict=True) if b > a)

    def _join(self, pieces: Iterable[str], first: tuple[int, ...]) -> Encoded:
        ids = list(first)
        chars, tokens = [0], [0]
        at = 0
        for piece in pieces:
            if at:
                chars.append(at)
                tokens.append(len(ids))
            ids += self._piece_ids(piece)
            at += len(piece)
        return Encoded(tuple(ids), tuple(chars), tuple(tokens))

    def _piece_ids(self, piece: str) -> tuple[int, ...]:
        known = self._pieces.get(piece)
        if known is None:
            lines = _lines(piece) if self._cuts_lines else [piece]
            if len(lines) == 1:
                known = tuple(self._ids(piece, add_special_tokens=False))
            else:
                known = tuple(chain.from_iterable(map(self._piece_ids, lines)))
            self._pieces.put(piece, known)
        return known

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._core is not None:
            return _core_ids(self._core, text, add_special_tokens)
        with self._lock:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _special_ids(self) -> tuple[int, ...]:
        """What is put before a text; a tokenizer that also adds behind is not cut."""
        plain, full = self._ids("zq", False), self._ids("zq", True)
        if full[len(full) - len(plain) :] != plain:
            self._cut = None
        return tuple(full[: len(full) - len(plain)])

    def _lines_agree(self) -> bool:
        """Whether text may also be cut where a line begins."""
        ends = ("\n", "\n\n", ".\n", " \n", ">\n\n", "1\n", "\r\n")
        text = "".join(f"{_SAMPLE}{a}Line{b}{{x}}{a}# 7{b}" for a in ends for b in ends)
        cut = [i for line in _lines(text, 1) for i in self._ids(line, False)]
        return cut == self._ids(text, False)

    def _pieces_agree(self) -> bool:
        added = sorted(self._tokenizer.get_added_vocab())[:64]
        turns = [f"{token}{_SAMPLE}\n{token}" for token in added]
        for text in (_SAMPLE, "".join(turns), *turns[:16]):
            for special in (True, False):
                whole = tuple(self._ids(text, special))
                first = self._first_ids if special else ()
                if self._join(self._split(text), first).ids != whole:
                    return False
        return True


def _lines(text: str, minimum: int = _LONG) -> list[str]:
    """A long text cut where its lines begin: a changed line is one new piece."""
    if len(text) < minimum:
        return [text]
    cuts = [0, *(m.end() for m in _LINE.finditer(text)), len(text)]
    return [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False) if b > a]


def _added_tokens(tokenizer: ChatTokenizer) -> re.Pattern[str] | None:
    return _any_of(tokenizer.get_added_vocab())


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return (
        re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
    )


def _stop_tokens(tokenizer: ChatTokenizer) -> frozenset[str]:
    stop_ids = set(tokenizer.eos_token_ids)
    added = tokenizer.get_added_vocab().items()
    return frozenset(token for token, number in added if number in stop_ids)


def _usable_core(tokenizer: ChatTokenizer) -> Any:
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return None
    for special in (True, False):
        wanted = tokenizer.encode(_SAMPLE, add_special_tokens=special)
        if _core_ids(core, _SAMPLE, special) != wanted:
            return None
    return core


def _core_ids(core: Any, text: str, special: bool) -> list[int]:
    # `encode` keeps the interpreter's lock to its end: a megabyte held all others up
    # for a second. The same for a batch gives it back.
    return list(core.encode_batch_fast([text], add_special_tokens=special)[0].ids)
