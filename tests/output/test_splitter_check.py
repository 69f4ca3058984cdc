"""The check of a loaded model's splitter: what it lets pass, and what it finds."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from sidecar.output import splitter_check
from sidecar.output.families import find_family, output_syntax
from sidecar.output.output_syntax import Markers
from sidecar.output.pieces import Piece, Splitter
from sidecar.output.reasoning_splitter import new_splitter
from sidecar.output.splitter_check import splitter_faults
from testkit.real_templates import BY_NAME
from tests.output.test_native_formats import syntax_of

PLAIN = output_syntax(find_family(None, "m", "m"), None, None)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_syntaxes_of_all_families_pass(name: str) -> None:
    assert splitter_faults(syntax_of(name)) == ()


def test_a_call_that_begins_like_thinking_is_found() -> None:
    """Two meanings of one tag: the answer would be lost, or be thought."""
    own = replace(PLAIN.calls[0], opener="<think>", closer="</think>")
    faults = splitter_faults(replace(PLAIN, calls=(own,)))
    assert any(fault.startswith("an answer and a call: ") for fault in faults)


def test_a_call_that_begins_where_thinking_ends_is_found() -> None:
    """The call would be shown as text."""
    markers = Markers("<think>", PLAIN.calls[0].opener)
    faults = splitter_faults(replace(PLAIN, markers=markers))
    assert any(fault.startswith("a call in thinking: ") for fault in faults)


@dataclass
class _Forgetful:
    """A splitter that does not wait for the rest of a tag."""

    inner: Splitter

    @property
    def is_reasoning(self) -> bool:
        return self.inner.is_reasoning

    def feed(self, text: str) -> list[Piece]:
        return self.inner.feed(text.removesuffix("<"))

    def flush(self, *, is_cut: bool) -> tuple[list[Piece], bool]:
        return self.inner.flush(is_cut=is_cut)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splitters fail only where a tag is cut behind its first letter."""

    def make(*args: Any, **kwargs: Any) -> Splitter:
        return _Forgetful(new_splitter(*args, **kwargs))

    monkeypatch.setattr(splitter_check, "new_splitter", make)


@pytest.mark.usefixtures("broken")
def test_a_fault_at_a_single_cut_is_found_and_named() -> None:
    """With the pieces that show it and both results."""
    (fault, *_) = splitter_faults(PLAIN)
    assert fault.startswith("thinking: ['<', 'think>r</think>\\nans'] gave")
    assert "instead of ('r', 'ans', '')" in fault


@pytest.mark.usefixtures("broken")
def test_of_channels_a_lost_end_is_found() -> None:
    """They have no tags, and outputs of their own."""
    assert splitter_faults(syntax_of("gpt-oss"))
