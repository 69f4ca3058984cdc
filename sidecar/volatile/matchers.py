"""
Finds volatile text: one function for each `shape` that a rule in rules.toml names.

Each shape is a small function: text and arguments in, (start, end) pairs out, in
order, not overlapping. No pattern crosses lines by a wildcard. Running a shape twice
gives the same result.

Anybody may have written the text. So each shape reads it once, whatever it says: what
it searches for next is searched for from where the last search ended, and no text is
read for two places that a find may begin at. A shape looks at `MAX_PLACES` such
places at most; behind them all is ordinary text.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice

from sidecar.volatile.value_patterns import GRAMMARS

Range = tuple[int, int]
MAX_PLACES = 4096
_MAX_LINES = 65536
_MAX_LINE_CHARS = 512
_MAX_PATTERN_CHARS = 4096
_MAX_DESCRIPTION_LINES = 10
_MAX_TAGGED_CHARS = 16 * 1024
_MAX_BLOCK_LINES = 2000
_MAX_JSON_CHARS = 256 * 1024
_SPACE = re.compile(r"\s*")
_NEWLINES = re.compile(r"\n*")
_LABEL = re.compile(r"\[[^\]\n]{1,64}\] ")
_END_OF_PARAGRAPH = re.compile(r"\n(?=[\n#])")


def _lines(text: str, start: int = 0) -> Iterator[Range]:
    """(start, end) of each line from `start`, the newline included in the end."""
    while start < len(text):
        end = _end_of_line(text, start)
        yield start, end
        start = end


def _content(text: str, line: Range) -> str:
    return text[line[0] : line[1]].removesuffix("\n")


def _starts(text: str, prefix: str, at: int = 0) -> Iterator[int]:
    """Places from `at`, where a line begins, on where a line starts with `prefix`."""
    if text.startswith(prefix, at):
        yield at
    at = text.find("\n" + prefix, at)
    while at >= 0:
        yield at + 1
        at = text.find("\n" + prefix, at + 1)


def _end_of_line(text: str, at: int) -> int:
    """The place behind the newline of the line at `at`."""
    newline = text.find("\n", at)
    return len(text) if newline < 0 else newline + 1


def _skip_newlines(text: str, at: int) -> int:
    match = _NEWLINES.match(text, at)
    return match.end() if match else at


def _skip_blank_lines(text: str, at: int) -> int:
    """Where the first line begins that holds more than white space."""
    match = _SPACE.match(text, at)
    end = match.end() if match else at
    return end if end == len(text) else max(at, text.rfind("\n", at, end) + 1)


@cache
def _pattern(pattern: str, flags: int = 0) -> re.Pattern[str]:
    return re.compile(pattern, flags)


def json_string(text: str, *, key: str, grammar: str = "") -> list[Range]:
    """The value of `"key": "value"`, 1..256 characters, all of a grammar if named."""
    pattern = _pattern(rf'"{re.escape(key)}"[ \t]*:[ \t]*"([^"\\\n]{{1,256}})"')
    found = islice(pattern.finditer(text), MAX_PLACES)
    return [
        match.span(1)
        for match in found
        if not grammar or GRAMMARS[grammar](match[1]) == len(match[1])
    ]


def line_prefix(text: str, *, prefixes: Sequence[str]) -> list[Range]:
    """Whole lines, newline included, that start with a prefix."""
    found = []
    for prefix in prefixes:
        for at in islice(_starts(text, prefix), MAX_PLACES):
            end = _end_of_line(text, at)
            if end - at <= _MAX_LINE_CHARS:
                found.append((at, end))
    return sorted(found)


def line_pattern(text: str, *, pattern: str) -> list[Range]:
    """Whole lines of the first 65,536, newline included, that match a pattern."""
    compiled = _pattern(pattern)
    return [
        line
        for line in islice(_lines(text), _MAX_LINES)
        if line[1] - line[0] <= _MAX_PATTERN_CHARS
        and compiled.fullmatch(_content(text, line))
    ]


def line_value(text: str, *, prefixes: Sequence[str], grammar: str) -> list[Range]:
    """The value behind a prefix that begins a line, if it fits the grammar."""
    any_prefix = "|".join(map(re.escape, prefixes))
    begins = _pattern(rf"^[ \t]*(?={any_prefix})", re.IGNORECASE | re.MULTILINE)
    found = []
    for match in islice(begins.finditer(text), MAX_PLACES):
        at = match.end()
        content = _content(text, (at, _end_of_line(text, at)))
        for prefix in prefixes:
            if content[: len(prefix)].lower() != prefix.lower():
                continue
            rest = content[len(prefix) :]
            value = rest.lstrip(" \t")
            size = GRAMMARS[grammar](value)
            if size and len(value) < len(rest):
                start = at + len(content) - len(value)
                found.append((start, start + size))
                break
    return found


class _Fences:
    """Closing fences of one text, asked for from places that ascend."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._start = 0
        self._close = -1  # of the last place asked for
        self._num_lines = 0

    def behind(self, start: int) -> tuple[int, int]:
        """Where the next bare fence begins (-1: nowhere), and the lines up to it."""
        text = self._text
        if self._close < 0 or start > self._close:
            if self._start and self._close < 0:
                return -1, 0  # there was none behind an earlier place
            self._close = _bare_fence(text, start)
            self._num_lines = text.count("\n", start, self._close)
        else:
            self._num_lines -= text.count("\n", self._start, start)
        self._start = start
        return self._close, self._num_lines


