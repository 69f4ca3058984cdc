"""Answers on the disk: each is whole, and none is there twice."""

import errno
import json
import os
from pathlib import Path

import pytest

from sidecar.service.batches.batch_lines import AnswerFile


def _answer(name: str, text: str = "x") -> dict[str, str]:
    return {"custom_id": name, "text": text}


def test_a_line_that_was_broken_off_is_cut_away(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = AnswerFile(path)
    file.append([_answer("a"), _answer("b", "y" * 50)])
    file.close()
    whole = path.read_bytes()
    ends = [whole.index(b"\n") + 1, len(whole)]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        again = AnswerFile(path)
        num_whole = sum(end <= length for end in ends)
        assert len(again.answered) == num_whole
        again.append([_answer("c")])
        again.close()
        names = [json.loads(line)["custom_id"] for line in path.read_text().split()]
        assert names == [*"ab"[:num_whole], "c"]


def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AnswerFile(tmp_path / "out.jsonl")
    file.append([_answer("a")])

    def full(_number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            file.append([_answer("b")])
    file.append([_answer("c")])
    file.close()
    again = AnswerFile(tmp_path / "out.jsonl")
    again.close()
    assert again.answered == {"a", "c"}
