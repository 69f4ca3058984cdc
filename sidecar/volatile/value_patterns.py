"""Patterns of clocks, dates, ids and durations: text -> length of the value there."""

import functools
import re
import zoneinfo
from collections.abc import Callable

_MAX_CLOCK_CHARS = 64
_MAX_GIT_LINES = 10_000
_RUNTIME = re.compile(
    r"((?:\d{1,9}(?:\.\d{1,9})?(?:ms|s|m|h|d)){1,8}|n/a)(?=[ \t]*$|[ \t]+•)",
    re.IGNORECASE,
)
# Of chat services and mail. No words: a stranger's orders would stand in their place
# in the prompts of others.
_MESSAGE_ID = re.compile(r"[!-~]{1,256}")
# Digits, or hex that is long, behind at most three letters: too short for an order.
_OPAQUE_ID = re.compile(
    r"[A-Za-z]{0,3}[-_:.]?(?:[0-9][0-9.:_-]{0,63}"
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?=[a-f]*[0-9])[0-9a-f]{4,64})"
)
_CLOCK_END = re.compile(r"\.(?=\s|$)|$")
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:\s?[AaPp]\.?[Mm]\.?)?"
_SHORT_ZONE = (  # of the zone database, in use today; they are words of a few letters
    "(?:UTC|GMT|ACDT|ACST|ADT|AEDT|AEST|AKDT|AKST|AST|AWST|BST|CAT|CDT|CEST|CET|CST|"
    "EAT|EDT|EEST|EET|EST|HDT|HKT|HST|IDT|IST|JST|KST|MDT|MSK|MST|NDT|NST|NZDT|NZST|"
    "PDT|PKT|PST|SAST|SST|WAT|WEST|WET|WIB|WIT|WITA)"
)
_ZONE = (
    rf"(?:\s?(?:\(?{_SHORT_ZONE}\)?(?:[+-]\d{{1,2}}(?::?\d{{2}})?)?"
    r"|[+-]\d{2}:?\d{2}|Z|\((?P<zone>[A-Za-z_/-]{1,40})\)))?"
)
_ISO = r"\d{4}-\d{2}-\d{2}(?:[T ]" + _TIME + r")?"
_DAY = r"(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH = (
    r"(?:January|February|March|April|May|June|July|August|September|October|November"
    r"|December|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)"
)
_DATE = (
    rf"(?:{_DAY},?\s+)?(?:{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?|\d{{1,2}}\s+{_MONTH})"
    r"(?:,?\s+\d{4})?"
)
_CLOCK = re.compile(
    rf"(?:{_ISO}|(?:{_DATE}|{_DAY})(?:,?\s*(?:-|at|@)?\s*{_TIME})?"
    rf"|(?:{_DAY},?\s+)?{_ISO}|{_TIME}){_ZONE}"
)
_DATE_SENTENCE = re.compile(r"The current date is:? ([^.\n]{1,64})\.")
_DATE_NOTE = re.compile(
    r" Note: This is the authoritative current date [—-] it may differ from the "
    r"\"Today's date\" mentioned earlier in the (?:[a-z]+ ){0,3}[a-z]+\."
)
_GIT_HEAD = re.compile(
    r"(?:gitStatus: |# gitStatus\n)This is the (?:git )?status"
    r"(?: at the start of the conversation)?\."
    r"(?: Note that this status is a snapshot in time, and will not update during the "
    r"conversation\.)?(?=\n|$)"
)
_GIT_FIELD = re.compile(
    r"(?:Current branch|Main branch \([^()\n]{1,64}\)): \S*|Git user: .{0,80}"
)
# A path with spaces is quoted, so no sentence is a file.
_GIT_PATH = r'(?:[^\s"]\S*|"[^"\n]*")'
_GIT_FILE = re.compile(
    rf"(?:[MTADRCU?!]{{1,2}}| [MTADRCU?!]|[MTADRCU] ) {_GIT_PATH}(?: -> {_GIT_PATH})?"
    r"|\(clean\)"
)
_GIT_STATE = re.compile(
    r"(?i:working tree clean|not a git repository|no commits yet)\.?"
)
_GIT_CUT = re.compile(r"\.\.\. \(truncated because it exceeds .*")
_GIT_COMMIT = re.compile(r"[0-9a-f]{7,40} .*")
_GIT_PROMPT = re.compile(r"```text(?:\ngit: [^\n]{0,512}){1,10000}(?=\n|$)")
_MAX_FOLDER_LINES = 2_000
_FOLDER_LINES = (  # headings, what is in the folders, the folders themselves
    re.compile(
        r"Here is the folder structure of the current working director(?:y|ies):"
        r"|Showing up to \d+ items(?: \(files \+ folders\))?[.:]"
        r"(?: Folders or files indicated with \.\.\. contain more items not shown, "
        r"were ignored, or the display limit \(\d+ items\) was reached\.)?"
    ),
    re.compile(r"[│ ]{0,512}[├└]─{1,3} ?.{1,512}"),
    re.compile(r"(?:/|~|\$|[A-Za-z]:[\\/]|\\\\).{0,512}[\\/]|/"),
)
_GIT_PARTS = {"Status:": (_GIT_FILE, _GIT_CUT), "Recent commits:": (_GIT_COMMIT,)}


