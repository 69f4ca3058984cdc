"""The pipeline's part of the configuration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """The pipeline's part of the configuration."""

    default_thinking: bool
    preserve_thinking: bool
    canonicalize: bool
    pinning: bool
    splicing: bool
    min_gain: int
    use_block_index: bool
    record_ttl_s: float
    session_idle_s: float
    healing_entries: int
    healing_bytes: int
    verify: bool = False