def _bare_fence(text: str, start: int) -> int:
    if text.startswith("```\n", start):
        return start
    at = text.find("\n```\n", start) + 1
    if at:
        return at
    last = len(text) - 3
    return last if last >= start and text.endswith("\n```") else -1


def fenced_section(
    text: str,
    *,
    header: str,
    language: str,
    above: str | None = None,
    anchor: str | None = None,
    header_is_prefix: bool = False,
) -> list[Range]:
    """
    A header line, 0..10 description lines, and a closed fence; once in a text.

    The newline after the fence and empty lines belong to it, and so does the line
    `above` if it stands directly there. Absent, with one line starting with
    `anchor`: an empty range at that line, so that both cases look alike.
    """
    fences = _Fences(text)
    for at in islice(_starts(text, header), MAX_PLACES):
        end_of_header = _end_of_line(text, at)
        is_line = text[at + len(header) : end_of_header].strip("\n") == ""
        if not (header_is_prefix or is_line):
            continue
        end = _fence_end(text, end_of_header, language, fences)
        if end is None:
            continue
        if above is not None and text.endswith(f"{above}\n", 0, at):
            candidate = at - len(above) - 1
            if candidate == 0 or text[candidate - 1] == "\n":
                at = candidate
        return [(at, _skip_newlines(text, end))]
    anchors = list(islice(_starts(text, anchor), 2)) if anchor else []
    if len(anchors) == 1 and next(_starts(text, header), None) is None:
        return [(anchors[0], anchors[0])]
    return []


def _fence_end(text: str, start: int, language: str, fences: _Fences) -> int | None:
    """End of a fenced block that begins within the description lines."""
    at = start
    for _ in range(_MAX_DESCRIPTION_LINES + 1):
        at = _skip_blank_lines(text, at)
        if text.startswith(f"```{language}", at):
            return _closed_fence(text, _end_of_line(text, at), language, fences)
        if at >= len(text) or text[at] == "#":
            return None
        at = _end_of_line(text, at)
    return None


def _closed_fence(text: str, start: int, language: str, fences: _Fences) -> int | None:
    close, num_lines = fences.behind(start)
    if close < 0 or num_lines > _MAX_BLOCK_LINES:
        return None
    is_good = language != "json" or _is_json_object(text, start, close)
    return _end_of_line(text, close) if is_good else None


def _is_json_object(text: str, start: int, end: int) -> bool:
    # A line that begins with a fence is no JSON: so no text is tried for two blocks.
    is_broken = (
        text.startswith("```", start, end) or text.find("\n```", start, end) >= 0
    )
    if end - start > _MAX_JSON_CHARS or is_broken:
        return False
    try:
        return isinstance(json.loads(text[start:end]), dict)
    except (ValueError, RecursionError):  # no JSON, or nested beyond reason
        return False


def fenced_blocks(text: str, *, header_suffix: str, language: str) -> list[Range]:
    """
    Headers ending in `header_suffix`, each with a fence and empty lines behind it.

    The first header may stand behind `[..] ` on its line; blocks in a row are one.
    """
    found: list[Range] = []
    fences = _Fences(text)
    head = f"{header_suffix}\n```{language}\n"
    for match in islice(_pattern(re.escape(head)).finditer(text), MAX_PLACES):
        line_start = text.rfind("\n", 0, match.start()) + 1
        end = _closed_fence(text, match.end(), language, fences)
        if end is None or (found and line_start < found[-1][1]):
            continue
        end = _skip_newlines(text, end)
        if found and found[-1][1] == line_start:
            found[-1] = (found[-1][0], end)
            continue
        label = _LABEL.match(text, line_start, match.end())
        found.append((label.end() if label else line_start, end))
    return found


