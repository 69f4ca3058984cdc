"""
Questions whose answer is a value that drifted, each behind a long history.

The values stand where clients write them, so that the rules (volatile/rules.toml) find
them. A conversation has several values; each of its questions is about another one, and
only that one drifts. Everything is decided by a seed.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sidecar.cli.agent import WORDS
from sidecar.cli.server import Json

_PAGE_WORDS = 60


@dataclass(frozen=True, slots=True)
class DriftingValue:
    """
    A value that drifts.

    Args:
        rule: the kind of the rule that finds it.
        moves: the newer value stands in the newest message, and the older one is gone
            from its place; else the newer value stands in the older one's place.
    """

    name: str
    rule: str
    question: str
    moves: bool = False


KINDS = (
    DriftingValue(
        "time",
        "current_time",
        "What is the current time? Answer with hours and minutes alone, as HH:MM.",
    ),
    DriftingValue(
        "branch",
        "git_status",
        "Which git branch is the current one? Answer with its name alone.",
    ),
    DriftingValue(
        "message id",
        "message_id",
        "What is the message_id now? Answer with it alone.",
    ),
    DriftingValue(
        "folder",
        "folder_tree",
        "Which folder is there in /work now? Answer with its name alone.",
    ),
    DriftingValue(
        "file list",
        "git_status",
        "Which file does git list as modified now? Answer with its name alone.",
    ),
    DriftingValue(
        "sender",
        "conversation_info",
        "Who sent this message? Answer with the name alone.",
        moves=True,
    ),
)


@dataclass(frozen=True, slots=True)
class QualityQuestion:
    """
    A question about a value that drifted.

    Args:
        conversation: its name; the questions of one follow one another.
        before: messages of the request that has the older value.
        after: messages of the one that has the newer value and asks for it.
        num_words: words of the history, which stand behind the value.
    """

    conversation: str
    kind: DriftingValue
    older: str
    newer: str
    before: Sequence[Json]
    after: Sequence[Json]
    num_words: int


def make_questions(num_questions: int, depth: int, seed: int) -> list[QualityQuestion]:
    """The kinds take turns; at least `depth` words stand between value and question."""
    return [_question(number, depth, seed) for number in range(num_questions)]


def _question(number: int, depth: int, seed: int) -> QualityQuestion:
    conversation, index = divmod(number, len(KINDS))
    name, kind = f"quality-{seed}-{conversation}", KINDS[index]
    rng = random.Random(name)
    older, newer = _drawn(rng)
    pages = [_page(rng) for _ in range(-(-depth // _PAGE_WORDS))]
    if kind.moves:  # it goes with the newest message alone: that one is long
        name, pages = f"{name}-moves", ["\n".join(pages)]
    else:
        older |= {kind.name: "" for kind in KINDS if kind.moves}
    now = {**older, kind.name: "" if kind.moves else newer[kind.name]}
    asked = _sender(newer[kind.name]) if kind.moves else ""
    return QualityQuestion(
        name,
        kind,
        older[kind.name],
        newer[kind.name],
        _history(name, older, pages),
        [
            *_history(name, now, pages),
            _noted(len(pages)),
            {"role": "user", "content": asked + kind.question},
        ],
        len(" ".join(pages).split()),
    )


def _drawn(rng: random.Random) -> list[dict[str, str]]:
    """The older values by kind, then the newer ones; none comes twice."""
    minutes = sorted(rng.sample(range(60, 24 * 60), 2))
    ids, names = rng.sample(range(1 << 20, 1 << 24), 2), rng.sample(_NAMES, 8)
    return [
        {
            "time": f"{minutes[at] // 60:02}:{minutes[at] % 60:02}",
            "message id": f"{ids[at]:06x}",
            **dict(zip(_NAMED, names[at::2], strict=True)),
        }
        for at in range(2)
    ]


def _history(name: str, values: Mapping[str, str], pages: Sequence[str]) -> list[Json]:
    """Up to the last page, not yet answered."""
    sender = values["sender"] and _sender(values["sender"])
    messages: list[Json] = [
        {"role": "system", "content": _SYSTEM % {**values, "name": name}}
    ]
    for number, page in enumerate(pages, 1):
        first = sender + _FOLDER % values if number == 1 else ""
        said = f"{first}Page {number} of the notes:\n{page}"
        messages += [{"role": "user", "content": said}, _noted(number)]
    return messages[:-1]


def _noted(number: int) -> Json:
    return {"role": "assistant", "content": f"Page {number} is noted."}


def _page(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=_PAGE_WORDS)
    lines = (words[at : at + 12] for at in range(0, _PAGE_WORDS, 12))
    return "\n".join(" ".join(line) for line in lines)


def _sender(name: str) -> str:
    return f'Sender (untrusted metadata):\n```json\n{{"name": "{name}"}}\n```\n\n'


_SYSTEM = """\
You are %(name)s. You help a developer in a terminal and keep the notes you are given.

{"channel": "terminal", "message_id": "%(message id)s"}
Current time: 2026-11-20T%(time)s:00Z

gitStatus: This is the git status at the start of the conversation. Note that this \
status is a snapshot in time, and will not update during the conversation.

Current branch: %(branch)s

Main branch (you will usually use this for PRs): main

Status:
 M %(file list)s.py

Recent commits:
81fd826 Start

# How to answer

- Answer with what holds now, as you were told last.
- Answer in one line, without an explanation.
- Copy names, numbers and times letter by letter.
"""
_FOLDER = """\
<system-reminder>
Here is the folder structure of the current working directories:

/work/
├───%(folder)s/
└───setup.py
</system-reminder>
"""
_NAMED = ("branch", "folder", "file list", "sender")
_NAMES = (
    "alder",
    "birch",
    "cedar",
    "cypress",
    "dogwood",
    "ebony",
    "elder",
    "hazel",
    "hickory",
    "juniper",
    "larch",
    "laurel",
    "linden",
    "magnolia",
    "maple",
    "mulberry",
    "myrtle",
    "poplar",
    "redwood",
    "rowan",
    "sequoia",
    "spruce",
    "sycamore",
    "willow",
)
