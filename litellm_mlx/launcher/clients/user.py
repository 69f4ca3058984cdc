"""Who starts a client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class User:
    """
    Who starts a client.

    Args:
        home: his folder. own: one of ours, which nobody else reads.
        environ: his environment. arguments: what he gives the client.
    """

    home: Path
    own: Path
    environ: Mapping[str, str]
    arguments: Sequence[str] = ()
