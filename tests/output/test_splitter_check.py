"""The check of a loaded model's splitter: what it lets pass, and what it finds."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from sidecar.output.families import OutputSyntax, find_family, output_syntax
from sidecar.output.reasoning_splitter import Markers, Span, Splitter
from sidecar.output.splitter_check import splitter_faults
from testkit.real_templates import BY_NAME
from tests.output.test_native_formats import syntax_of

PLAIN = output_syntax(find_family(None, "m", "m"), None, None)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_syntaxes_of_all_families_pass(name: str) -> None:
    assert splitter_faults(syntax_of(name)) == ()


def test_a_call_that_begins_like_thinking_is_found() -> None:
    """Two meanings of one tag: the answer would be lost, or be thought."""
    tools = replace(PLAIN.tools, opener="<think>", closer="</think>")
    faults = splitter_faults(replace(PLAIN, tools=tools))
    assert any(fault.startswith("an answer and a call: ") for fault in faults)


def test_a_call_that_begins_where_thinking_ends_is_found() -> None:
    """The call would be shown as text."""
    markers = Markers("<think>", PLAIN.tools.opener)
    faults = splitter_faults(replace(PLAIN, markers=markers))
    assert any(fault.startswith("a call in thinking: ") for fault in faults)


@dataclass
class _Forgetful:
    """A splitter that does not wait for the rest of a tag."""

    inner: Splitter

    @property
    def is_reasoning(self) -> bool:
        return self.inner.is_reasoning

    @property
    def held_space(self) -> str:
        return self.inner.held_space

    def feed(self, text: str) -> list[Span]:
        return self.inner.feed(text.removesuffix("<"))

    def flush(self) -> tuple[list[Span], str]:
        return self.inner.flush()


class _Broken(OutputSyntax):
    """Its splitter fails only where a tag is cut behind its first letter."""

    def new_splitter(self, *args: Any, **kwargs: Any) -> Splitter:
        return _Forgetful(super().new_splitter(*args, **kwargs))


def test_a_fault_at_a_single_cut_is_found_and_named() -> None:
    """With the pieces that show it and both results."""
    broken = _Broken(PLAIN.family, PLAIN.markers, PLAIN.tools)
    (fault, *_) = splitter_faults(broken)
    assert fault.startswith("thinking: ['<', 'think>r</think>\\nans'] gave")
    assert "instead of ('r', 'ans', '')" in fault


def test_of_channels_a_lost_end_is_found() -> None:
    """They have no tags, and outputs of their own."""
    channels = syntax_of("gpt-oss")
    broken = _Broken(channels.family, channels.markers, channels.tools, True)
    assert splitter_faults(channels) == ()
    assert splitter_faults(broken)
