"""
What a random model is made to write: an end of its thinking, which it never samples.

A model whose answer is all thinking has nothing that a client would send back. So a
few tokens are forced: what opens a thought, if the prompt has not, and what ends it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sidecar.pipeline.prepare import PreparedPrompt
from testkit.real_templates import Family

_CHANNELS = (
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)


@dataclass(frozen=True, slots=True)
class Script:
    """
    The tokens around a thought.

    Args:
        opened, closed: as text, and their ids. is_needed: no answer is seen without;
            is_expected: nor is one where thinking is on.
    """

    opened: str
    closed: str
    opened_ids: tuple[int, ...]
    closed_ids: tuple[int, ...]
    is_needed: bool = False
    is_expected: bool = False

    @property
    def num_tokens(self) -> int:
        """How many an answer needs beyond what it says."""
        return len(self.opened_ids) + len(self.closed_ids) + 2

    def forced(self, prompt: PreparedPrompt) -> dict[int, int]:
        """The tokens by step: the same for the same prompt."""
        chance = len(prompt.model_ids)
        is_begun = self.begins(prompt.text)
        may_be_silent = chance % 3 == 0 and not self.is_expected
        is_silent = not prompt.thinking or may_be_silent
        if is_silent and not (is_begun or self.is_needed):
            return {}
        before = () if is_begun else self.opened_ids
        start = len(before) + 1 + chance % 2
        return {
            **dict(enumerate(before)),
            **dict(enumerate(self.closed_ids, start)),
        }

    def begins(self, prompt: str) -> bool:
        """Whether a prompt ends inside a thought."""
        opened = self.opened.strip()
        return bool(opened) and prompt.rstrip().endswith(opened)

    def split(self, raw: str, prompt: str) -> tuple[str, str]:
        """The thought and the answer in what was written behind a prompt."""
        opened = self.opened.strip()
        is_inside = self.begins(prompt)
        if not is_inside and not raw.lstrip().startswith(opened):
            return "", raw
        inside = raw if is_inside else raw.lstrip()[len(opened) :]
        thought, _, answer = inside.partition(self.closed.strip())
        return thought, answer


def script_of(
    family: Family | None, ids_of: Callable[[str], list[int]]
) -> Script | None:
    """What a family's model writes around its thoughts; None: it has none."""
    if family is None or family.think is None:
        return None
    opened, closed = _CHANNELS if family.whole is not None else family.think
    return Script(
        opened, closed, tuple(ids_of(opened)), tuple(ids_of(closed)),
        is_needed=family.whole is not None, is_expected=family.name.startswith("glm"),
    )  # fmt: skip
