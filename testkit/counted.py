"""What a prefix cache could save in the recorded traffic, as counted elsewhere."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counted:
    """
    Tokens to prefill in all requests of a trace but the first, as counted elsewhere.

    By the program that made the traces; tests/fixtures/traces/README.md says how.

    Args:
        prompt: all tokens of these prompts.
        exact: to prefill, if only equal prefixes are reused.
        pinned: to prefill, if volatile values are pinned and answers spliced too.
    """

    prompt: int
    exact: int
    pinned: int


COUNTED = {
    "claude-2.1.157-print": Counted(256935, 256674, 656),
    "claude-2.1.157-terminal": Counted(545616, 545124, 54763),
    "claude-2.1.328-print": Counted(388687, 20628, 19692),
    "claude-2.1.75-print": Counted(613415, 165242, 36321),
    "openclaw-2026.6.11-group": Counted(621530, 97349, 36608),
    "openclaw-2026.9.6-local": Counted(273717, 3147, 3134),
    "opencode-1.18.33": Counted(240069, 19437, 18404),
    "pi-0.73.1": Counted(36201, 1481, 752),
    "pi-0.87.1": Counted(37527, 1491, 747),
    "qwen-0.24.4": Counted(638242, 105291, 40996),
}
