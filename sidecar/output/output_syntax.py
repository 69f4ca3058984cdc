"""What marks thinking and calls in the text of one model."""

from dataclasses import dataclass
from typing import Literal

from sidecar.output.calls.call_sink import Format, ToolSyntax

StartMode = Literal["on", "off", "undecided"]


@dataclass(frozen=True, slots=True)
class Markers:
    """
    The tags of one model.

    Args:
        think_open, think_close: compared without regard to ASCII case.
    """

    think_open: str = "<think>"
    think_close: str = "</think>"


@dataclass(frozen=True, slots=True)
class Family:
    """
    One row of the family table.

    Args:
        always_reasons: its templates open the think block and close it without ever
            printing the opening tag.
        stop_tokens: end-of-turn tokens beside the tokenizer's own.
    """

    name: str
    always_reasons: bool
    stop_tokens: tuple[str, ...]
    formats: tuple[Format, ...]


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """
    The output side of one loaded model; computed once.

    Args:
        calls: how it writes calls, its own way first.
        opener_ids: the tokens that begin one; none where its own opener is no token.
        has_channels: it writes messages on channels, and no tags.
    """

    family: Family
    markers: Markers
    calls: tuple[ToolSyntax, ...]
    has_channels: bool = False
    opener_ids: tuple[int, ...] = ()
