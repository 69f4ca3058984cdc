"""How right a model's answers were, by kind and policy: counted, printed, drawn."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sidecar.cli.quality_questions import KINDS, DriftingValue, QualityQuestion
from sidecar.cli.server import Json, Reply
from sidecar.volatile.rules import load_rules

POLICIES = ("stop", "pin", "restate")

_SIGMAS = 1.96  # 95 of 100 intervals hold the true share
_BAR = 30


@dataclass(frozen=True, slots=True)
class QualityAnswer:
    """
    What a model said to a question under a policy.

    Args:
        before_len: tokens of the prompt that had the older value.
    """

    question: QualityQuestion
    policy: str
    before_len: int
    reply: Reply

    @property
    def is_right(self) -> bool:
        """Whether it says the newer value, and not the older one."""
        return self._says(self.question.newer) and not self._says(self.question.older)

    @property
    def is_older(self) -> bool:
        """Whether it says the older value, and not the newer one."""
        return self._says(self.question.older) and not self._says(self.question.newer)

    @property
    def is_in_force(self) -> bool:
        """
        Whether the server did with the older value what the policy says.

        Where reuse ends at a value, at least a token for each word behind it is left.
        """
        max_before_value = self.before_len - self.question.num_words
        is_beyond = self.reply.cached_len > max_before_value
        is_pinned = self.question.kind.rule in self.reply.pinned
        return is_beyond == is_pinned == (self.policy != "stop")

    @property
    def text(self) -> str:
        """What was said, without thinking."""
        return str(self.reply.message["content"]).strip()

    def _says(self, value: str) -> bool:
        pattern = rf"\b{re.escape(value)}\b"
        return re.search(pattern, self.text, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class Score:
    """Answers of one kind (or of `all`) under one policy; those in force count."""

    kind: str
    policy: str
    is_default: bool
    num_asked: int
    num_right: int
    num_older: int

    @property
    def share(self) -> float:
        """Of right answers; 0 of none."""
        return self.num_right / max(1, self.num_asked)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share is, 95 % sure (Wilson's score interval)."""
        return wilson(self.num_right, self.num_asked)


def wilson(num_right: int, num_asked: int) -> tuple[float, float]:
    """
    The interval that holds the true share, 95 % sure; 0 to 1 if none was asked.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical
    inference, 1927.
    """
    if not num_asked:
        return 0.0, 1.0
    share, square = num_right / num_asked, _SIGMAS**2 / num_asked
    spread = math.sqrt(share * (1 - share) * square + square**2 / 4)
    low, high = (share + square / 2 + sign * spread for sign in (-1, 1))
    return max(0.0, low / (1 + square)), min(1.0, high / (1 + square))


def applies(policy: str, kind: DriftingValue) -> bool:
    """
    Whether a kind of value can be treated by a policy.

    A value that moved to the newest message is never restated: it is said there, and
    nothing true can be said of its older place behind it.
    """
    return policy != "restate" or not kind.moves


def score(answers: Sequence[QualityAnswer]) -> list[Score]:
    """By kind and policy, then all kinds by policy."""
    rules = load_rules()
    counted = [answer for answer in answers if answer.is_in_force]
    scores = []
    for kind in KINDS:
        default = rules.policy(kind.rule)
        chosen = default.gone if kind.moves else default.differ
        own = [a for a in counted if a.question.kind is kind]
        scores += [
            _score(kind.name, p, p == chosen, own) for p in POLICIES if applies(p, kind)
        ]
    return scores + [_score("all", p, False, counted) for p in POLICIES]


def _score(
    kind: str, policy: str, is_default: bool, answers: Sequence[QualityAnswer]
) -> Score:
    own = [answer for answer in answers if answer.policy == policy]
    num_right = sum(answer.is_right for answer in own)
    num_older = sum(answer.is_older for answer in own)
    return Score(kind, policy, is_default, len(own), num_right, num_older)


def table(scores: Sequence[Score]) -> str:
    """A line for each kind and policy, with a bar."""
    head = f"{'kind':<11}{'policy':<10}{'right':>9}{'':>8}  {'95 % interval':<15}"
    lines = [f"{head}{'older said':>10}"]
    for one in scores:
        low, high = one.interval
        kind = one.kind if one.policy == POLICIES[0] else ""
        lines.append(
            f"{kind:<11}{one.policy + (' *' if one.is_default else ''):<10}"
            f"{f'{one.num_right}/{one.num_asked}':>9}{one.share:>8.1%}"
            f"  {f'{low:.1%} - {high:.1%}':<15}{one.num_older:>10}  |{_bar(one)}|"
        )
    return "\n".join([*lines, "* the kind's default policy;  # right, - the interval"])


def _bar(score: Score) -> str:
    low, high = score.interval
    cells = [(number + 0.5) / _BAR for number in range(_BAR)]
    return "".join(
        "-" if low <= cell <= high else "#" if cell < score.share else " "
        for cell in cells
    )


def draw(scores: Sequence[Score], file: Path) -> None:
    """
    Write a PNG: right answers by kind, a bar for each policy, with its interval.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(10, 4))
    kinds = list(dict.fromkeys(one.kind for one in scores))
    for number, policy in enumerate(POLICIES):
        own = [one for one in scores if one.policy == policy]
        places = [kinds.index(one.kind) + (number - 1) * 0.27 for one in own]
        errors = [
            [max(0.0, one.share - one.interval[0]) for one in own],
            [max(0.0, one.interval[1] - one.share) for one in own],
        ]
        shares = [one.share for one in own]
        axis.bar(places, shares, 0.25, yerr=errors, capsize=2, label=policy)
    axis.set_xticks(range(len(kinds)), kinds)
    axis.set_ylim(0, 1.05)
    axis.set_ylabel("right answers, with 95 % intervals")
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def score_json(one: Score) -> Json:
    """A score for a file."""
    low, high = one.interval
    return {
        "kind": one.kind,
        "policy": one.policy,
        "is_default": one.is_default,
        "asked": one.num_asked,
        "right": one.num_right,
        "older": one.num_older,
        "low": low,
        "high": high,
    }


def answer_json(answer: QualityAnswer) -> Json:
    """An answer for a file, and what it was judged by."""
    question, reply = answer.question, answer.reply
    return {
        "conversation": question.conversation,
        "kind": question.kind.name,
        "policy": answer.policy,
        "older": question.older,
        "newer": question.newer,
        "said": answer.text,
        "right": answer.is_right,
        "in_force": answer.is_in_force,
        "prompt_tokens": reply.prompt_len,
        "cached_tokens": reply.cached_len,
        "pinned": reply.pinned,
    }