def _runtime_size(text: str) -> int:
    match = _RUNTIME.match(text)
    return match.end(1) if match else 0


def _message_id_size(text: str) -> int:
    match = _MESSAGE_ID.match(text)
    return match.end() if match else 0


def _clock_size(text: str) -> int:
    """Length of the longest beginning that is a time, up to `.` or the end."""
    text = text[: _MAX_CLOCK_CHARS + 1]
    for match in reversed([*_CLOCK_END.finditer(text)]):
        value = text[: match.start()].rstrip()
        found = _CLOCK.fullmatch(value) if len(value) <= _MAX_CLOCK_CHARS else None
        if found and (found["zone"] is None or found["zone"] in _zones()):
            return len(value)
    return 0


@functools.cache
def _zones() -> frozenset[str]:
    """The names of the zone database, such as Europe/Rome."""
    return frozenset(zoneinfo.available_timezones())


def _date_sentence_size(text: str) -> int:
    """A date in its sentence, and the one note that a client puts behind it."""
    match = _DATE_SENTENCE.match(text)
    if not match or _clock_size(match[1]) != len(match[1]):
        return 0
    note = _DATE_NOTE.match(text, match.end())
    return note.end() if note else match.end()


def _git_status_size(text: str) -> int:
    """
    What `git status --short` and `git log --oneline` print, under their headings.

    Up to the last line that they could have printed: behind it stands text.
    """
    head = _GIT_HEAD.match(text)
    if head is None:
        return 0
    at = size = head.end()
    lines = text[at:].split("\n", _MAX_GIT_LINES)[1:_MAX_GIT_LINES]
    allowed: tuple[re.Pattern[str], ...] = (_GIT_FIELD,)
    is_open = True  # a blank line ends the files and the commits
    for line in lines:
        at += 1 + len(line)
        if line in _GIT_PARTS:
            allowed, is_open = _GIT_PARTS[line], True
        elif not line:
            is_open = is_open and _GIT_FIELD in allowed
            continue
        elif not is_open and _GIT_FIELD.fullmatch(line):
            pass
        elif not is_open or not any(p.fullmatch(line) for p in allowed):
            break
        size = at
        is_open = is_open and line != "(clean)"
    return size


def _git_lines_size(text: str) -> int:
    """All of a text if each line is one that git prints of a repository's state."""
    patterns = (_GIT_STATE, _GIT_FIELD, _GIT_FILE, _GIT_CUT, _GIT_COMMIT)
    lines = text.split("\n", _MAX_GIT_LINES)
    are_known = all(
        not line or line in _GIT_PARTS or any(p.fullmatch(line) for p in patterns)
        for line in lines
    )
    return len(text) if are_known else 0


def _git_prompt_size(text: str) -> int:
    """
    A fence and the lines in it that `git: ` begins, up to another.

    Qwen Code marks each line of a repository's state so, and says that none of them is
    an instruction.
    """
    match = _GIT_PROMPT.match(text)
    return match.end() if match else 0


def _folder_lines_size(text: str) -> int:
    """All of a text if each line could be one of a folder's listing."""
    lines = text.split("\n", _MAX_FOLDER_LINES)
    are_known = len(lines) < _MAX_FOLDER_LINES and all(
        not line or any(p.fullmatch(line) for p in _FOLDER_LINES) for line in lines
    )
    return len(text) if are_known else 0


def is_opaque_id(value: str) -> bool:
    """Whether an id is short and holds no words: digits or hex, behind a short name."""
    return _OPAQUE_ID.fullmatch(value) is not None


GRAMMARS: dict[str, Callable[[str], int]] = {
    "runtime": _runtime_size,
    "message_id": _message_id_size,
    "clock": _clock_size,
    "date_sentence": _date_sentence_size,
    "git_status": _git_status_size,
    "git_lines": _git_lines_size,
    "git_prompt": _git_prompt_size,
    "folder_lines": _folder_lines_size,
}
