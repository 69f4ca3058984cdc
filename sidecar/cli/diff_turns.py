"""
Shows where two prompts of a session log first differ.

    mlx-sidecar diff-turns logs/2026-11-21/cache-session-2f1c07b2b2ab6f44.log
"""

import argparse
import os
import sys
from pathlib import Path

from sidecar.cli.log_blocks import PromptBlock, read_prompts

_WINDOW_CHARS = 40
_COMPARED = (
    ("match", "match_type"),
    ("prompt tokens", "prompt_tokens"),
    ("reused", "matched_prefix_len"),
    ("reused without pins", "strict_prefix_len"),
    ("pinned", "pinned"),
    ("restated", "restated"),
    ("stopped by", "stopped_by"),
    ("spliced turns", "spliced_turns"),
    ("changes", "changes"),
)


class _NotInFile(Exception):
    """What was asked for is not in the file."""


def main(argv: list[str]) -> int:
    """Exit codes: 0 one prompt extends the other, 1 they part, 2 bad usage."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.from_id is None) != (options.to_id is None):
        parser.error("--from and --to go together")
    if options.last and options.from_id is not None:
        parser.error("--last does not go with --from and --to")
    try:
        blocks = read_prompts(options.file)
        before, after = _chosen(blocks, options.from_id, options.to_id)
    except (OSError, _NotInFile) as error:
        sys.stderr.write(f"diff-turns: {error}\n")
        return 2
    sys.stdout.write(_meta_table(before, after) + "\n")
    if before.prompt is None or after.prompt is None:
        sys.stderr.write("diff-turns: no prompts in this log (LOG_CONTENT=false)\n")
        return 2
    shared = len(os.path.commonprefix([before.prompt, after.prompt]))
    sys.stdout.write(_difference(before.prompt, after.prompt, shared) + "\n")
    return 0 if shared in (len(before.prompt), len(after.prompt)) else 1


def _chosen(
    blocks: list[PromptBlock], from_id: str | None, to_id: str | None
) -> tuple[PromptBlock, PromptBlock]:
    if from_id is not None and to_id is not None:
        by_id = {block.request_id: block for block in blocks}
        missing = [wanted for wanted in (from_id, to_id) if wanted not in by_id]
        if missing:
            raise _NotInFile(f"no prompt of request {', '.join(missing)} in this file")
        return by_id[from_id], by_id[to_id]
    if len(blocks) < 2:
        raise _NotInFile(f"two prompts are needed, this file has {len(blocks)}")
    return blocks[-2], blocks[-1]


def _meta_table(before: PromptBlock, after: PromptBlock) -> str:
    rows = [
        ("", "from", "to"),
        ("request", before.request_id, after.request_id),
        ("time", before.time, after.time),
        *(
            (label, _value(before, name), _value(after, name))
            for label, name in _COMPARED
        ),
    ]
    width = max(len(row[1]) for row in rows)
    lines = [f"{label:<21}{old:<{width}}  {new}" for label, old, new in rows]
    place = after.meta.get("divergence")
    if place:
        lines.append(
            f"The server saw `to` part from the closest prompt before it in message "
            f"{place['message']} ({place['role']})."
        )
    return "\n".join([*lines, ""])


def _value(block: PromptBlock, name: str) -> str:
    value = block.meta.get(name)
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "-"
    return "-" if value is None else str(value)


def _difference(before: str, after: str, shared: int) -> str:
    if shared == len(before) == len(after):
        return f"The prompts are equal: {shared} characters."
    if shared == len(before):
        return f"`to` extends `from`: all of its {shared} characters, and then\n  " + (
            _window(after, shared)
        )
    if shared == len(after):
        return f"`to` is the beginning of `from`: {shared} characters."
    line = before.count("\n", 0, shared) + 1
    return (
        f"First difference at character {shared} of {len(after)}, line {line} "
        f"({shared / len(after):.0%} is shared):\n"
        f"  from  {_window(before, shared)}\n  to    {_window(after, shared)}"
    )


def _window(text: str, at: int) -> str:
    """Characters on both sides of a place."""
    left, right = text[max(0, at - _WINDOW_CHARS) : at], text[at : at + _WINDOW_CHARS]
    return f"{left!r} | {right!r}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar diff-turns",
        description="Shows where two prompts of a session log first differ.",
    )
    parser.add_argument("file", type=Path, help="a cache-session-*.log under LOG_ROOT")
    parser.add_argument("--from", dest="from_id", metavar="REQUEST_ID")
    parser.add_argument("--to", dest="to_id", metavar="REQUEST_ID")
    parser.add_argument(
        "--last", action="store_true", help="the last two prompts (the default)"
    )
    return parser