def tagged(
    text: str, *, tag: str, begins: str, grammar: str | None = None
) -> list[Range]:
    """
    `<tag>..</tag>` at the start of a line, not nested; its newline behind it.

    `grammar`: of all that stands inside, if it may be nothing else.
    """
    opener = _pattern(re.escape(f"<{tag}>"), re.IGNORECASE | re.ASCII)
    closer = _pattern(re.escape(f"</{tag}>"), re.IGNORECASE | re.ASCII)
    found: list[Range] = []
    close: re.Match[str] | None = None
    barred_until = 0  # inside a nested pair nothing counts
    for match in opener.finditer(text):
        at, inside_at = match.span()
        if at < barred_until or (at and text[at - 1] != "\n"):
            continue
        if close is None or close.start() < at:
            close = closer.search(text, at)
        if close is None or len(found) >= MAX_PLACES:
            break
        if close.start() - at > _MAX_TAGGED_CHARS:
            continue
        if opener.search(text, inside_at, close.start()):
            barred_until = close.start()
        elif _fits(text[inside_at : close.start()], begins, grammar):
            end = close.end()
            has_newline = bool(begins) and text[end : end + 1] == "\n"
            found.append((at, end + has_newline))
    return found


def _fits(inside: str, begins: str, grammar: str | None) -> bool:
    if not inside.lstrip("\n").startswith(begins):
        return False
    inside = inside.strip()
    return grammar is None or _is_all(inside, grammar)


def paragraph(text: str, *, first: Sequence[str], after_end: int | None) -> list[Range]:
    """
    The paragraph that begins with one of the words right behind another find.

    `after_end`: where the other find ends (None: there was none). Its own newlines
    belong to it; absent, an empty range at that place.
    """
    if after_end is None:
        return []
    start = _skip_newlines(text, after_end)
    if not text.startswith(tuple(first), start):
        return [(after_end, after_end)]
    last = _END_OF_PARAGRAPH.search(text, start)
    return [(after_end, last.end() if last else len(text))]


def to_end_of_part(text: str, *, prefix: str) -> list[Range]:
    """From the first line that starts with `prefix` to the end of the part."""
    start = next(_starts(text, prefix), None)
    return [] if start is None else [(start, len(text))]


def lines_while(text: str, *, first: str, grammar: str) -> list[Range]:
    """From a line that starts with `first`, as far as a grammar of lines goes."""
    start = next(_starts(text, first), None)
    size = 0 if start is None else GRAMMARS[grammar](text[start:])
    return [] if start is None or not size else [(start, start + size)]


def lines_until(
    text: str, *, first: str, stop: str, inside: bool = False, grammar: str = ""
) -> list[Range]:
    """
    From a line that starts with `first` up to a line that starts with `stop`.

    `inside`: from behind the first line. `grammar`: of all that stands there.
    """
    start = next(_starts(text, first), None)
    if start is None:
        return []
    start = _end_of_line(text, start) if inside else start
    end = next(_starts(text, stop, start), None)
    if end is None or (grammar and not _is_all(text[start:end], grammar)):
        return []
    return [(start, end)]


def _is_all(text: str, grammar: str) -> bool:
    return GRAMMARS[grammar](text) == len(text)


def enclosed(text: str, *, opener: str, closer: str) -> list[Range]:
    """The whole text, if it begins with `opener` and ends with the first `closer`."""
    inner = text.strip()
    begins_and_ends = inner.startswith(opener) and inner.endswith(closer)
    is_whole = begins_and_ends and inner.find(closer) == len(inner) - len(closer)
    return [(0, len(text))] if is_whole else []


SHAPES: dict[str, Callable[..., list[Range]]] = {
    shape.__name__: shape
    for shape in (
        json_string,
        line_prefix,
        line_pattern,
        line_value,
        fenced_section,
        fenced_blocks,
        tagged,
        paragraph,
        to_end_of_part,
        lines_while,
        lines_until,
        enclosed,
    )
}
