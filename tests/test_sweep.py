"""The sweep of architectures (docs/models.md), on one that reads and one that sees."""

from tools.sweep_architectures import row, run_apart, text_architectures
from tools.tiny_seeing import seeing_architectures

_WAYS = [
    "chunks", "restore", "lend", "trim", "branch", "checkpoint", "disk", "batch",
    "ahead", "verify",
]  # fmt: skip


def test_it_finds_what_there_is() -> None:
    assert {"llama", "qwen3", "gemma2", "gpt_oss"} <= set(text_architectures())
    assert {"qwen2_5_vl", "gemma3", "pixtral"} <= set(seeing_architectures())


def test_one_that_reads() -> None:
    tried = run_apart("llama", "text")
    assert (tried.outcome, tried.passed, tried.failed) == ("made", _WAYS, {})
    assert row(tried).startswith("| llama | text | ")


def test_one_that_sees() -> None:
    tried = run_apart("qwen2_vl", "vision")
    assert tried.vision_encoder
    assert tried.passed == [*_WAYS, "images"]


def test_one_whose_batch_is_wrong() -> None:
    tried = run_apart("gemma2", "text")
    assert tried.passed == [way for way in _WAYS if way != "batch"]
    assert list(tried.failed) == ["batch"]
