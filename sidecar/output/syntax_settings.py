"""What people set of how a model's output is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What each may be: keys of FAMILY_ALIASES, TOOL_PARSERS and REASONING_PARSERS.
NAMES: Mapping[str, Sequence[str]] = {
    "family": (
        "qwen",
        "qen3",
        "glm",
        "glm-4",
        "qwen3",
        "glm4",
        "generic",
    ),
    "tool_parser": (
        "hermes_json",
        "qwen3_coder_xml",
        "glm4_native",
        "glm4_xml",
        "llama",
        "liquid_python",
        "tool_code",
        "mistral",
        "devstral",
        "gemma",
        "gemma4",
        "kimi_k2",
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "minimax_m2",
        "minimax_m3",
        "seed",
        "cohere_action",
        "longcat",
        "nemotron",
        "granite",
    ),
    "reasoning_parser": (
        "think",
        "thinking",
        "reasoning",
        "reflection",
        "mistral",
        "seed",
        "minimax_m3",
        "cohere",
    ),
}


@dataclass(frozen=True, slots=True)
class SyntaxSettings:
    """
    What people set of a model's output; None: it is found out.

    Args:
        family, tool_parser, reasoning_parser: one of NAMES each.
    """

    family: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
