"""Reads the prompts of a session log (written by infra/session_log.py)."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HEAD = re.compile(r"\[(?P<time>[^\]]*)\] request_id=(?P<id>.*) direction=prompt")


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """
    One request as the log has it.

    Args:
        meta: the request_meta. prompt: what the model read, None without LOG_CONTENT.
    """

    request_id: str
    time: str
    meta: dict[str, Any]
    prompt: str | None


def read_prompts(file: Path) -> list[PromptBlock]:
    """
    All prompt blocks in order; one that is not whole is left out.

    Raises:
        OSError: the file cannot be read.
    """
    # Only "\n" ends a line: prompts may hold every other line end there is.
    lines = file.read_bytes().decode("utf-8", "replace").split("\n")
    blocks = []
    for head, body in zip(lines, lines[1:], strict=False):
        match = _HEAD.fullmatch(head)
        block = match and _block(match, body)
        if block:
            blocks.append(block)
    return blocks


def _block(head: re.Match[str], body: str) -> PromptBlock | None:
    try:
        content = json.loads(body)
        meta = content["request_meta"]
    except (ValueError, KeyError, TypeError):
        return None
    return PromptBlock(head["id"], head["time"], meta, content.get("prompt"))
