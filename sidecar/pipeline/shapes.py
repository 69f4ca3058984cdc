"""
The closed set of shapes a volatile stretch of text may have.

Each shape is a small function: text and arguments in, (start, end) pairs out, in
order, not overlapping. No pattern crosses lines by a wildcard; blocks are walked
line by line. Running a shape twice gives the same result.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence

from sidecar.pipeline.grammars import GRAMMARS

Range = tuple[int, int]
_MOST_LINE_CHARS = 512
_MOST_DESCRIPTION_LINES = 10
_MOST_TAGGED_CHARS = 16 * 1024
_MOST_BLOCK_LINES = 2000


def _lines(text: str, start: int = 0) -> Iterator[Range]:
    """(start, end) of each line from `start`, the newline included in the end."""
    while start < len(text):
        newline = text.find("\n", start)
        end = len(text) if newline < 0 else newline + 1
        yield start, end
        start = end


def _content(text: str, line: Range) -> str:
    return text[line[0] : line[1]].removesuffix("\n")


def _starts(text: str, prefix: str) -> Iterator[int]:
    """Places where a line starts with `prefix`."""
    at = text.find(prefix)
    while at >= 0:
        if at == 0 or text[at - 1] == "\n":
            yield at
        at = text.find(prefix, at + 1)


def _end_of_line(text: str, at: int) -> int:
    """The place behind the newline of the line at `at`."""
    newline = text.find("\n", at)
    return len(text) if newline < 0 else newline + 1


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] == "\n":
        at += 1
    return at


def json_string(text: str, *, key: str) -> list[Range]:
    """The value of `"key": "value"`, 1..256 characters."""
    pattern = re.compile(rf'"{re.escape(key)}"[ \t]*:[ \t]*"([^"\\\n]{{1,256}})"')
    return [match.span(1) for match in pattern.finditer(text)]


def line_prefix(text: str, *, prefixes: Sequence[str]) -> list[Range]:
    """Whole lines, newline included, that start with a prefix."""
    found = []
    for prefix in prefixes:
        for at in _starts(text, prefix):
            end = _end_of_line(text, at)
            if end - at <= _MOST_LINE_CHARS:
                found.append((at, end))
    return sorted(found)


def line_pattern(text: str, *, pattern: str) -> list[Range]:
    """Whole lines, newline included, that match a pattern."""
    compiled = re.compile(pattern)
    return [line for line in _lines(text) if compiled.fullmatch(_content(text, line))]


def line_value(text: str, *, prefixes: Sequence[str], grammar: str) -> list[Range]:
    """The value behind a prefix at the start of a line, if it fits the grammar."""
    found = []
    for line in _lines(text):
        content = _content(text, line)
        for prefix in prefixes:
            if content[: len(prefix)].lower() != prefix.lower():
                continue
            rest = content[len(prefix) :]
            start = line[0] + len(prefix) + len(rest) - len(rest.lstrip(" \t"))
            size = GRAMMARS[grammar](text[start : line[0] + len(content)])
            if size and start > line[0] + len(prefix):
                found.append((start, start + size))
                break
    return found


def fenced_section(  # noqa: PLR0913 - the arguments of a rule, by name
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
    for at in _starts(text, header):
        end_of_header = _end_of_line(text, at)
        if not header_is_prefix and text[at:end_of_header].rstrip("\n") != header:
            continue
        end = _fence_end(text, end_of_header, language)
        if end is None:
            continue
        if above is not None and text[:at].endswith(f"{above}\n"):
            candidate = at - len(above) - 1
            if candidate == 0 or text[candidate - 1] == "\n":
                at = candidate
        return [(at, _skip_blank(text, end))]
    anchors = list(_starts(text, anchor)) if anchor else []
    if len(anchors) == 1 and not list(_starts(text, header)):
        return [(anchors[0], anchors[0])]
    return []


def _fence_end(text: str, start: int, language: str) -> int | None:
    """End of a fenced block that begins within the description lines."""
    number_described = 0
    for line in _lines(text, start):
        content = _content(text, line)
        if content.startswith(f"```{language}"):
            return _closed_fence(text, line[1], language)
        if content.strip():
            number_described += 1
        if number_described > _MOST_DESCRIPTION_LINES or content.startswith("#"):
            return None
    return None


def _closed_fence(text: str, start: int, language: str) -> int | None:
    for number, line in enumerate(_lines(text, start)):
        if number > _MOST_BLOCK_LINES:
            return None
        if _content(text, line) == "```":
            body = text[start : line[0]]
            return line[1] if language != "json" or _is_json_object(body) else None
    return None


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def fenced_blocks(text: str, *, header_suffix: str, language: str) -> list[Range]:
    """
    Headers ending in `header_suffix`, each with a fence and empty lines behind it.

    The first header may stand behind `[..] ` on its line; blocks in a row are one.
    """
    found: list[Range] = []
    for line in _lines(text):
        content = _content(text, line)
        if not content.endswith(header_suffix) or (found and line[0] < found[-1][1]):
            continue
        fence = text.startswith(f"```{language}\n", line[1])
        end = _closed_fence(text, _end_of_line(text, line[1]), language)
        if not fence or end is None:
            continue
        end = _skip_blank(text, end)
        label = re.match(r"\[[^\]\n]{1,64}\] ", content)
        start = line[0] + (label.end() if label else 0)
        if found and found[-1][1] == line[0]:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def tagged(
    text: str, *, tag: str, begins: str, grammar: str | None = None
) -> list[Range]:
    """
    `<tag>..</tag>` at the start of a line, not nested; its newline behind it.

    `grammar`: of all that stands inside, if it may be nothing else.
    """
    opener, closer = f"<{tag}>", f"</{tag}>"
    lower = text.lower()
    found: list[Range] = []
    barred_until = 0  # inside a nested pair nothing counts
    for at in _starts(lower, opener):
        end = lower.find(closer, at)
        if end < 0 or end - at > _MOST_TAGGED_CHARS or at < barred_until:
            continue
        inside = text[at + len(opener) : end]
        if opener in inside.lower():
            barred_until = end
            continue
        if begins and not inside.lstrip("\n").startswith(begins):
            continue
        if grammar and GRAMMARS[grammar](inside.strip()) != len(inside.strip()):
            continue
        end += len(closer)
        found.append((at, end + 1 if begins and text[end : end + 1] == "\n" else end))
    return found


def paragraph(text: str, *, first: Sequence[str], after_end: int | None) -> list[Range]:
    """
    The paragraph that begins with one of the words right behind another find.

    `after_end`: where the other find ends (None: there was none). Its own newlines
    belong to it; absent, an empty range at that place.
    """
    if after_end is None:
        return []
    start = _skip_blank(text, after_end)
    if not text.startswith(tuple(first), start):
        return [(after_end, after_end)]
    end = _end_of_line(text, start)
    while end < len(text) and text[end] not in "\n#":
        end = _end_of_line(text, end)
    return [(after_end if after_end < start else start, end)]


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
    text: str, *, first: str, stop: str, inside: bool = False
) -> list[Range]:
    """
    From a line that starts with `first` up to a line that starts with `stop`.

    `inside`: from behind the first line.
    """
    start = next(_starts(text, first), None)
    if start is None:
        return []
    start = _end_of_line(text, start) if inside else start
    end = next((at for at in _starts(text, stop) if at >= start), None)
    return [] if end is None else [(start, end)]


def enclosed(text: str, *, opener: str, closer: str) -> list[Range]:
    """The whole text, if it begins with `opener` and ends with the first `closer`."""
    inner = text.strip()
    begins_and_ends = inner.startswith(opener) and inner.endswith(closer)
    is_whole = begins_and_ends and inner.find(closer) == len(inner) - len(closer)
    return [(0, len(text))] if is_whole else []


SHAPES: dict[str, Callable[..., list[Range]]] = {
    shape.__name__: shape
    for shape in (
        json_string, line_prefix, line_pattern, line_value, fenced_section,
        fenced_blocks, tagged, paragraph, to_end_of_part, lines_while,
        lines_until, enclosed,
    )
}  # fmt: skip
